"""Decode attention in Triton's interpreter, against its reference."""

from __future__ import annotations

import pytest
import torch

from srt.kernels.attention.decode_attention import DecodeScratch, DecodeTiles, decode_attention
from srt.kernels.attention.paged_kv import PagedKV
from tests.support.attention_reference import decode_attention_reference
from tests.unit.kernels.paged_world import make_paged_world

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SMALL_TILES = DecodeTiles(num_splits=3, min_split_tokens=16, block_n=16)
# Every group with both page sizes, and every type with both and with several groups.
SHAPES = [
    (1, 1, torch.float32), (2, 16, torch.float32), (4, 1, torch.float32), (5, 16, torch.float32),
    (1, 16, torch.float16), (4, 1, torch.float16), (2, 1, torch.bfloat16), (5, 16, torch.bfloat16), (4, 16, torch.bfloat16),
    (5, 1, torch.bfloat16),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


def scratch(rows: int = 8) -> DecodeScratch:
    return DecodeScratch.allocate(rows, 16, 4, 8, 128, torch.device("cpu"))


def check(
    lengths: list[int],
    group: int = 2,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    tiles: DecodeTiles = SMALL_TILES,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    world = make_paged_world(lengths, num_kv_heads, head_dim, page_size, dtype)
    q = torch.randn(len(lengths), num_kv_heads * group, head_dim).to(dtype)
    scale = head_dim**-0.5
    expected = decode_attention_reference(q, world.kv, world.req_pool_indices, world.seq_lens, scale, window, softcap)
    out = torch.full_like(q, float("nan"))
    decode_attention(
        q, world.kv, world.req_pool_indices, world.seq_lens, scale, out, tiles, scratch(), window, softcap=softcap
    )
    assert (out - expected).abs().max() <= TOLERANCE[dtype]


@pytest.mark.parametrize(("group", "page_size", "dtype"), SHAPES)
def test_every_group_and_page_size_equals_the_reference(group: int, page_size: int, dtype: torch.dtype) -> None:
    check([1, 15, 16, 17, 40], group=group, num_kv_heads=1, page_size=page_size, dtype=dtype)


@pytest.mark.parametrize("head_dim", [8, 16, 32, 64, 80, 128])
def test_every_head_size_equals_the_reference(head_dim: int) -> None:
    check([1, 33], head_dim=head_dim)


@pytest.mark.parametrize("num_splits", [1, 2, 8])
def test_rows_fill_none_one_or_all_of_the_splits(num_splits: int) -> None:
    check(
        [0, 1, 31, 32, 33, 130],
        num_kv_heads=1,
        tiles=DecodeTiles(num_splits=num_splits, min_split_tokens=32, block_n=16),
    )


def test_a_padding_row_of_length_0_is_zeros() -> None:
    world = make_paged_world([5, 0], num_kv_heads=1, head_dim=32, page_size=16, dtype=torch.float32)
    q = torch.randn(2, 2, 32)
    out = torch.full_like(q, float("nan"))
    decode_attention(q, world.kv, world.req_pool_indices, world.seq_lens, 0.2, out, SMALL_TILES, scratch())
    assert torch.equal(out[1], torch.zeros(2, 32))
    assert torch.isfinite(out[0]).all()


def test_a_batch_of_no_rows_is_left_alone() -> None:
    check([3])
    world = make_paged_world([3], num_kv_heads=1, head_dim=32, page_size=16, dtype=torch.float32)
    none = torch.empty(0, dtype=torch.int64)
    decode_attention(torch.empty(0, 2, 32), world.kv, none, none, 1.0, torch.empty(0, 2, 32), SMALL_TILES, scratch())


def test_a_rows_result_has_the_same_bits_alone_and_in_a_batch() -> None:
    world = make_paged_world([70, 3, 100], num_kv_heads=2, head_dim=32, page_size=16, dtype=torch.float32)
    q = torch.randn(3, 4, 32)
    together, alone = torch.empty_like(q), torch.empty(1, 4, 32)
    decode_attention(q, world.kv, world.req_pool_indices, world.seq_lens, 0.2, together, SMALL_TILES, scratch())
    decode_attention(
        q[2:], world.kv, world.req_pool_indices[2:], world.seq_lens[2:], 0.2, alone, SMALL_TILES, scratch()
    )
    assert torch.equal(together[2], alone[0])


def test_queries_may_be_slices_of_a_fused_projection() -> None:
    world = make_paged_world([9, 20], num_kv_heads=1, head_dim=32, page_size=16, dtype=torch.float32)
    fused = torch.randn(2, (2 + 1 + 1) * 32)
    q = fused[:, : 2 * 32].view(2, 2, 32)
    out = torch.empty(2, 2, 32)
    decode_attention(q, world.kv, world.req_pool_indices, world.seq_lens, 0.2, out, SMALL_TILES, scratch())
    expected = decode_attention_reference(q, world.kv, world.req_pool_indices, world.seq_lens, 0.2)
    torch.testing.assert_close(out, expected)


def test_lengths_and_slots_may_be_32_or_64_bit() -> None:
    world = make_paged_world([9, 20], num_kv_heads=1, head_dim=32, page_size=16, dtype=torch.float32)
    q = torch.randn(2, 2, 32)
    wide, narrow = torch.empty_like(q), torch.empty_like(q)
    decode_attention(
        q, world.kv, world.req_pool_indices.long(), world.seq_lens.long(), 0.2, wide, SMALL_TILES, scratch()
    )
    decode_attention(
        q, world.kv, world.req_pool_indices.int(), world.seq_lens.int(), 0.2, narrow, SMALL_TILES, scratch()
    )
    assert torch.equal(wide, narrow)


@pytest.mark.parametrize("window", [1, 16, 33, 1000])
def test_a_window_hides_all_but_the_last_positions(window: int) -> None:
    check([0, 1, 31, 33, 130], num_kv_heads=1, window=window)


@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_a_cap_bends_the_scores(softcap: float) -> None:
    check([0, 1, 31, 33, 130], num_kv_heads=1, window=40, softcap=softcap)


def test_what_programs_of_a_row_count_with_is_zero_again_afterwards() -> None:
    world = make_paged_world([130, 7, 64], num_kv_heads=2, head_dim=32, page_size=16, dtype=torch.float32)
    q, shared = torch.randn(3, 4, 32), scratch()
    expected = decode_attention_reference(q, world.kv, world.req_pool_indices, world.seq_lens, 0.2)
    for _ in range(2):
        out = torch.full_like(q, float("nan"))
        decode_attention(q, world.kv, world.req_pool_indices, world.seq_lens, 0.2, out, SMALL_TILES, shared)
        torch.testing.assert_close(out, expected)
        assert not shared.arrived.any()


def test_a_memory_of_fp8_is_read_with_its_scales() -> None:
    world = make_paged_world([5, 40], num_kv_heads=1, head_dim=32, page_size=16, dtype=torch.float32)
    keys, values = world.kv.k_buffer.to(torch.float8_e4m3fn), world.kv.v_buffer.to(torch.float8_e4m3fn)
    kv = PagedKV(keys, values, world.kv.page_table, world.kv.page_size, k_scale=0.5, v_scale=3.0)
    q = torch.randn(2, 2, 32)
    expected = decode_attention_reference(q, kv, world.req_pool_indices, world.seq_lens, 0.2)
    out = torch.full_like(q, float("nan"))
    decode_attention(q, kv, world.req_pool_indices, world.seq_lens, 0.2, out, SMALL_TILES, scratch())
    torch.testing.assert_close(out, expected)
