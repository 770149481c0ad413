"""The cap of attention's products, for kernels whose weights are powers of two."""

from __future__ import annotations

import triton.language as tl

from srt.kernels.build.jit import jit

LOG2_E = tl.constexpr(1.4426950408889634)


@jit
def soft_cap(scores: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """Return c * tanh(s / c) * log2(e) for scores s * log2(e), with c = SOFTCAP.

    Most scores are small beside the cap. There the difference of powers would lose their last digits, and a polynomial does not.
    """
    x = scores * (1.0 / (SOFTCAP * LOG2_E))
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    # Right at both ends too: there the power is 0 or infinite.
    far = 1.0 - 2.0 / (tl.exp2(scores * (2.0 / SOFTCAP)) + 1.0)
    return SOFTCAP * LOG2_E * tl.where(tl.abs(x) < 0.25, near, far)
