"""Groups of ranks, their collectives, and memory that GPUs map from each other."""
