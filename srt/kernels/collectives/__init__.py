"""Sums and gathers over the GPUs of a host, through memory that they map from each other."""
