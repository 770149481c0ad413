"""Guess by repetition on the device: what followed the last tokens of a request where they occurred before (`srt.speculative.ngram`)."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from srt.kernels.build.jit import kernel

BLOCK: Final = 1024  # positions that are compared at a time


@kernel(one_variant_for=("slots_ptr", "most_ptr", "seq_lens_ptr", "token_table_ptr", "least", "token_table_stride"))
def draft_ngrams_kernel(
    slots_ptr: tl.tensor,  # [rows] int64
    most_ptr: tl.tensor,  # [rows] int64: drafts of each row
    seq_lens_ptr: tl.tensor,  # by slot, int64: the position of its last known token
    token_table_ptr: tl.tensor,  # [slots, positions] int32
    least: tl.tensor,
    token_table_stride: tl.tensor,
    LONGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    DRAFTS: tl.constexpr,  # a power of two, at least the most drafts of a row
) -> None:
    """Program r drafts for row r."""
    row = tl.program_id(0).to(tl.int64)
    most = tl.load(most_ptr + row)
    if most <= 0:
        return
    slot = tl.load(slots_ptr + row)
    last = tl.load(seq_lens_ptr + slot).to(tl.int32)
    tokens_ptr = token_table_ptr + slot * token_table_stride
    best = tl.zeros(
        [], tl.int64
    )  # how many tokens are equal, and in the lower half the position behind the last of them
    for begin in range(0, last, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        is_equal = at < last
        length = tl.zeros([BLOCK], tl.int32)
        for back in tl.static_range(LONGEST):
            mine = tl.load(tokens_ptr + tl.maximum(last - back, 0))
            theirs = tl.load(tokens_ptr + at - back, mask=is_equal & (at >= back), other=-1)
            is_equal = is_equal & (theirs == mine)
            length += is_equal.to(tl.int32)
        found = tl.where(length >= least, (length.to(tl.int64) << 32) | (at + 1).to(tl.int64), 0)
        best = tl.maximum(best, tl.max(found, 0))
    # Without a repetition the last token is repeated.
    begin_of_drafts = tl.where(best > 0, (best & 0xFFFFFFFF).to(tl.int32), last)
    period = last + 1 - begin_of_drafts
    drafts = tl.arange(0, DRAFTS)
    ids = tl.load(tokens_ptr + begin_of_drafts + drafts % period, mask=drafts < most, other=0)
    tl.store(tokens_ptr + last + 1 + drafts, ids, mask=drafts < most)


def draft_ngrams(
    slots: torch.Tensor,
    most: torch.Tensor,
    seq_lens: torch.Tensor,
    token_table: torch.Tensor,
    least: int,
    longest: int,
    num_drafts: int,
) -> None:
    """Write `most[i]` drafts, up to `num_drafts`, of slot `slots[i]` into the token table, behind its token at position `seq_lens[slot]`.

    At least `least` tokens must occur again. The places where the most do are preferred, up to `longest`, and of these the latest.
    """
    draft_ngrams_kernel[(len(slots),)](
        slots, most, seq_lens, token_table, least, token_table.stride(0),
        LONGEST=longest, BLOCK=BLOCK, DRAFTS=triton.next_power_of_2(num_drafts),
    )  # fmt: skip
