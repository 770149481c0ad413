"""The building blocks of models, in plain PyTorch and with our kernels (`kernel_ops.py`). `attention/` has a file for each backend."""
