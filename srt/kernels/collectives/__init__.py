"""Sums and gathers over the GPUs of a host, by memory that they map from each other."""
