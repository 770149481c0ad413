"""RMSNorm of rows, with the addition to the residual stream that comes before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from srt.kernels.build.jit import kernel
from srt.kernels.build.pdl import let_next_start, let_next_start_late, pdl_options, wait_for_inputs


@kernel(one_variant_for=())
def rms_norm_kernel(
    x_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    delta_weight_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    delta_eps: float,
    eps: float,
    row_stride: tl.tensor,
    HAS_DELTA: tl.constexpr,
    HAS_DELTA_NORM: tl.constexpr,
    IS_PLUS_ONE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program r norms row r of x, or of x + delta, which it also stores in `sum_ptr`. Delta may be normed itself before."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    delta_weight = weight
    if HAS_DELTA_NORM:
        delta_weight = tl.load(delta_weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if IS_PLUS_ONE:
        weight += 1.0
        delta_weight += 1.0
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_DELTA_NORM:
            delta *= tl.rsqrt(tl.sum(delta * delta, 0) / SIZE + delta_eps) * delta_weight
            delta = delta.to(sum_ptr.dtype.element_ty).to(tl.float32)
        x += delta
        x = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * SIZE + columns, x, mask=inside)
        x = x.to(tl.float32)
    let_next_start_late(PDL)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * weight
    tl.store(out_ptr + row * SIZE + columns, normed.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, pdl: int = 0, is_plus_one: bool = False
) -> torch.Tensor:
    """Return x [rows, size] / rms * weight, or * (1 + weight), in the type of x. Rows may be any stride apart."""
    return _launch(x, None, weight, eps, pdl, is_plus_one, None, 0.0)[0]


def add_rms_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    pdl: int = 0,
    is_plus_one: bool = False,
    delta_weight: torch.Tensor | None = None,
    delta_eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the norm of x + delta, x + delta), both in the type of x. The norm is applied to the rounded sum.

    With `delta_weight`, delta is normed first, and rounded, as `rms_norm` does it.
    """
    return _launch(x, delta, weight, eps, pdl, is_plus_one, delta_weight, delta_eps)


def _launch(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    pdl: int,
    is_plus_one: bool,
    delta_weight: torch.Tensor | None,
    delta_eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, size = x.shape
    assert x.stride(1) == 1 and weight.shape == (size,), (x.stride(), weight.shape)
    assert delta is None or (delta.shape == x.shape and delta.is_contiguous()), x.shape
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    total = out if delta is None else torch.empty_like(out)
    if num_rows:
        block = triton.next_power_of_2(size)
        rms_norm_kernel[(num_rows,)](
            x, x if delta is None else delta, weight if delta_weight is None else delta_weight, weight, out, total,
            delta_eps, eps, x.stride(0),
            HAS_DELTA=delta is not None, HAS_DELTA_NORM=delta_weight is not None, IS_PLUS_ONE=is_plus_one, SIZE=size, BLOCK=block,
            num_warps=min(max(block // 512, 1), 16), **pdl_options(pdl),
        )  # fmt: skip
    return out, total
