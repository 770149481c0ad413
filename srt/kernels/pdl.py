"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits for it only where it must.

Before `wait_for_inputs` a kernel may read constants (weights) alone; it writes nothing. Every program calls it, on every
path: a kernel that ends without having waited would let the next one overtake the last but one.
"""

from __future__ import annotations

from typing import Any

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


def pdl_options(pdl: bool) -> dict[str, Any]:
    """The arguments of a launch. `pdl` needs compute capability 9.0."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
