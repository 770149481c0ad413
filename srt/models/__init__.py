"""A file for each model family; `decoder.py` is what they share, `registry.py` maps architectures to them."""
