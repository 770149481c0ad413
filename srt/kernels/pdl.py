"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits for it only where it must.

Before `wait_for_inputs` a kernel may read constants (weights) alone; it writes nothing. Some program of
every launch calls it: a kernel that ended without having waited would let the next one overtake the last but one.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton.language as tl

from srt.kernels.jit import jit


@jit
def let_next_start(PDL: tl.constexpr) -> None:
    """The next kernel may start once all programs of this one have come here; it will wait for their end by itself."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@jit
def wait_for_inputs(PDL: tl.constexpr) -> None:
    """Returns when all kernels before this one have ended, and what they wrote can be read."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@jit
def prefetch(pointers: tl.tensor) -> None:
    """Sends for the lines of 128 bytes that these addresses lie in; the reads that follow find them nearer. Not interpreted."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


MOST_ROWS: Final = 4
"""With more rows, programs that wait take more from those that work than they save: measured on an H200."""


def has_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_options(pdl: bool) -> dict[str, Any]:
    """The arguments of a launch. `pdl` needs compute capability 9.0."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
