"""How much shared memory one program of a kernel may have: a launch that asks for more fails."""

from __future__ import annotations

from typing import Final

import torch

SHARED_BYTES: Final = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}
"""By compute capability: the A100, the A10 and 30xx, the L4, L40S and 40xx, the H100 and H200."""


def shared_bytes(device: torch.device) -> int:
    """Of this GPU. Triton's interpreter, on a CPU, knows no limit: there as Hopper's."""
    if device.type != "cuda":
        return SHARED_BYTES[90]
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]  # not in torch's stubs
