"""Groups of ranks, their collectives, and GPU memory that ranks map from each other. Start with `parallel_state.py`."""
