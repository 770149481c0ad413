"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits for it only where it must.

`PDL` of a launch is 0 (none), EARLY or LATE: whether the next kernel may start when this one does, or when it has its inputs. Early hides
more, but programs that start early are placed where there is room at that moment, not evenly; with many of them that costs more.

Before `wait_for_inputs` a kernel may read constants (weights) alone; it writes nothing. Some program of
every launch calls it: a kernel that ended without having waited would let the next one overtake the last but one.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton.language as tl

from srt.kernels.build.jit import jit

EARLY = tl.constexpr(1)  # what True is
LATE = tl.constexpr(2)


@jit
def let_next_start(PDL: tl.constexpr) -> None:
    """The next kernel may start once all programs of this one have come here; it will wait for their end by itself."""
    if PDL == EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@jit
def let_next_start_late(PDL: tl.constexpr) -> None:
    """The same for programs that have read what they need."""
    if PDL == LATE:
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


_MOST_EARLY_ROWS: Final = 4
_MOST_LATE_ROWS: Final = 64
"""Measured on an H200: with more rows it saves nothing."""


def has_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_for(num_rows: int) -> int:
    """What serves steps of so many rows best, where there is such a thing."""
    if num_rows <= _MOST_EARLY_ROWS:
        return int(EARLY)
    return int(LATE) if num_rows <= _MOST_LATE_ROWS else 0


def pdl_options(pdl: int) -> dict[str, Any]:
    """The arguments of a launch. Any `pdl` but 0 needs compute capability 9.0."""
    return {"PDL": int(pdl), "launch_pdl": True} if pdl else {"PDL": 0}
