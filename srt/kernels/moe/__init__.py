"""Kernels for mixtures of experts: the router, the order of tokens by expert, and the products of the chosen experts."""
