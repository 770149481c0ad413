"""Mixtures of experts: the router, the experts' weights, and their products. `mixture.py` puts them together."""
