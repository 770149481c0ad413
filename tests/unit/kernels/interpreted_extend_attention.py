"""Extend attention in Triton's interpreter, against its reference."""

from __future__ import annotations

import pytest
import torch

from srt.kernels.attention.extend_attention import ExtendTiles, extend_any_rows, extend_attention
from srt.kernels.attention.paged_kv import PagedKV
from tests.support.attention_reference import extend_attention_reference
from tests.unit.kernels.paged_world import make_paged_world

TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SMALL_TILES = ExtendTiles(block_m=16, block_n=16)
MIX = [(0, 1), (0, 17), (15, 2), (16, 1), (17, 16), (3, 0), (33, 31)]  # (cached prefix, chunk)
# Every group with both page sizes, and every type with both and with several groups.
SHAPES = [
    (1, 1, torch.float32), (2, 16, torch.float32), (4, 1, torch.float32), (5, 16, torch.float32),
    (1, 16, torch.float16), (4, 1, torch.float16), (2, 1, torch.bfloat16), (5, 16, torch.bfloat16), (4, 16, torch.bfloat16),
    (5, 1, torch.bfloat16),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


def check(
    chunks: list[tuple[int, int]],
    group: int = 2,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    tiles: ExtendTiles = SMALL_TILES,
    num_other_tokens: int = 0,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    world = make_paged_world([prefix + chunk for prefix, chunk in chunks], num_kv_heads, head_dim, page_size, dtype)
    prefix_lens = torch.tensor([prefix for prefix, _ in chunks])
    extend_lens = torch.tensor([chunk for _, chunk in chunks])
    start_locs = extend_lens.cumsum(0) - extend_lens
    num_tokens = int(extend_lens.sum())
    scale = head_dim**-0.5
    q = torch.randn(num_tokens + num_other_tokens, num_kv_heads * group, head_dim).to(dtype)
    rows = (world.req_pool_indices, prefix_lens, extend_lens, start_locs)
    expected = extend_attention_reference(q, world.kv, *rows, scale, window, softcap)
    out = torch.full_like(q, float("nan"))
    extend_attention(q, world.kv, *rows, int(extend_lens.max()), scale, out, tiles, window, softcap)
    assert (out[:num_tokens] - expected[:num_tokens]).abs().max() <= TOLERANCE[dtype]
    assert out[num_tokens:].isnan().all()
    if dtype is not torch.float32:
        return
    slots, starts, counts = (torch.cat((values, torch.zeros(3, dtype=torch.int64))) for values in rows[:3])
    any_rows = torch.full_like(q, float("nan"))
    extend_any_rows(q, world.kv, slots, starts, counts, scale, any_rows, tiles, window, softcap)
    assert torch.equal(any_rows[:num_tokens], out[:num_tokens])
    assert any_rows[num_tokens:].isnan().all()


@pytest.mark.parametrize(("group", "page_size", "dtype"), SHAPES)
def test_every_group_and_page_size_equals_the_reference(group: int, page_size: int, dtype: torch.dtype) -> None:
    check(MIX, group=group, page_size=page_size, dtype=dtype, num_kv_heads=1)


@pytest.mark.parametrize("head_dim", [8, 16, 32, 64, 80, 128])
def test_every_head_size_equals_the_reference(head_dim: int) -> None:
    check([(5, 4), (0, 20)], head_dim=head_dim)


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("block_n", [16, 64])
def test_every_tile_size_equals_the_reference(block_m: int, block_n: int) -> None:
    check([(0, 70), (65, 1)], tiles=ExtendTiles(block_m=block_m, block_n=block_n))


def test_tokens_of_no_row_are_left_alone() -> None:
    check([(2, 3), (0, 4)], num_other_tokens=5)


def test_a_chunk_attended_in_pieces_gives_the_same_as_in_one() -> None:
    world = make_paged_world([37], num_kv_heads=2, head_dim=32, page_size=16, dtype=torch.float32)
    q = torch.randn(37, 4, 32)
    whole, pieces = torch.empty_like(q), torch.empty_like(q)
    slot, zero = world.req_pool_indices, torch.tensor([0])
    extend_attention(q, world.kv, slot, zero, torch.tensor([37]), zero, 37, 0.2, whole, SMALL_TILES)
    for begin in range(0, 37, 7):
        count = min(7, 37 - begin)
        out = torch.empty(count, 4, 32)
        lengths = (torch.tensor([begin]), torch.tensor([count]))
        extend_attention(q[begin : begin + count], world.kv, slot, *lengths, zero, count, 0.2, out, SMALL_TILES)
        pieces[begin : begin + count] = out
    torch.testing.assert_close(pieces, whole)


def test_queries_may_be_slices_of_a_fused_projection() -> None:
    world = make_paged_world([20], num_kv_heads=1, head_dim=32, page_size=16, dtype=torch.float32)
    q = torch.randn(20, 4 * 32)[:, 32 : 3 * 32].view(20, 2, 32)
    row = (world.req_pool_indices, torch.tensor([0]), torch.tensor([20]), torch.tensor([0]))
    out = torch.empty(20, 2, 32)
    extend_attention(q, world.kv, *row, 20, 0.2, out, SMALL_TILES)
    torch.testing.assert_close(out, extend_attention_reference(q, world.kv, *row, 0.2))


@pytest.mark.parametrize("softcap", [0.5, 50.0])
@pytest.mark.parametrize("window", [None, 20])
def test_a_cap_bends_the_scores(window: int | None, softcap: float) -> None:
    check([*MIX, (70, 40)], group=2, num_kv_heads=1, window=window, softcap=softcap)


@pytest.mark.parametrize(("window", "group"), [(1, 1), (16, 5), (20, 1), (1000, 5)])
def test_a_window_hides_all_but_the_last_positions(window: int, group: int) -> None:
    check([*MIX, (70, 40)], group=group, num_kv_heads=1, window=window)


def test_a_memory_of_fp8_is_read_with_its_scales() -> None:
    world = make_paged_world([40], num_kv_heads=1, head_dim=32, page_size=16, dtype=torch.float32)
    keys, values = world.kv.k_buffer.to(torch.float8_e4m3fn), world.kv.v_buffer.to(torch.float8_e4m3fn)
    kv = PagedKV(keys, values, world.kv.page_table, world.kv.page_size, k_scale=0.5, v_scale=3.0)
    q = torch.randn(9, 2, 32)
    rows = (world.req_pool_indices, torch.tensor([31]), torch.tensor([9]), torch.tensor([0]))
    out = torch.full_like(q, float("nan"))
    extend_attention(q, kv, *rows, 9, 0.2, out, SMALL_TILES)
    torch.testing.assert_close(out, extend_attention_reference(q, kv, *rows, 0.2))


def test_rows_without_tokens_are_none() -> None:
    world = make_paged_world([5], num_kv_heads=1, head_dim=32, page_size=16, dtype=torch.float32)
    q, nothing = torch.randn(40, 2, 32), torch.zeros(3, dtype=torch.int64)
    out = torch.full_like(q, float("nan"))
    extend_any_rows(q, world.kv, nothing, nothing, nothing, 0.2, out, SMALL_TILES)
    assert out.isnan().all()


def test_positions_behind_the_window_are_not_read() -> None:
    """Their pages may be another request's by now."""
    window, prefixes, counts = 9, [40, 70], [5, 20]
    lengths = [prefix + count for prefix, count in zip(prefixes, counts, strict=True)]
    world = make_paged_world(lengths, num_kv_heads=2, head_dim=32, page_size=16, dtype=torch.float32)
    q, kv = torch.randn(sum(counts), 4, 32), world.kv
    rows = world.req_pool_indices, torch.tensor(prefixes), torch.tensor(counts), torch.tensor([0, counts[0]])
    expected = extend_attention_reference(q, kv, *rows, 32**-0.5, window)
    for slot, prefix in zip(world.req_pool_indices.tolist(), prefixes, strict=True):
        behind = torch.arange(prefix - window + 1)
        locations = kv.page_table[slot, behind // 16].long() * 16 + behind % 16
        kv.k_buffer[locations] = kv.v_buffer[locations] = float("nan")
    out = torch.empty_like(q)
    extend_attention(q, kv, *rows, max(counts), 32**-0.5, out, SMALL_TILES, window)
    assert (out - expected).abs().max() <= TOLERANCE[torch.float32]
