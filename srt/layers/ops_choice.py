"""Choose the operations for a model's layers by the device: our kernels on a GPU, PyTorch elsewhere.

Which kernel a product gets on a GPU is decided by its number of rows, in kernel_ops.py.
"""

from __future__ import annotations

import torch

from srt.layers.ops import TORCH_OPS, LayerOps


def layer_ops(device: torch.device) -> LayerOps:
    """Return the operations with kernels for a GPU, those of PyTorch for other devices."""
    if device.type != "cuda":
        return TORCH_OPS
    # Imported here because Triton is installed only with PyTorch for CUDA.
    from srt.layers.kernel_ops import KernelOps

    return KernelOps(device)
