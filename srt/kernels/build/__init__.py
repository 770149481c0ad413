"""How kernels are compiled, ahead of their first launch where possible, and launched. Importing this package loads no GPU library."""
