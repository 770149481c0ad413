"""Programmatic dependent launch: a kernel starts while the previous one still runs, and waits for it only where it must.

The constant `PDL` of a launch is 0 (off), EARLY or LATE: the next kernel may start when this one starts, or when this one has read its
inputs. Early hides more latency. But programs that start early are placed wherever there is room at that moment, not evenly, and with
many programs that costs more than it gains.

Before `wait_for_inputs` a kernel may only read constants (weights); it must not write. At least one program of every launch must call
it: if a kernel ended without waiting, the next kernel could overtake the one before it.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton.language as tl

from srt.kernels.build.jit import jit

EARLY = tl.constexpr(1)  # equal to True
LATE = tl.constexpr(2)


@jit
def let_next_start(PDL: tl.constexpr) -> None:
    """Let the next kernel start once all programs of this one have called this; it waits for their end by itself."""
    if PDL == EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@jit
def let_next_start_late(PDL: tl.constexpr) -> None:
    """Let the next kernel start, in programs that have read their inputs, if the launch is LATE."""
    if PDL == LATE:
        tl.extra.cuda.gdc_launch_dependents()


@jit
def wait_for_inputs(PDL: tl.constexpr) -> None:
    """Wait until all previous kernels have ended and their writes can be read."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@jit
def prefetch(pointers: tl.tensor) -> None:
    """Prefetch the 128-byte lines at these addresses into the L2 cache. The interpreter does not support this."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


_MOST_EARLY_ROWS: Final = 4
_MOST_LATE_ROWS: Final = 64
"""Limit measured on an H200: with more rows a dependent launch saves nothing."""


def has_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_for(num_rows: int) -> int:
    """Return the fastest kind of dependent launch for steps of `num_rows` rows: EARLY, LATE or 0."""
    if num_rows <= _MOST_EARLY_ROWS:
        return int(EARLY)
    return int(LATE) if num_rows <= _MOST_LATE_ROWS else 0


def pdl_options(pdl: int) -> dict[str, Any]:
    """Return the launch options for `pdl`. Any value but 0 needs compute capability 9.0."""
    return {"PDL": int(pdl), "launch_pdl": True} if pdl else {"PDL": 0}
