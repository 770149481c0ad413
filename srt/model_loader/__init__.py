"""Read checkpoints: find the part of each tensor that a rank needs and copy it in. Start with `loader.py`."""
