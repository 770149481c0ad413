"""The kernels of deterministic servers in Triton's interpreter: right, and for a row the same bits beside any others."""

from __future__ import annotations

import pytest
import torch

from srt.kernels.attention import invariant_attention
from srt.kernels.attention.invariant_attention import attend_chunks, attend_decodes
from srt.kernels.elementwise.invariant_sums import sum_add_norm, sum_prepare_qkv
from srt.kernels.elementwise.rotary import prepare_qkv
from srt.kernels.gemm import invariant_gemm
from srt.kernels.gemm.invariant_gemm import ProductTiles, Splits, gated_product, invariant_product
from srt.kernels.sampling.row_logprobs import largest, row_logprobs
from tests.support.attention_reference import decode_attention_reference, extend_attention_reference
from tests.unit.kernels.paged_world import PagedWorld, make_paged_world

SCALE = 0.2
LENGTHS = [1, 130]


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant_attention, "SPLIT", 64)


@pytest.mark.parametrize(("n", "k", "num_rows"), [(70, 48, 20), (64, 1056, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_right(dtype: torch.dtype, n: int, k: int, num_rows: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(num_rows, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
    expected = x.double() @ weight.double().t() + bias.double()
    found = invariant_product(x, weight, bias)
    torch.testing.assert_close(found.double(), expected, rtol=2e-2 if dtype is torch.bfloat16 else 1e-4, atol=2e-3)


def test_a_row_of_a_product_is_the_same_beside_any_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums within a block are exact here, because the interpreter leaves their order to a library; between blocks they are rounded."""
    monkeypatch.setattr(invariant_gemm, "_MOST_PARTED_ROWS", 20)
    torch.manual_seed(0)
    k = 1056
    scales = 2.0 ** torch.randint(0, 20, (k // 32,)).repeat_interleave(32)
    x, weight = torch.randint(-8, 9, (40, k)) * scales, torch.randint(-8, 9, (64, k)).float()
    whole = invariant_product(x, weight)
    assert not torch.equal(whole.double(), x.double() @ weight.double().t())
    for rows in (slice(0, 1), slice(3, 20), slice(10, 40)):
        assert torch.equal(invariant_product(x[rows], weight), whole[rows])


def test_splits_of_a_sum_do_not_depend_on_who_adds_them() -> None:
    """Up to 256 rows have programs for each split; more rows have one for all."""
    splits = Splits.of(64, 1056)
    assert splits == Splits(2, 5)
    assert ProductTiles.choose(300, splits.num, torch.float32) == ProductTiles.choose(1, 1, torch.float32)
    assert Splits.of(151936, 4096).num == 1


def queries_of(world: PagedWorld, group: int, chunk: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries of the last `chunk` positions of each request, and the numbers of positions before them and of queries."""
    counts = world.seq_lens.clamp(max=chunk)
    torch.manual_seed(1)
    q = torch.randn(int(counts.sum()), world.kv.num_kv_heads * group, world.kv.head_dim)
    return q.to(world.kv.k_buffer.dtype), world.seq_lens - counts, counts


def attended(world: PagedWorld, q: torch.Tensor, prefixes: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(q, 7.0)
    starts = counts.cumsum(0) - counts
    attend_chunks(q, world.kv, world.req_pool_indices, prefixes, counts, starts, int(counts.max()), SCALE, out)
    return out


def decoded(world: PagedWorld, q: torch.Tensor, num_programs: int) -> torch.Tensor:
    """The result of the last position of each request."""
    out, slots = torch.full_like(q, 7.0), world.req_pool_indices
    attend_decodes(q, world.kv, slots, world.seq_lens, 192, 2, SCALE, out, num_programs=num_programs)
    return out


def rounded_between_blocks(world: PagedWorld) -> None:
    """Change keys and values so that sums within a block of 32 positions are exact: the interpreter leaves their order to a library."""
    kv = world.kv
    kv.k_buffer.mul_(2).round_()
    for slot, length in zip(world.req_pool_indices.tolist(), world.seq_lens.tolist(), strict=True):
        positions = torch.arange(length)
        locations = kv.page_table[slot, positions // kv.page_size].long() * kv.page_size + positions % kv.page_size
        kv.v_buffer[locations] *= (positions[:, None] % 32 == torch.arange(kv.head_dim)).to(kv.v_buffer.dtype)[:, None]


@pytest.mark.parametrize(("dtype", "group", "page_size"), [(torch.float32, 3, 1), (torch.bfloat16, 1, 16)])
def test_attention_is_right(dtype: torch.dtype, group: int, page_size: int) -> None:
    world = make_paged_world(LENGTHS, 2, 24, page_size, dtype)
    kv, slots = world.kv, world.req_pool_indices
    q, prefixes, counts = queries_of(world, group, 24)
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-4
    expected = extend_attention_reference(q, kv, slots, prefixes, counts, counts.cumsum(0) - counts, SCALE)
    torch.testing.assert_close(attended(world, q, prefixes, counts), expected, rtol=tolerance, atol=tolerance)
    last = q[counts.cumsum(0) - 1]
    expected = decode_attention_reference(last, kv, slots, world.seq_lens, SCALE)
    for num_programs in (1, 2):
        torch.testing.assert_close(decoded(world, last, num_programs), expected, rtol=tolerance, atol=tolerance)


def test_a_token_is_the_same_in_a_chunk_and_in_a_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant_attention, "SPLIT", 32)
    group = 3
    world = make_paged_world([1, 100, 64], 1, 32, 16, torch.float32)
    rounded_between_blocks(world)
    q, prefixes, counts = queries_of(world, group, 24)
    q.round_()
    whole, ends = attended(world, q, prefixes, counts), counts.cumsum(0)
    for num_programs in (1, 3):
        assert torch.equal(decoded(world, q[ends - 1], num_programs), whole[ends - 1])
    short = counts.clamp(max=7)
    kept = torch.cat([torch.arange(int(end - count), int(end)) for end, count in zip(ends, short, strict=True)])
    assert torch.equal(attended(world, q[kept], prefixes + counts - short, short), whole[kept])


def test_logprobs_of_a_row_are_right_and_the_same_beside_others() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 5001) * 3
    found = row_logprobs(logits[:, :4999])
    torch.testing.assert_close(found, logits[:, :4999].log_softmax(-1))
    assert torch.equal(row_logprobs(logits[3:4, :4999]), found[3:4])


def test_equal_logprobs_are_ordered_by_column() -> None:
    values = torch.tensor([[-1.0, float("-inf"), -0.5, -1.0, 0.25, -1.0], [-3.0, 2.0, 2.0, -3.0, 2.0, -4.0]])
    columns, best = largest(values, 4)
    assert columns.tolist() == [[4, 2, 0, 3], [1, 2, 4, 0]]
    assert torch.equal(best, values.gather(1, columns.long()))
    assert largest(values, 0)[0].shape == (2, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gated_product_is_right(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(9, 96).to(dtype), torch.randn(140, 96).to(dtype)
    gates, ups = (x.double() @ weight.double().t()).chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gates) * ups
    torch.testing.assert_close(gated_product(x, weight).double(), expected, rtol=1e-2, atol=1e-4)


def test_parts_are_added_to_the_stream_in_order_and_normed() -> None:
    torch.manual_seed(0)
    parts, bias, hidden, weight = torch.randn(3, 4, 40), torch.randn(40), torch.randn(4, 40), torch.randn(40)
    normed, total = sum_add_norm(parts, bias, hidden, weight, 1e-6)
    assert torch.equal(total, hidden + (((parts[0] + parts[1]) + parts[2]) + bias))
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(total, (40,), weight, 1e-6))


def test_a_product_that_is_rounded_already_is_one_part() -> None:
    torch.manual_seed(0)
    product, hidden, weight = (torch.randn(4, 40).bfloat16() for _ in range(3))
    found = sum_add_norm(product[None], None, hidden, weight[0], 1e-6)
    expected = sum_add_norm(product[None].float(), None, hidden, weight[0], 1e-6)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize("has_norms", [False, True])
def test_parts_of_heads_are_prepared_as_their_sum_is(has_norms: bool) -> None:
    torch.manual_seed(0)
    parts, bias = torch.randn(2, 5, 96), torch.randn(96)
    norms = (torch.randn(16), torch.randn(16)) if has_norms else None
    cos, sin, locations = torch.randn(5, 1, 8), torch.randn(5, 1, 8), torch.tensor([3, 0, 6, 2, 5])
    found, expected = ([torch.zeros(5, 96), torch.zeros(7, 1, 16), torch.zeros(7, 1, 16)] for _ in range(2))
    sum_prepare_qkv(parts, bias, 4, norms, 1e-6, cos, sin, locations, found[1], found[2], found[0])
    prepare_qkv(
        parts[0] + parts[1] + bias, 4, norms, 1e-6, cos, sin, locations, expected[1], expected[2], out=expected[0]
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
