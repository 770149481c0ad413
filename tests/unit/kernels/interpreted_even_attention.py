"""Decode attention by equal shares in Triton's interpreter, against its reference."""

from __future__ import annotations

import itertools

import pytest
import torch

from srt.kernels.attention.even_attention import EvenShares, even_attention, find_shares
from srt.kernels.attention.paged_kv import PagedKV
from tests.support.attention_reference import decode_attention_reference
from tests.unit.kernels.paged_world import make_paged_world

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


def check(
    lengths: list[int],
    group: int = 2,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    programs: int = 3,
) -> None:
    world = make_paged_world(lengths, num_kv_heads, head_dim, page_size, dtype)
    q = torch.randn(len(lengths), num_kv_heads * group, head_dim).to(dtype)
    scale = head_dim**-0.5
    expected = decode_attention_reference(q, world.kv, world.req_pool_indices, world.seq_lens, scale)
    shares = EvenShares.allocate(len(lengths) + 2, num_kv_heads * group, num_kv_heads, head_dim, programs, CPU)
    find_shares(world.seq_lens, shares)
    for _ in range(2):
        out = torch.full_like(q, float("nan"))
        even_attention(q, world.kv, world.req_pool_indices, world.seq_lens, scale, out, shares)
        live = world.seq_lens > 0  # others are nobody's work
        assert ((out - expected)[live].abs() <= TOLERANCE[dtype]).all()
        assert not shares.arrived.any()


@pytest.mark.parametrize(
    ("group", "page_size", "dtype"),
    [
        (1, 1, torch.float32),
        (2, 16, torch.float32),
        (4, 1, torch.float16),
        (4, 16, torch.bfloat16),
        (5, 1, torch.bfloat16),
    ],
)
def test_every_group_and_page_size_equals_the_reference(group: int, page_size: int, dtype: torch.dtype) -> None:
    check([1, 63, 64, 65, 300], group=group, num_kv_heads=1, page_size=page_size, dtype=dtype)


@pytest.mark.parametrize("programs", [1, 3, 8])
@pytest.mark.parametrize(
    "lengths", [[0], [1000], [1, 1, 1], [700, 3, 0, 64, 129, 500], [64] * 9, [0, 0, 5, 900, 0, 7, 0]]
)
def test_rows_of_any_lengths_are_cut_for_any_number_of_programs(lengths: list[int], programs: int) -> None:
    check(lengths, programs=programs)


@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
def test_every_head_size_equals_the_reference(head_dim: int) -> None:
    check([1, 333, 90], head_dim=head_dim)


@pytest.mark.parametrize("num_shares", [1, 4, 8, 9])
@pytest.mark.parametrize(
    "lengths", [[0, 0, 700, 3, 0, 64, 129, 500, 2000], [1000] * 8, [1000, 1010, 960, 1030] * 4, [9000]]
)
def test_shares_are_alike_and_cover_every_block_once(lengths: list[int], num_shares: int) -> None:
    shares = EvenShares.allocate(len(lengths), 2, 2, 32, num_shares, CPU)
    find_shares(torch.tensor(lengths), shares)
    row_begins, begins = shares.row_begins.tolist(), shares.begins.tolist()
    blocks = [-(-length // 64) for length in lengths]
    assert row_begins == [sum(blocks[:row]) for row in range(len(blocks) + 1)]
    sizes = [end - begin for begin, end in itertools.pairwise(begins)]
    live = [size for size in sizes if size]
    assert sum(live) == sum(blocks) and sizes[: len(live)] == live
    assert len(live) == num_shares
    starts = [
        sum(begin <= row_begin < end for row_begin in set(row_begins[:-1])) for begin, end in itertools.pairwise(begins)
    ]
    work = [size + num_starts for size, num_starts in zip(sizes, starts, strict=True)]
    assert max(work) - min(work) <= 3, "to begin a row is as much as a block"
    for share, row in enumerate(shares.first_rows.tolist()[: len(live)]):
        assert row_begins[row] <= begins[share] < row_begins[row + 1]
    for row, (first, last) in enumerate(shares.row_shares.tolist()):
        if not lengths[row]:
            continue
        assert begins[first] <= row_begins[row] < begins[first + 1]
        assert begins[last] < row_begins[row + 1] <= begins[last + 1]


@pytest.mark.parametrize("window", [1, 16, 100, 4096])
def test_shares_of_a_window_are_those_of_rows_without_what_it_hides(window: int) -> None:
    lengths = [0, 1, 15, 16, 17, 100, 131, 900, 1000]
    shares, expected = (EvenShares.allocate(len(lengths), 2, 2, 32, 4, CPU) for _ in range(2))
    find_shares(torch.tensor(lengths), shares, window)
    shown = [length - max(length - window, 0) // 16 * 16 for length in lengths]
    find_shares(torch.tensor(shown), expected)
    for name in ("begins", "first_rows", "row_begins", "row_shares"):
        assert torch.equal(getattr(shares, name), getattr(expected, name)), name


def test_a_memory_of_fp8_is_read_with_its_scales() -> None:
    world = make_paged_world([5, 140], num_kv_heads=1, head_dim=32, page_size=16, dtype=torch.float32)
    keys, values = world.kv.k_buffer.to(torch.float8_e4m3fn), world.kv.v_buffer.to(torch.float8_e4m3fn)
    kv = PagedKV(keys, values, world.kv.page_table, world.kv.page_size, k_scale=0.5, v_scale=3.0)
    q = torch.randn(2, 2, 32)
    expected = decode_attention_reference(q, kv, world.req_pool_indices, world.seq_lens, 0.2)
    shares = EvenShares.allocate(2, 2, 1, 32, 2, CPU)
    find_shares(world.seq_lens, shares)
    out = torch.full_like(q, float("nan"))
    even_attention(q, kv, world.req_pool_indices, world.seq_lens, 0.2, out, shares)
    torch.testing.assert_close(out, expected)
