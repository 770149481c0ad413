"""The order of a step's tokens by expert, in tiles of rows that one product of an expert computes.

A pair is a choice of a token: pair p is choice p % top_k of token p // top_k. Sorted by expert, and by number within an expert, the
pairs of an expert are neighbours. They are cut into tiles of up to `block_m` rows; a tile never has rows of two experts. How many tiles
there are is known on the device only, so the table has room for as many as there can be, and those behind the last are empty.

A rank may have some of the experts only (--ep-size). All pairs are sorted there too, but only those of its experts have tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from srt.kernels.build.jit import jit, kernel
from srt.kernels.build.pdl import let_next_start, let_next_start_late, pdl_options, wait_for_inputs

MOST_COUNTED_PAIRS: Final = 4096
"""With more pairs, they are counted by blocks first, so that each is compared with those of its own block only."""
_BLOCK: Final = 32
_CHUNK: Final = 128  # pairs that a program compares with its own at a time
_LONG_CHUNK: Final = 512  # the same, if there are more than fit in a chunk
_BLOCK_PAIRS: Final = 512  # pairs of a block
_AT_ONCE: Final = 16  # pairs, or blocks, that a program compares with its own, or adds up, at a time


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """The sorted pairs and the table of their tiles, on the device."""

    pairs: torch.Tensor  # [pairs] i32: pair numbers, sorted
    experts: torch.Tensor  # [tiles] i32
    firsts: torch.Tensor  # [tiles] i32: first row of the tile among the sorted pairs
    ends: torch.Tensor  # [tiles] i32: end of the tile's rows; not more than the first row for an empty tile
    block_m: int

    @classmethod
    def sort(
        cls,
        ids: torch.Tensor,
        num_experts: int,
        block_m: int,
        load: torch.Tensor | None = None,
        pdl: int = 0,
        own: range | None = None,
    ) -> ExpertTiles:
        """Sort the pairs by their experts, ids [tokens, top_k] i32, and add them to the load. Never waits for the device.

        The number of experts stands for none: such pairs come last, and no tile has them. If only `own` experts are here, only their
        pairs have tiles, which count experts from the first of those.
        """
        num_pairs, device = ids.numel(), ids.device
        first, num_own = (0, num_experts) if own is None else (own.start, len(own))
        most = num_pairs // block_m + min(num_pairs, num_own)
        experts, firsts, ends = (torch.empty(most, dtype=torch.int32, device=device) for _ in range(3))
        sizes = {"NUM_EXPERTS": num_experts, "BLOCK_E": triton.next_power_of_2(num_experts)}
        sizes |= {"NUM_OWN": num_own, "BLOCK_M": block_m, "BLOCK": _BLOCK}
        if num_pairs <= MOST_COUNTED_PAIRS:
            pairs = torch.empty(num_pairs, dtype=torch.int32, device=device)
            sizes["BLOCK_E"] = triton.next_power_of_2(num_experts + 1)  # counts the pairs of none too
            count_pairs_kernel[(triton.cdiv(num_pairs, _BLOCK) + triton.cdiv(most, _BLOCK),)](
                ids, pairs, experts, firsts, ends, ids if load is None else load, num_pairs, most, first,
                HAS_LOAD=load is not None, CHUNK=_CHUNK if num_pairs <= _CHUNK else _LONG_CHUNK, num_warps=8, **sizes,
                **pdl_options(pdl),
            )  # fmt: skip
        else:
            pairs = torch.empty(num_pairs, dtype=torch.int32, device=device)
            num_blocks = triton.cdiv(num_pairs, _BLOCK_PAIRS)
            counts = torch.empty((num_blocks, sizes["BLOCK_E"]), dtype=torch.int32, device=device)
            count_blocks_kernel[(num_blocks,)](
                ids, counts, num_pairs, NUM_EXPERTS=num_experts, BLOCK_E=sizes["BLOCK_E"], BLOCK_PAIRS=_BLOCK_PAIRS,
                AT_ONCE=_AT_ONCE, num_warps=8,
            )  # fmt: skip
            place_pairs_kernel[(num_blocks + triton.cdiv(most, _BLOCK),)](
                ids, counts, torch.empty_like(counts), pairs, experts, firsts, ends, ids if load is None else load,
                num_pairs, num_blocks, most, first, HAS_LOAD=load is not None, BLOCK_PAIRS=_BLOCK_PAIRS,
                AT_ONCE=_AT_ONCE, num_warps=8, **sizes,
            )  # fmt: skip
        return cls(pairs, experts, firsts, ends, block_m)


@jit
def _write_tiles(
    starts: tl.tensor,
    counts: tl.tensor,
    tiles: tl.tensor,
    experts_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    most: int,
    first_own: int,
    NUM_EXPERTS: tl.constexpr,
    NUM_OWN: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> None:
    """Write some tiles of the table, given the first row and the number of rows of each expert."""
    if NUM_OWN < NUM_EXPERTS:
        own = tl.arange(0, BLOCK_E) - first_own
        counts = tl.where((own >= 0) & (own < NUM_OWN), counts, 0)
    per_expert = (counts + BLOCK_M - 1) // BLOCK_M
    tile_ends = tl.cumsum(per_expert, axis=0)
    found = tl.sum((tile_ends[None, :] <= tiles[:, None]).to(tl.int32), axis=1)
    is_found = tl.arange(0, BLOCK_E)[None, :] == found[:, None]
    start = tl.sum(tl.where(is_found, starts[None, :], 0), axis=1)
    count = tl.sum(tl.where(is_found, counts[None, :], 0), axis=1)
    number = tiles - tl.sum(tl.where(is_found, (tile_ends - per_expert)[None, :], 0), axis=1)
    first = start + number * BLOCK_M
    end = tl.where(found < NUM_EXPERTS, tl.minimum(start + count, first + BLOCK_M), first)
    inside = tiles < most
    tl.store(experts_ptr + tiles, tl.minimum(found - first_own, NUM_OWN - 1), mask=inside)
    tl.store(firsts_ptr + tiles, first, mask=inside)
    tl.store(ends_ptr + tiles, end, mask=inside)


@jit
def add_step_to_load(counts: tl.tensor, load_ptr: tl.tensor, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr) -> None:
    """Do what `srt.layers.moe.expert_ops.add_load` does. Only one program of a launch may, because there are no atomics."""
    experts = tl.arange(0, BLOCK_E)
    before = tl.load(load_ptr + experts, mask=experts < NUM_EXPERTS, other=0)
    tl.store(load_ptr + experts, before + counts, mask=experts < NUM_EXPERTS)
    num_distinct = tl.sum((counts > 0).to(tl.int32), axis=0)
    tl.store(load_ptr + NUM_EXPERTS, tl.load(load_ptr + NUM_EXPERTS) + num_distinct)
    tl.store(load_ptr + NUM_EXPERTS + 1, tl.load(load_ptr + NUM_EXPERTS + 1) + 1)


@kernel(one_variant_for=("num_pairs", "most", "first_own"))
def count_pairs_kernel(
    ids_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    load_ptr: tl.tensor,
    num_pairs: int,
    most: int,
    first_own: int,
    HAS_LOAD: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_OWN: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The first programs find the places of BLOCK pairs each, by counting the pairs before each. The others write BLOCK tiles each.

    The first of those adds to the load.
    """
    let_next_start(PDL)
    wait_for_inputs(PDL)
    let_next_start_late(PDL)
    if tl.program_id(0) < tl.cdiv(num_pairs, BLOCK):
        pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        own = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=NUM_EXPERTS)[:, None]
        places = tl.zeros((BLOCK,), dtype=tl.int32)
        for begin in range(0, num_pairs, CHUNK):
            others = begin + tl.arange(0, CHUNK)[None, :]
            expert = tl.load(ids_ptr + others, mask=others < num_pairs, other=NUM_EXPERTS)
            is_before = (expert < own) | ((expert == own) & (others < pairs[:, None]))
            places += tl.sum(is_before.to(tl.int32), axis=1)
        tl.store(pairs_ptr + places, pairs, mask=pairs < num_pairs)
    else:
        experts = tl.arange(0, BLOCK_E)
        counts = tl.zeros((BLOCK_E,), dtype=tl.int32)
        for begin in range(0, num_pairs, CHUNK):
            others = begin + tl.arange(0, CHUNK)
            expert = tl.load(ids_ptr + others, mask=others < num_pairs, other=NUM_EXPERTS)
            counts += tl.histogram(expert, BLOCK_E)
        counts = tl.where(experts < NUM_EXPERTS, counts, 0)  # beyond the pairs the number is that of no expert
        starts = tl.cumsum(counts, axis=0) - counts
        place = tl.program_id(0) - tl.cdiv(num_pairs, BLOCK)
        tiles = place * BLOCK + tl.arange(0, BLOCK)
        _write_tiles(
            starts, counts, tiles, experts_ptr, firsts_ptr, ends_ptr, most, first_own, NUM_EXPERTS, NUM_OWN, BLOCK_E,
            BLOCK_M,
        )  # fmt: skip
        if HAS_LOAD:
            if place == 0:
                add_step_to_load(counts, load_ptr, NUM_EXPERTS, BLOCK_E)


@kernel(one_variant_for=("num_pairs",))
def count_blocks_kernel(
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,  # [blocks, BLOCK_E]
    num_pairs: int,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    """Each program counts the pairs of each expert in one block of pairs."""
    experts = tl.arange(0, BLOCK_E)
    found = tl.zeros((BLOCK_E, AT_ONCE), dtype=tl.int32)
    for begin in range(0, BLOCK_PAIRS, AT_ONCE):
        pairs = tl.program_id(0) * BLOCK_PAIRS + begin + tl.arange(0, AT_ONCE)
        expert = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=NUM_EXPERTS)
        found += (expert[None, :] == experts[:, None]).to(tl.int32)
    counts = tl.where(experts < NUM_EXPERTS, tl.sum(found, axis=1), 0)
    tl.store(counts_ptr + tl.program_id(0) * BLOCK_E + experts, counts)


@kernel(one_variant_for=("num_pairs", "num_blocks", "most", "first_own"))
def place_pairs_kernel(
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,  # [blocks, BLOCK_E]: what `count_blocks_kernel` counted
    starts_ptr: tl.tensor,  # [blocks, BLOCK_E]: the place of the first pair of each expert in each block
    pairs_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    load_ptr: tl.tensor,
    num_pairs: int,
    num_blocks: int,
    most: int,
    first_own: int,
    HAS_LOAD: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_OWN: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    """The first programs write the places of a block of pairs each. The others write BLOCK tiles each.

    The first of those adds to the load.
    """
    own_block, experts = tl.program_id(0), tl.arange(0, BLOCK_E)
    counts = tl.zeros((BLOCK_E,), dtype=tl.int32)
    before = tl.zeros((BLOCK_E,), dtype=tl.int32)  # in the blocks before
    for begin in range(0, num_blocks, AT_ONCE):
        blocks = begin + tl.arange(0, AT_ONCE)[:, None]
        some = tl.load(counts_ptr + blocks * BLOCK_E + experts[None, :], mask=blocks < num_blocks, other=0)
        counts += tl.sum(some, axis=0)
        before += tl.sum(tl.where(blocks < own_block, some, 0), axis=0)
    starts = tl.cumsum(counts, axis=0) - counts
    if own_block < num_blocks:
        pairs = own_block * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
        own = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=NUM_EXPERTS)
        own_starts = starts_ptr + own_block * BLOCK_E
        tl.store(own_starts + experts, starts + before)
        before_own = tl.zeros((BLOCK_PAIRS, AT_ONCE), dtype=tl.int32)
        for begin in range(0, BLOCK_PAIRS, AT_ONCE):
            others = own_block * BLOCK_PAIRS + begin + tl.arange(0, AT_ONCE)[None, :]
            expert = tl.load(ids_ptr + others, mask=others < num_pairs, other=NUM_EXPERTS)
            before_own += ((expert == own[:, None]) & (others < pairs[:, None])).to(tl.int32)
        tl.debug_barrier()  # all threads have stored the places that are read now
        # The number of experts stands for none. These pairs come last; all others of the blocks before have been counted.
        of_none = tl.sum(counts, axis=0) + own_block * BLOCK_PAIRS - tl.sum(before, axis=0)
        is_expert = own < NUM_EXPERTS
        start = tl.where(is_expert, tl.load(own_starts + own, mask=is_expert, other=0), of_none)
        tl.store(pairs_ptr + start + tl.sum(before_own, axis=1), pairs, mask=pairs < num_pairs)
    else:
        number = own_block - num_blocks
        if HAS_LOAD:
            if number == 0:
                add_step_to_load(counts, load_ptr, NUM_EXPERTS, BLOCK_E)
        tiles = number * BLOCK + tl.arange(0, BLOCK)
        _write_tiles(
            starts, counts, tiles, experts_ptr, firsts_ptr, ends_ptr, most, first_own, NUM_EXPERTS, NUM_OWN, BLOCK_E,
            BLOCK_M,
        )  # fmt: skip
