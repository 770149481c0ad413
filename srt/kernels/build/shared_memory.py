"""Limits of shared memory per program: a launch that asks for more fails."""

from __future__ import annotations

from typing import Final

import torch

SHARED_BYTES: Final = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}
"""Limits by compute capability: A100; A10 and 30xx; L4, L40S and 40xx; H100 and H200."""


def shared_bytes(device: torch.device) -> int:
    """Return the limit of this GPU; on a CPU, where Triton's interpreter has no limit, that of Hopper."""
    if device.type != "cuda":
        return SHARED_BYTES[90]
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]  # not in torch's stubs
