"""Logprobs of rows of logits, each computed alike whatever rows are beside it."""

from __future__ import annotations

from typing import Final

import torch
import triton.language as tl

from srt.kernels.build.jit import kernel

_BLOCK: Final = 4096
_SIGN: Final = 1 << 31
_LOW: Final = (1 << 32) - 1


@kernel(one_variant_for=("logits_ptr", "out_ptr", "row_stride", "num_columns"))
def row_logprobs_kernel(
    logits_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_stride: tl.tensor,
    num_columns: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Program r computes the logprobs of row r."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    logits, out = logits_ptr + row * row_stride, out_ptr + row * num_columns
    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, num_columns, BLOCK):
        columns = start + block
        peaks = tl.maximum(peaks, tl.load(logits + columns, mask=columns < num_columns, other=float("-inf")))
    peak = tl.max(peaks, 0)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        columns = start + block
        sums += tl.exp(tl.load(logits + columns, mask=columns < num_columns, other=float("-inf")) - peak)
    log_sum = tl.log(tl.sum(sums, 0))
    for start in range(0, num_columns, BLOCK):
        columns = start + block
        inside = columns < num_columns
        tl.store(out + columns, tl.load(logits + columns, mask=inside, other=0.0) - peak - log_sum, mask=inside)


def row_logprobs(logits: torch.Tensor) -> torch.Tensor:
    """Return the float32 log-softmax of each row of logits [rows, vocabulary] float32. Rows may be any stride apart."""
    num_rows, num_columns = logits.shape
    assert logits.dtype is torch.float32 and logits.stride(1) == 1, (logits.dtype, logits.stride())
    out = torch.empty((num_rows, num_columns), dtype=torch.float32, device=logits.device)
    if num_rows:
        row_logprobs_kernel[(num_rows,)](logits, out, logits.stride(0), num_columns, BLOCK=_BLOCK, num_warps=16)
    return out


def largest(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the columns [rows, count] int32 of each row's largest values float32, and the values. Of equal ones the first comes first."""
    bits = values.contiguous().view(torch.int32).to(torch.int64)
    ordered = torch.where(bits < 0, ~bits - _SIGN, bits)  # as the values are ordered
    columns = torch.arange(values.shape[1], device=values.device)
    keys = (ordered << 32) + (_LOW - columns)  # no two of a row are equal, so that their order is the only one
    found = _LOW - (keys.topk(count, dim=-1).values & _LOW)
    return found.to(torch.int32), values.gather(1, found)
