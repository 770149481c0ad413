"""Attention over prefixes that rows share, in Triton's interpreter: what is found, and that it changes no result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from srt.kernels.attention.decode_attention import DecodeScratch, DecodeTiles, decode_attention
from srt.kernels.attention.paged_kv import PagedKV
from srt.kernels.attention.shared_prefix import SharedPrefix, block_rows, can_share, find_shared, shared_attention
from tests.support.attention_reference import decode_attention_reference
from tests.unit.kernels.paged_world import PagedWorld, make_paged_world

CPU = torch.device("cpu")
TILES = DecodeTiles(num_splits=2, min_split_tokens=32, block_n=32)


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


def world_with(
    lengths: list[int], shared_pages: list[int], group: int, page_size: int = 16, kv_heads: int = 1
) -> PagedWorld:
    """Each row has so many of its first pages from the first row of its block."""
    world = make_paged_world(lengths, kv_heads, 32, page_size, torch.float32)
    table, rows = world.kv.page_table, block_rows(group)
    for row, count in enumerate(shared_pages):
        leader = world.req_pool_indices[row // rows * rows]
        table[world.req_pool_indices[row], :count] = table[leader, :count]
    return world


def found(world: PagedWorld, group: int, least_saved: int = 1) -> torch.Tensor:
    lens = torch.full((len(world.seq_lens),), -7, dtype=torch.int32)
    find_shared(
        world.req_pool_indices, world.seq_lens, world.kv.page_table, world.kv.page_size, group, least_saved, lens
    )
    return lens


def check(world: PagedWorld, group: int, least_saved: int = 1, num_processors: int = 8) -> SharedPrefix:
    rows, kv_heads = len(world.seq_lens), world.kv.num_kv_heads
    heads = kv_heads * group
    q = torch.randn(rows, heads, 32)
    scratch = DecodeScratch.allocate(rows, heads, kv_heads, TILES.num_splits, 32, CPU)
    shared = SharedPrefix.allocate(rows + 3, heads, kv_heads, 32, num_processors, CPU)
    shared = shared.of(rows, group, kv_heads, num_processors)
    shared.lens.copy_(found(world, group, least_saved))
    expected = decode_attention_reference(q, world.kv, world.req_pool_indices, world.seq_lens, 0.2)
    out = torch.full_like(q, float("nan"))
    shared.partial.fill_(float("nan"))
    shared_attention(q, world.kv, world.req_pool_indices, 0.2, shared)
    decode_attention(q, world.kv, world.req_pool_indices, world.seq_lens, 0.2, out, TILES, scratch, shared=shared)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    return shared


def test_a_block_has_as_many_rows_as_one_product_takes() -> None:
    assert [block_rows(group) for group in (1, 2, 4, 5, 8, 9, 16, 128, 200)] == [16, 16, 16, 16, 16, 8, 8, 1, 1]


def test_heads_that_fit_no_shared_memory_and_groups_that_fill_a_product_share_nothing() -> None:
    bf16 = torch.bfloat16
    assert can_share(bf16, 128, 4) and can_share(torch.float16, 64, 64)
    assert not (can_share(bf16, 256, 4) or can_share(bf16, 128, 65) or can_share(torch.float32, 128, 4))


def test_first_pages_that_are_the_same_are_found() -> None:
    world = world_with([200, 180, 170, 190], [0, 5, 5, 5], group=4)
    assert found(world, 4).tolist() == [80] * 4


def test_who_shares_too_little_is_left_out_of_what_others_share() -> None:
    world = world_with([200, 180, 170, 190, 160], [0, 5, 0, 5, 1], group=4)
    assert found(world, 4).tolist() == [80, 80, 0, 80, 0]


def test_less_is_shared_where_more_rows_then_share_it() -> None:
    world = world_with([300] * 6, [0, 12, 5, 5, 5, 5], group=4)
    assert found(world, 4).tolist() == [80] * 6


def test_every_block_has_its_own_prefix() -> None:
    world = world_with([100] * 16 + [60] * 5, [0, *[4] * 15, 0, 2, 2, 0, 2], group=4)
    assert found(world, 4).tolist() == [64] * 16 + [32, 32, 32, 0, 32]


def test_the_page_with_the_last_position_is_nobody_elses() -> None:
    world = world_with([32, 33, 48], [0, 2, 2], group=4)
    assert found(world, 4).tolist() == [16, 16, 16], "of 32 positions of the first row the last is in its second page"


def test_padding_shares_nothing_though_all_of_it_is_one_slot() -> None:
    world = world_with([100, 90, 1], [0, 4, 0], group=4)
    slots = torch.cat((world.req_pool_indices, world.req_pool_indices[2:].repeat(3)))
    padded = replace(
        world, req_pool_indices=slots, seq_lens=torch.cat((world.seq_lens, torch.ones(3, dtype=torch.int64)))
    )
    assert found(padded, 4).tolist() == [64, 64, 0, 0, 0, 0]
    check(padded, 4)


def test_what_saves_too_little_is_not_shared() -> None:
    world = world_with([100] * 4, [0, 4, 4, 4], group=4)
    assert found(world, 4, least_saved=3 * 64).tolist() == [64] * 4
    assert found(world, 4, least_saved=3 * 64 + 1).tolist() == [0] * 4


def test_more_pages_are_compared_than_fit_at_once() -> None:
    world = world_with([700, 650, 640], [0, 600, 301], group=4, page_size=1)
    assert found(world, 4).tolist() == [301, 301, 301]
    assert found(world_with([700, 650, 640], [0, 600, 256], group=4, page_size=1), 4).tolist() == [600, 600, 0]


@pytest.mark.parametrize("group", [1, 2, 4, 5])
@pytest.mark.parametrize("page_size", [1, 16])
def test_results_are_those_of_rows_that_share_nothing(group: int, page_size: int) -> None:
    shared_tokens = [0, 96, 96, 0, 96, 64]
    pages = [tokens // page_size for tokens in shared_tokens]
    check(world_with([130, 97, 200, 70, 161, 140], pages, group, page_size, kv_heads=2), group)


@pytest.mark.parametrize("num_processors", [1, 3, 64])
def test_what_is_shared_may_be_cut_into_one_or_more_splits(num_processors: int) -> None:
    world = world_with([400, 390, 380], [0, 20, 20], group=4)
    shared = check(world, 4, num_processors=num_processors)
    assert shared.num_splits == min(2 * num_processors, 16)
    assert shared.lens.tolist() == [320] * 3


def test_nothing_shared_leaves_every_row_to_itself() -> None:
    shared = check(world_with([130, 97, 40], [0, 0, 0], group=2), 2)
    assert shared.lens.tolist() == [0, 0, 0]
    assert shared.partial.isnan().all(), "nothing was computed"


def test_a_last_block_may_be_shorter() -> None:
    check(world_with([100] * 19, [0, *[4] * 15, 0, 3, 3], group=4), 4)


def test_a_memory_of_fp8_is_read_with_its_scales() -> None:
    world = world_with([100, 90, 80], [0, 4, 4], group=2)
    keys, values = world.kv.k_buffer.to(torch.float8_e4m3fn), world.kv.v_buffer.to(torch.float8_e4m3fn)
    kv = PagedKV(keys, values, world.kv.page_table, world.kv.page_size, k_scale=0.5, v_scale=3.0)
    check(replace(world, kv=kv), 2)
