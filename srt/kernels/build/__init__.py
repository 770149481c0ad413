"""Compile kernels, ahead of their first launch where possible, and launch them. Importing this package loads no GPU library."""
