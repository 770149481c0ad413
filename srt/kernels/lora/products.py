"""Products with the two matrices of LoRA adapters, each token with its own adapter's: y += B A x.

`shrink` computes A x, and `expand` adds the product of that with B. All adapters' matrices of a layer are stacked, so that a token names
its own by a number. Few tokens are taken one by one, or by adapter where `shared_shrink.py` has a kernel for that. More are sorted by
adapter, and each program takes a tile of tokens of one adapter. `expand_gated` goes on to the activation of gates and ups.
Programs of `shrink` take parts of the inputs; `expand` adds the parts in a fixed order, so the same step gives the same bits every time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton.language as tl

from srt.kernels.build.jit import cdiv, dot_dtype, jit, kernel, next_power_of_2
from srt.kernels.build.pdl import EARLY, let_next_start, let_next_start_late, pdl_options, wait_for_inputs
from srt.kernels.gemm.gemv import GemvTiles
from srt.kernels.lora.shared_shrink import shared_shrink
from srt.kernels.moe.expert_tiles import ExpertTiles

MOST_SINGLE_TOKENS: Final = 32
"""Up to this many tokens are taken one by one."""
_NUM_PARTS: Final = {16: 8, 32: 8, 64: 2}
"""Of the inputs, by rows of a tile."""
_BLOCK_OUTPUTS: Final = {1: 64, 16: 256, 32: 64, 64: 64}
"""Outputs of a program of `expand`, by rows of a tile; 1: tokens are taken one by one."""
_GATED_OUTPUTS: Final = {16: 128, 32: 64, 64: 64}
"""Outputs of a block of `expand_gated`, by rows of a tile."""
_BLOCKS_AT_ONCE: Final = {16: 1, 32: 2, 64: 2}
"""Blocks of outputs that a program of `expand` computes one after the other, by rows of a tile: it adds up the parts of A x once."""
_MOST_SINGLE_PARTS: Final = 64
_MOST_PARTS_OF_MORE: Final = 8
"""Parts of the inputs of tokens that are taken one by one; of more than `_FEW_TOKENS` tokens."""
_FEW_TOKENS: Final = 16
_FEWEST_SHARED_TOKENS: Final = 17
"""From this many tokens on, `shrink` reads each adapter's A once if it can."""
_BLOCK_LOW: Final = 64
_SINGLE_LAUNCH: Final = int(EARLY)
"""Kind of dependent launch of `shrink` for tokens that are taken one by one. The streamed product behind it fills each multiprocessor's
shared memory, so early programs have one place each, and load weights while A x is computed."""


@dataclass(frozen=True, slots=True)
class AdapterTokens:
    """Which adapter each token of a step has, as kernels need it."""

    numbers: torch.Tensor  # [tokens] i32; the number of adapters stands for none
    tiles: ExpertTiles | None
    """Tokens sorted by adapter, those without one at the end; None if they are taken one by one."""
    pdl: int = 0
    has_shared_shrink: bool = False
    """Whether the kernel of `shared_shrink.py` runs on the device."""

    @classmethod
    def sort(
        cls, numbers: torch.Tensor, num_adapters: int, pdl: int = 0, has_shared_shrink: bool = False
    ) -> AdapterTokens:
        """Sort the tokens by their adapters' numbers [tokens] i32. Never waits for the device."""
        count = len(numbers)
        if count <= MOST_SINGLE_TOKENS:
            return cls(numbers, None, pdl, has_shared_shrink)
        block_m = 16 if count <= 256 else 32 if count <= 1024 else 64
        return cls(numbers, ExpertTiles.sort(numbers[:, None], num_adapters + 1, block_m), pdl)


@dataclass(frozen=True, slots=True)
class StackedAdapters:
    """The matrices of all adapters for one merged layer. Its parts, such as q, k and v, have matrices of their own."""

    down: (
        torch.Tensor
    )  # [adapters, parts * rank, inputs]: A. Each adapter's is contiguous; other matrices may lie between them.
    up: torch.Tensor  # [adapters, outputs, rank]: B times the scale, likewise
    part_sizes: tuple[int, ...]
    """Outputs of each part, in their order; one to three."""

    @property
    def num_adapters(self) -> int:
        return len(self.down)

    @property
    def rank(self) -> int:
        return self.up.shape[2]


@kernel(one_variant_for=())
def shrink_token_kernel(
    x_ptr: tl.tensor,
    down_ptr: tl.tensor,  # [ADAPTERS, LOW, K]
    low_ptr: tl.tensor,  # [parts of K, tokens, LOW] f32
    numbers_ptr: tl.tensor,
    stride_x: int,
    stride_down: int,
    ADAPTERS: tl.constexpr,
    LOW: tl.constexpr,
    K: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_LOW: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (p, t, l) computes block l of A x for token t from part p of its inputs."""
    let_next_start(PDL)
    part, token = tl.program_id(0), tl.program_id(1)
    lows = tl.program_id(2) * BLOCK_LOW + tl.arange(0, BLOCK_LOW)
    number = tl.load(numbers_ptr + token)
    is_adapted = number < ADAPTERS
    down_at = down_ptr + number.to(tl.int64) * stride_down + lows[:, None] * K
    k = part * STEPS * BLOCK_K + tl.arange(0, BLOCK_K)
    is_low = lows < tl.where(is_adapted, LOW, 0)
    down = tl.load(down_at + k[None, :], mask=is_low[:, None] & (k < K)[None, :], other=0.0)
    wait_for_inputs(PDL)
    if is_adapted:
        x_at = x_ptr + token.to(tl.int64) * stride_x
        x = tl.load(x_at + k, mask=k < K, other=0.0)
        let_next_start_late(PDL)
        sums = down.to(tl.float32) * x.to(tl.float32)[None, :]
        for _ in tl.static_range(1, STEPS):
            k += BLOCK_K
            down = tl.load(down_at + k[None, :], mask=is_low[:, None] & (k < K)[None, :], other=0.0)
            x = tl.load(x_at + k, mask=k < K, other=0.0)
            sums += down.to(tl.float32) * x.to(tl.float32)[None, :]
        low_at = low_ptr + (part * tl.num_programs(1) + token) * LOW + lows
        tl.store(low_at, tl.sum(sums, axis=1), mask=is_low)


@kernel(one_variant_for=("num_parts",))
def expand_token_kernel(
    low_ptr: tl.tensor,  # [num_parts, tokens, LOW] f32
    up_ptr: tl.tensor,  # [ADAPTERS, N, RANK]
    y_ptr: tl.tensor,
    numbers_ptr: tl.tensor,
    num_parts: int,
    stride_y: int,
    stride_up: int,
    ADAPTERS: tl.constexpr,
    LOW: tl.constexpr,
    RANK: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (n, t) adds to block n of the outputs of token t."""
    let_next_start(PDL)
    blocks0: tl.constexpr = (N0 + BLOCK_N - 1) // BLOCK_N
    blocks1: tl.constexpr = blocks0 + (N1 + BLOCK_N - 1) // BLOCK_N
    block, token = tl.program_id(0), tl.program_id(1)
    of = (block >= blocks0).to(tl.int32) + (block >= blocks1).to(tl.int32)
    begin = tl.where(of == 0, 0, tl.where(of == 1, N0, N0 + N1))
    end = tl.where(of == 0, N0, tl.where(of == 1, N0 + N1, N0 + N1 + N2))
    block -= tl.where(of == 0, 0, tl.where(of == 1, blocks0, blocks1))
    outputs = begin + block * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < end
    ranks, parts = tl.arange(0, RANK), tl.arange(0, MOST_PARTS)
    number = tl.load(numbers_ptr + token)
    is_adapted = number < ADAPTERS
    up_at = up_ptr + number.to(tl.int64) * stride_up + outputs[:, None] * RANK + ranks[None, :]
    is_read = outputs < tl.where(is_adapted, end, 0)
    up = tl.load(up_at, mask=is_read[:, None], other=0.0)
    wait_for_inputs(PDL)
    if is_adapted:
        low_at = low_ptr + (parts * tl.num_programs(1) + token)[:, None] * LOW + of * RANK + ranks[None, :]
        low = tl.sum(tl.load(low_at, mask=(parts < num_parts)[:, None], other=0.0), axis=0)
        y_at = y_ptr + token.to(tl.int64) * stride_y + outputs
        y = tl.load(y_at, mask=is_output, other=0.0)
        let_next_start_late(PDL)
        total = y.to(tl.float32) + tl.sum(up.to(tl.float32) * low[None, :], axis=1)
        tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=is_output)


@kernel(one_variant_for=("num_rows",))
def shrink_tile_kernel(
    x_ptr: tl.tensor,
    down_ptr: tl.tensor,  # [adapters, LOW, K]
    low_ptr: tl.tensor,  # [PARTS, num_rows, LOW] f32
    tokens_ptr: tl.tensor,
    numbers_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    num_rows: int,
    stride_x: int,
    stride_down: int,
    ADAPTERS: tl.constexpr,
    LOW: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_LOW: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (p, t, l) computes block l of A x for the tokens of tile t from part p of their inputs."""
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    STEPS_OF_PART: tl.constexpr = (STEPS + PARTS - 1) // PARTS
    let_next_start(PDL)
    part, tile = tl.program_id(0), tl.program_id(1)
    lows = tl.program_id(2) * BLOCK_LOW + tl.arange(0, BLOCK_LOW)
    first, end, number = tl.load(firsts_ptr + tile), tl.load(ends_ptr + tile), tl.load(numbers_ptr + tile).to(tl.int64)
    wait_for_inputs(PDL)
    let_next_start_late(PDL)
    if (first < end) & (number < ADAPTERS):
        rows = first + tl.arange(0, BLOCK_M)
        is_row = rows < end
        tokens = tl.load(tokens_ptr + rows, mask=is_row, other=0)
        x_at = x_ptr + tokens.to(tl.int64)[:, None] * stride_x
        down_at = down_ptr + number * stride_down + lows[None, :] * K
        sums = tl.zeros((BLOCK_M, BLOCK_LOW), dtype=tl.float32)
        for step in range(part * STEPS_OF_PART, min((part + 1) * STEPS_OF_PART, STEPS)):
            k = step * BLOCK_K + tl.arange(0, BLOCK_K)
            inside = k < K
            x = tl.load(x_at + k[None, :], mask=is_row[:, None] & inside[None, :], other=0.0)
            down = tl.load(down_at + k[:, None], mask=(lows < LOW)[None, :] & inside[:, None], other=0.0)
            sums = tl.dot(x.to(DOT), down.to(DOT), sums, input_precision="ieee")
        low_at = low_ptr + (part * num_rows + tokens)[:, None] * LOW + lows[None, :]
        tl.store(low_at, sums, mask=is_row[:, None] & (lows < LOW)[None, :])


@jit
def _sum_parts(
    low_ptr: tl.tensor,  # [PARTS, num_rows, LOW] f32
    tokens: tl.tensor,
    is_read: tl.tensor,
    first: int,
    num_rows: int,
    LOW: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DOT: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return columns `first` to `first + WIDTH` of A x for these tokens, BLOCK_R at a time: the parts added up in their order."""
    ranks = tl.arange(0, BLOCK_R)
    lows = ()
    for begin_rank in tl.static_range(0, WIDTH, BLOCK_R):
        low = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
        for part in tl.static_range(PARTS):
            low_at = low_ptr + (part * num_rows + tokens)[:, None] * LOW + first + begin_rank + ranks[None, :]
            low += tl.load(low_at, mask=is_read[:, None], other=0.0)
        lows = lows + (low.to(DOT),)  # type: ignore[assignment]  # noqa: RUF005  Triton's compiler does not support unpacking
    return lows


@kernel(one_variant_for=("num_rows",))
def expand_tile_kernel(
    low_ptr: tl.tensor,  # [PARTS, num_rows, LOW] f32
    up_ptr: tl.tensor,  # [adapters, N, RANK]
    y_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    numbers_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    num_rows: int,
    stride_y: int,
    stride_up: int,
    ADAPTERS: tl.constexpr,
    LOW: tl.constexpr,
    RANK: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (n, t) adds to BLOCKS blocks of the outputs of the tokens of tile t, one after the other."""
    let_next_start(PDL)
    WIDTH: tl.constexpr = BLOCK_N * BLOCKS
    blocks0: tl.constexpr = (N0 + WIDTH - 1) // WIDTH
    blocks1: tl.constexpr = blocks0 + (N1 + WIDTH - 1) // WIDTH
    block, tile = tl.program_id(0), tl.program_id(1)
    of = (block >= blocks0).to(tl.int32) + (block >= blocks1).to(tl.int32)
    begin = tl.where(of == 0, 0, tl.where(of == 1, N0, N0 + N1))
    end_output = tl.where(of == 0, N0, tl.where(of == 1, N0 + N1, N0 + N1 + N2))
    block -= tl.where(of == 0, 0, tl.where(of == 1, blocks0, blocks1))
    begin += block * WIDTH
    first, end, number = tl.load(firsts_ptr + tile), tl.load(ends_ptr + tile), tl.load(numbers_ptr + tile).to(tl.int64)
    wait_for_inputs(PDL)
    let_next_start_late(PDL)
    if (first < end) & (number < ADAPTERS):
        rows = first + tl.arange(0, BLOCK_M)
        is_row = rows < end
        tokens = tl.load(tokens_ptr + rows, mask=is_row, other=0)
        ranks = tl.arange(0, BLOCK_R)
        lows = _sum_parts(low_ptr, tokens, is_row, of * RANK, num_rows, LOW, RANK, PARTS, BLOCK_M, BLOCK_R, DOT)
        for step in tl.range(BLOCKS):
            outputs = begin + step * BLOCK_N + tl.arange(0, BLOCK_N)
            is_output = outputs < end_output
            inside = is_row[:, None] & is_output[None, :]
            up_at = up_ptr + number * stride_up + outputs[None, :] * RANK + ranks[:, None]
            sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for index in tl.static_range(RANK // BLOCK_R):
                up = tl.load(up_at + index * BLOCK_R, mask=is_output[None, :], other=0.0)
                sums = tl.dot(lows[index], up.to(DOT), sums, input_precision="ieee")
            y_at = y_ptr + tokens.to(tl.int64)[:, None] * stride_y + outputs[None, :]
            total = tl.load(y_at, mask=inside, other=0.0).to(tl.float32) + sums
            tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=inside)


@kernel(one_variant_for=("num_rows",))
def expand_gated_kernel(
    low_ptr: tl.tensor,  # [PARTS, num_rows, 2 * RANK] f32
    up_ptr: tl.tensor,  # [adapters, 2 * N, RANK]
    y_ptr: tl.tensor,  # [tokens, 2 * N]: gates, then ups
    out_ptr: tl.tensor,  # [tokens, N]
    tokens_ptr: tl.tensor,
    numbers_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    num_rows: int,
    stride_up: int,
    ADAPTERS: tl.constexpr,
    RANK: tl.constexpr,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (n, t) computes BLOCKS blocks of silu(gate) * up for the tokens of tile t, which may be that of no adapter."""
    PIECES: tl.constexpr = RANK // BLOCK_R
    let_next_start(PDL)
    tile = tl.program_id(1)
    first, end, number = tl.load(firsts_ptr + tile), tl.load(ends_ptr + tile), tl.load(numbers_ptr + tile).to(tl.int64)
    wait_for_inputs(PDL)
    let_next_start_late(PDL)
    if first < end:
        rows = first + tl.arange(0, BLOCK_M)
        is_row = rows < end
        tokens = tl.load(tokens_ptr + rows, mask=is_row, other=0)
        is_adapted = number < ADAPTERS
        end_adapted, ranks = tl.where(is_adapted, end, 0), tl.arange(0, BLOCK_R)
        # For the gates, then for the ups
        lows = _sum_parts(
            low_ptr, tokens, rows < end_adapted, 0, num_rows, 2 * RANK, 2 * RANK, PARTS, BLOCK_M, BLOCK_R, DOT
        )
        for step in tl.range(BLOCKS):
            outputs = (tl.program_id(0) * BLOCKS + step) * BLOCK_N + tl.arange(0, BLOCK_N)
            inside = is_row[:, None] & (outputs < N)[None, :]
            y_at = y_ptr + tokens.to(tl.int64)[:, None] * (2 * N) + outputs[None, :]
            gate = tl.load(y_at, mask=inside, other=0.0)
            up = tl.load(y_at + N, mask=inside, other=0.0)
            up_at = up_ptr + number * stride_up + outputs[None, :] * RANK + ranks[:, None]
            is_read = (outputs < tl.where(is_adapted, N, 0))[None, :]
            to_gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            to_up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for index in tl.static_range(PIECES):
                of_gate = tl.load(up_at + index * BLOCK_R, mask=is_read, other=0.0)
                of_up = tl.load(up_at + N * RANK + index * BLOCK_R, mask=is_read, other=0.0)
                to_gate = tl.dot(lows[index], of_gate.to(DOT), to_gate, input_precision="ieee")
                to_up = tl.dot(lows[PIECES + index], of_up.to(DOT), to_up, input_precision="ieee")
            # Rounded as they are between two kernels, so that a token's bits do not depend on which kernels its step takes.
            gates = (gate.to(tl.float32) + to_gate).to(y_ptr.dtype.element_ty).to(tl.float32)
            ups = (up.to(tl.float32) + to_up).to(y_ptr.dtype.element_ty).to(tl.float32)
            out_at = out_ptr + tokens.to(tl.int64)[:, None] * N + outputs[None, :]
            tl.store(out_at, (gates * tl.sigmoid(gates) * ups).to(out_ptr.dtype.element_ty), mask=inside)


@kernel(one_variant_for=("num_parts",))
def adapted_gemv_kernel(
    x_ptr: tl.tensor,  # [K]
    w_ptr: tl.tensor,  # [N, K]
    bias_ptr: tl.tensor,  # [N]
    low_ptr: tl.tensor,  # [num_parts, LOW] f32
    up_ptr: tl.tensor,  # [ADAPTERS, N, RANK]
    numbers_ptr: tl.tensor,
    out_ptr: tl.tensor,  # [N]
    num_parts: int,
    stride_up: int,
    ADAPTERS: tl.constexpr,
    LOW: tl.constexpr,
    RANK: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    FIRST1: tl.constexpr,  # first output of the second part
    FIRST2: tl.constexpr,  # and of the third
    HAS_BIAS: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute BLOCK_N outputs of W x + b + B (A x) for one token, given A x. The outputs of a program are of the same part."""
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    let_next_start(PDL)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    in_n = outputs < N
    w_rows = w_ptr + outputs.to(tl.int64)[:, None] * K
    weights = ()
    for step in tl.static_range(STEPS):
        k = step * BLOCK_K + columns
        inside = in_n[:, None] & (k < K)[None, :]
        weight = tl.load(w_rows + k[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        weights = weights + (weight,)  # type: ignore[assignment]  # noqa: RUF005  Triton's compiler does not support unpacking
    number = tl.load(numbers_ptr)
    ranks, parts = tl.arange(0, RANK), tl.arange(0, MOST_PARTS)
    up_at = up_ptr + number.to(tl.int64) * stride_up + outputs[:, None] * RANK + ranks[None, :]
    up = tl.load(up_at, mask=(outputs < tl.where(number < ADAPTERS, N, 0))[:, None], other=0.0)
    total = tl.zeros([BLOCK_N], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + outputs, mask=in_n, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for step in tl.static_range(STEPS):
        k = step * BLOCK_K + columns
        x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        acc += weights[step].to(tl.float32) * x[None, :]
    total += tl.sum(acc, 1)
    if number < ADAPTERS:
        first = tl.program_id(0) * BLOCK_N
        of = (first >= FIRST1).to(tl.int32) + (first >= FIRST2).to(tl.int32)
        low_at = low_ptr + parts[:, None] * LOW + of * RANK + ranks[None, :]
        low = tl.sum(tl.load(low_at, mask=(parts < num_parts)[:, None], other=0.0), axis=0)
        total += tl.sum(up.to(tl.float32) * low[None, :], axis=1)
    tl.store(out_ptr + outputs, total.to(out_ptr.dtype.element_ty), mask=in_n)


def shrink(x: torch.Tensor, stacked: StackedAdapters, tokens: AdapterTokens) -> torch.Tensor:
    """Return A x for x [tokens, inputs], in parts that `expand` adds. Only what belongs to tokens with an adapter is written."""
    num_tokens, low, num_inputs = len(x), stacked.down.shape[1], stacked.down.shape[2]
    assert x.shape[1] == num_inputs, (x.shape, stacked.down.shape)
    if x.stride(1) != 1:
        x = x.contiguous()
    block_low = min(_BLOCK_LOW, next_power_of_2(low))
    low_blocks, tiles = cdiv(low, block_low), tokens.tiles
    if tiles is None and tokens.has_shared_shrink and num_tokens >= _FEWEST_SHARED_TOKENS:
        shared = shared_shrink(low, num_inputs)
        if shared is not None and shared.suits(x, stacked.down):
            return shared.multiply(x, stacked.down, tokens.numbers)
    if tiles is None:
        block_k = (256 if num_inputs <= 8192 else 512) * 2 // x.itemsize
        most_parts = _MOST_SINGLE_PARTS if num_tokens <= _FEW_TOKENS else _MOST_PARTS_OF_MORE
        steps = cdiv(cdiv(num_inputs, block_k), most_parts)
        num_parts = cdiv(num_inputs, block_k * steps)
        out = torch.empty((num_parts, num_tokens, low), dtype=torch.float32, device=x.device)
        shrink_token_kernel[(num_parts, num_tokens, low_blocks)](
            x, stacked.down, out, tokens.numbers, x.stride(0), stacked.down.stride(0),
            ADAPTERS=stacked.num_adapters, LOW=low, K=num_inputs, STEPS=steps, BLOCK_LOW=block_low, BLOCK_K=block_k,
            **pdl_options(_SINGLE_LAUNCH if tokens.pdl else 0)
        )  # fmt: skip
        return out
    num_tiles, block_k = len(tiles.firsts), 256 // x.itemsize
    num_parts = min(_NUM_PARTS[tiles.block_m], next_power_of_2(cdiv(num_inputs, block_k)))
    out = torch.empty((num_parts, num_tokens, low), dtype=torch.float32, device=x.device)
    shrink_tile_kernel[(num_parts, num_tiles, low_blocks)](
        x, stacked.down, out, tiles.pairs, tiles.experts, tiles.firsts, tiles.ends, num_tokens, x.stride(0),
        stacked.down.stride(0),
        ADAPTERS=stacked.num_adapters, LOW=low, K=num_inputs, PARTS=num_parts, BLOCK_M=tiles.block_m, BLOCK_LOW=block_low, BLOCK_K=block_k,
        DOT=dot_dtype(x.dtype), num_stages=3, **pdl_options(tokens.pdl)
    )  # fmt: skip
    return out


def expand(low: torch.Tensor, stacked: StackedAdapters, tokens: AdapterTokens, y: torch.Tensor) -> None:
    """Add the product of B with the result of `shrink` to y [tokens, outputs]; rows without an adapter stay as they are."""
    assert y.stride(1) == 1, y.stride()
    num_parts, num_tokens, width = low.shape
    n0, n1, n2 = (*stacked.part_sizes, 0, 0)[:3]
    rank, tiles = stacked.rank, tokens.tiles
    block_n = _BLOCK_OUTPUTS[1 if tiles is None else tiles.block_m]
    at_once = 1 if tiles is None else _BLOCKS_AT_ONCE[tiles.block_m]
    blocks = sum(cdiv(size, block_n * at_once) for size in (n0, n1, n2))
    if tiles is None:
        expand_token_kernel[(blocks, num_tokens)](
            low, stacked.up, y, tokens.numbers, num_parts, y.stride(0), stacked.up.stride(0),
            ADAPTERS=stacked.num_adapters, LOW=width, RANK=rank, N0=n0, N1=n1, N2=n2,
            MOST_PARTS=next_power_of_2(num_parts), BLOCK_N=block_n, **pdl_options(tokens.pdl)
        )  # fmt: skip
        return
    expand_tile_kernel[(blocks, len(tiles.firsts))](
        low, stacked.up, y, tiles.pairs, tiles.experts, tiles.firsts, tiles.ends, num_tokens, y.stride(0),
        stacked.up.stride(0),
        ADAPTERS=stacked.num_adapters, LOW=width, RANK=rank, N0=n0, N1=n1, N2=n2, PARTS=num_parts, BLOCK_M=tiles.block_m, BLOCK_N=block_n,
        BLOCKS=at_once, BLOCK_R=min(rank, 64), DOT=dot_dtype(y.dtype), **pdl_options(tokens.pdl)
    )  # fmt: skip


def expand_gated(low: torch.Tensor, stacked: StackedAdapters, tokens: AdapterTokens, y: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up for y [tokens, gates and ups] with the product of B and the result of `shrink` added. Tokens are in tiles."""
    tiles, (num_parts, num_tokens, _), (size, other) = tokens.tiles, low.shape, stacked.part_sizes
    assert tiles is not None and size == other and y.is_contiguous(), (stacked.part_sizes, y.stride())
    block_n, at_once = _GATED_OUTPUTS[tiles.block_m], _BLOCKS_AT_ONCE[tiles.block_m]
    out = torch.empty((num_tokens, size), dtype=y.dtype, device=y.device)
    expand_gated_kernel[(cdiv(size, block_n * at_once), len(tiles.firsts))](
        low, stacked.up, y, out, tiles.pairs, tiles.experts, tiles.firsts, tiles.ends, num_tokens, stacked.up.stride(0),
        ADAPTERS=stacked.num_adapters, RANK=stacked.rank, N=size, PARTS=num_parts, BLOCK_M=tiles.block_m, BLOCK_N=block_n,
        BLOCKS=at_once, BLOCK_R=min(stacked.rank, 64), DOT=dot_dtype(y.dtype), **pdl_options(tokens.pdl)
    )  # fmt: skip
    return out


def adapted_gemv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stacked: StackedAdapters, tokens: AdapterTokens
) -> torch.Tensor | None:
    """Return W x + b + B A x for one token, x [1, inputs], by two launches; None if the parts' sizes do not fit the kernel."""
    n, k = weight.shape
    tiles = GemvTiles.choose(n, k, False, weight.itemsize)
    n0, n1 = (*stacked.part_sizes, 0)[:2]
    if any(first % tiles.block_n for first in (n0, n0 + n1) if first < n):
        return None
    x = x.contiguous()
    low = shrink(x, stacked, tokens)
    out = torch.empty((1, n), dtype=x.dtype, device=x.device)
    adapted_gemv_kernel[(cdiv(n, tiles.block_n),)](
        x, weight, weight if bias is None else bias, low, stacked.up, tokens.numbers, out, len(low), stacked.up.stride(0),
        ADAPTERS=stacked.num_adapters, LOW=low.shape[2], RANK=stacked.rank, N=n, K=k, FIRST1=n0, FIRST2=n0 + n1,
        HAS_BIAS=bias is not None, MOST_PARTS=next_power_of_2(len(low)), BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k, num_warps=tiles.num_warps, **pdl_options(tokens.pdl)
    )  # fmt: skip
    return out
