"""What models are made of, as plain PyTorch and by own kernels (`kernel_ops.py`). `attention/` has a file for each backend."""
