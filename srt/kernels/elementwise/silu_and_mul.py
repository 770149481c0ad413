"""The activations of gated MLPs: SiLU, and GELU by its approximation with tanh."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from srt.kernels.build.jit import kernel
from srt.kernels.build.pdl import let_next_start, let_next_start_late, pdl_options, wait_for_inputs

_BLOCK: Final = 1024


@kernel(one_variant_for=())
def silu_and_mul_kernel(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    IS_GELU: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (b, t) processes block b of row t."""
    let_next_start(PDL)
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    wait_for_inputs(PDL)
    gate = tl.load(gate_up_ptr + row * 2 * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * SIZE + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    let_next_start_late(PDL)
    slope = gate
    if IS_GELU:  # 0.5 (1 + tanh(z)) is sigmoid(2 z)
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    out = gate * tl.sigmoid(slope) * up
    tl.store(out_ptr + row * SIZE + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def silu_and_mul(gate_up: torch.Tensor, pdl: int = 0) -> torch.Tensor:
    """Return silu(gate) * up for the two halves of each row of gate_up [rows, 2 * size], which must be contiguous."""
    return _launch(gate_up, pdl, is_gelu=False)


def gelu_tanh_and_mul(gate_up: torch.Tensor, pdl: int = 0) -> torch.Tensor:
    """Do what `silu_and_mul` does with gelu(gate) in the place of silu(gate)."""
    return _launch(gate_up, pdl, is_gelu=True)


def _launch(gate_up: torch.Tensor, pdl: int, is_gelu: bool) -> torch.Tensor:
    num_rows, width = gate_up.shape
    assert gate_up.is_contiguous() and width % 2 == 0, (gate_up.shape, gate_up.stride())
    size = width // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    # The second axis of a grid is limited to 65,535.
    for first in range(0, num_rows, 65535):
        rows = slice(first, first + 65535)
        count = len(out[rows])
        silu_and_mul_kernel[(triton.cdiv(size, _BLOCK), count)](
            gate_up[rows], out[rows], IS_GELU=is_gelu, SIZE=size, BLOCK=_BLOCK, **pdl_options(pdl)
        )
    return out
