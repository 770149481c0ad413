"""Weights of linear layers: each scheme knows the checkpoint's tensors, this rank's storage, and the product. Start with `weight.py`."""
