"""Which operations a model's layers use: own kernels on a GPU, PyTorch elsewhere."""

from __future__ import annotations

import torch

from srt.layers.ops import TORCH_OPS, LayerOps


def layer_ops(device: torch.device) -> LayerOps:
    """Kernels where there is a GPU for them, else PyTorch."""
    if device.type != "cuda":
        return TORCH_OPS
    # Triton is not there on every host; with PyTorch for CUDA it is.
    from srt.layers.kernel_ops import KernelOps

    return KernelOps(device)
