"""The kernels of layers and of sampling at the sizes of real models, against what PyTorch says of the same inputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from srt.kernels.attention.decode_attention import DecodeScratch, DecodeTiles, decode_attention
from srt.kernels.attention.even_attention import EvenShares, even_attention, find_shares, shares_at_once
from srt.kernels.attention.extend_attention import ExtendTiles, extend_any_rows, extend_attention
from srt.kernels.attention.paged_kv import PagedKV
from srt.kernels.attention.shared_prefix import SharedPrefix, find_shared, shared_attention
from srt.kernels.attention.stream_attention import can_stream, is_streamed, shares_of, stream_attention
from srt.kernels.attention.wide_decode import is_wide, wide_decode
from srt.kernels.build.arrival import Arrival, LateRows
from srt.kernels.elementwise.rotary import prepare_qkv
from srt.kernels.gemm.gated_gemm import GatedGemm
from srt.kernels.gemm.stream_gemm import (
    MOST_GATED_ROWS,
    MOST_PLAIN_ROWS,
    MOST_ROWS,
    PLAIN,
    Ending,
    Heads,
    StreamGemm,
    Weighted,
)
from srt.kernels.sampling.adjust_logits import AdjustmentKernels
from srt.kernels.sampling.draw_rows import DrawRows
from srt.kernels.sampling.filter import filter_thresholds
from srt.kernels.sampling.sample import draw
from srt.layers import sampler
from srt.layers.kernel_ops import KernelOps
from srt.layers.logit_adjustments import adjust_logits
from srt.layers.ops import Affine, Norm, Rotation, Stream, rotate
from srt.layers.quantization.weight import PlainWeight
from srt.mem_cache.memory_pool import ReqToTokenPool
from srt.sampling.no_filter import NO_TOP_K, NO_TOP_P

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
VOCABULARY = 151_936
EPS = 1e-6


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=CUDA, dtype=torch.bfloat16)


def assert_near(got: Tensor, expected: Tensor, most: float = 5e-3) -> None:
    error = (got.double() - expected.double()).norm() / expected.double().norm()
    assert error < most, float(error)


def among_others(rows: Tensor) -> Tensor:
    """The same rows; behind them are some that belong to somebody else."""
    return torch.cat((rows, torch.full_like(rows, float("nan"))))[: len(rows)]


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), EPS)


@pytest.mark.parametrize("num_rows", [2, 5, 16, 17, 33, 64, 72, MOST_GATED_ROWS])
@pytest.mark.parametrize(("hidden_size", "inner_size"), [(1024, 3072), (4096, 12288), (5120, 17408), (2048, 8200)])
def test_streamed_products_are_right_and_the_same_every_time(hidden_size: int, inner_size: int, num_rows: int) -> None:
    """8,200 columns end within a tile."""
    gemm = StreamGemm(CUDA)
    x = among_others(randn(num_rows, hidden_size))
    gate_up = randn(2 * inner_size, hidden_size) * hidden_size**-0.5
    gate, up = (x.float() @ gate_up.float().T).chunk(2, dim=-1)
    residual = randn(num_rows, inner_size)
    cases = [
        (Ending(is_gated=True), gate_up, None, F.silu(gate) * up),
        (PLAIN, gate_up[:inner_size], None, gate),
        (Ending(has_residual=True), gate_up[:inner_size], residual, gate + residual.float()),
    ]
    for ending, weight, onto, expected in cases:
        tiles = gemm.tiles(x, weight, ending)
        is_small = hidden_size == 1024
        is_for_others = num_rows > MOST_PLAIN_ROWS and (is_small if ending.is_gated else not ending.has_residual)
        if tiles is None:
            assert is_for_others or (inner_size == 17_408 and not ending.is_gated), "which has gated tiles only"
            continue
        assert not is_for_others
        streamed = gemm.multiply(x, weight, tiles, onto)
        assert_near(streamed, expected)
        assert all(torch.equal(gemm.multiply(x, weight, tiles, onto), streamed) for _ in range(20))


@pytest.mark.parametrize("num_rows", [2, 5, 16, 33, 64, 80, 96, 100, 128, 150, MOST_ROWS, 200, 256])
@pytest.mark.parametrize(("hidden_size", "inner_size"), [(1024, 3072), (4096, 12288), (5120, 17408)])
def test_a_norm_is_left_by_one_product_and_finished_by_the_next(
    hidden_size: int, inner_size: int, num_rows: int
) -> None:
    stream, gated = StreamGemm(CUDA), GatedGemm(CUDA)
    x, residual = among_others(randn(num_rows, inner_size)), randn(num_rows, hidden_size) * 20
    down, norm_weight = randn(hidden_size, inner_size) * inner_size**-0.5, randn(hidden_size)
    tiles = stream.tiles(x, down, Ending(has_residual=True, is_weighted=True))
    if tiles is None:
        assert num_rows > MOST_ROWS and hidden_size == 5120, "whose programs do not fill the device"
        return
    product, weighted = stream.multiply_weighted(x, down, tiles, residual, norm_weight, EPS)
    assert_near(product, residual.float() + x.float() @ down.float().T)
    assert_near(weighted.values, product.float() * norm_weight.float())
    parts = len(weighted.squares)
    assert_near(weighted.squares, product.float().square().unflatten(1, (parts, -1)).sum(2).T)

    gate_up = randn(2 * inner_size, hidden_size) * hidden_size**-0.5
    gate, up = (normed(product, norm_weight) @ gate_up.float().T).chunk(2, dim=-1)
    if num_rows <= (MOST_PLAIN_ROWS if hidden_size == 1024 else MOST_GATED_ROWS):
        streamed = stream.tiles(product, gate_up, Ending(is_gated=True, is_scaled=True))
        assert streamed is not None
        activated = stream.multiply(weighted, gate_up, streamed)
    else:
        many = gated.tiles(product, gate_up)
        assert many is not None
        activated = gated.multiply(weighted, gate_up, many)
    assert_near(activated, F.silu(gate) * up)
    again, also = stream.multiply_weighted(x, down, tiles, residual, norm_weight, EPS)
    assert torch.equal(again, product) and torch.equal(also.squares, weighted.squares)


@pytest.mark.parametrize("num_rows", [2, 5, 16, 33, 64, 80, 96, 100, 128, 150, MOST_ROWS, 200, 256])
@pytest.mark.parametrize(
    ("hidden_size", "heads", "kv_heads", "head_dim"),
    [(1024, 16, 8, 128), (4096, 32, 8, 128), (5120, 40, 8, 128), (2048, 32, 8, 64), (4096, 64, 3, 64)],
)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_heads_are_normed_rotated_and_stored_by_their_product(
    hidden_size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    num_rows: int,
    has_norm: bool,
    is_scaled: bool,
    is_fp8: bool,
) -> None:
    """In a memory of fp8 divided by its scales, which costs 4 bits of mantissa."""
    gemm, num_locations = StreamGemm(CUDA), 1000
    x, norm_weight = among_others(randn(num_rows, hidden_size)), randn(hidden_size)
    weight = randn((heads + 2 * kv_heads) * head_dim, hidden_size) * hidden_size**-0.5
    ending = Ending(is_scaled=is_scaled, head_dim=head_dim, has_head_norm=has_norm, is_fp8=is_fp8)
    tiles = gemm.tiles(x, weight, ending)
    if tiles is None:
        assert num_rows > MOST_ROWS and hidden_size > 1024, "of which few weights have tiles"
        return
    angles = torch.rand(num_rows, 1, head_dim // 2, device=CUDA) * 6
    cos, sin = angles.cos(), angles.sin()
    weights = (randn(head_dim), randn(head_dim)) if has_norm else None
    stored = torch.float8_e4m3fn if is_fp8 else torch.bfloat16
    scales, most = ((0.125, 1.5), 0.04) if is_fp8 else ((1.0, 1.0), 5e-3)
    shape = num_locations, kv_heads, head_dim
    pools = [torch.full(shape, 7.0, device=CUDA).to(stored) for _ in range(2)]
    locations = torch.randperm(num_locations, device=CUDA)[:num_rows]
    multiplied: Tensor | Weighted = x
    rows = x.float()
    if is_scaled:
        squares = x.float().square().unflatten(1, (-1, 64)).sum(2).T.contiguous()
        multiplied, rows = Weighted(x * norm_weight, squares, norm_weight, EPS), normed(x, norm_weight)
    where = Heads(heads * head_dim, weights, EPS, cos, sin, locations, pools[0], pools[1], *scales)
    queries = gemm.multiply_heads(multiplied, weight, tiles, where)

    packed = (rows @ weight.float().T).unflatten(1, (-1, head_dim))
    q, k, v = packed.split((heads, kv_heads, kv_heads), dim=1)
    if weights is not None:
        q, k = normed(q, weights[0]), normed(k, weights[1])
    rotation = Rotation(cos, sin)
    assert_near(queries, rotate(q, rotation).flatten(1))
    keys, values = (pool.float() * scale for pool, scale in zip(pools, scales, strict=True))
    assert_near(keys[locations], rotate(k, rotation), most)
    assert_near(values[locations], v, most)
    others = torch.ones(num_locations, dtype=torch.bool, device=CUDA)
    others[locations] = False
    assert all(bool((pool.float()[others] == 7.0).all()) for pool in pools)
    assert torch.equal(gemm.multiply_heads(multiplied, weight, tiles, where), queries)


@pytest.mark.parametrize("num_rows", [65, 128, 130, 192, 256, 500, 1024, 2345])
@pytest.mark.parametrize(
    ("hidden_size", "inner_size"), [(1024, 3072), (4096, 12288), (4096, 14336), (5120, 17408), (2048, 8200)]
)
def test_gated_products_are_right_and_the_same_every_time(hidden_size: int, inner_size: int, num_rows: int) -> None:
    gemm = GatedGemm(CUDA)
    x = torch.cat((randn(num_rows, hidden_size), torch.full_like(randn(64, hidden_size), float("nan"))))[:num_rows]
    weight = randn(2 * inner_size, hidden_size) * hidden_size**-0.5
    tiles = gemm.tiles(x, weight)
    if tiles is None:
        assert num_rows > 256 or inner_size == 17_408, "tiles may not be full enough, or there are two in a column"
        tiles = gemm.tiles(randn(65_536, hidden_size), weight)
    gate, up = (x.float() @ weight.float().T).chunk(2, dim=-1)
    assert tiles is not None
    product = gemm.multiply(x, weight, tiles)
    assert_near(product, F.silu(gate) * up)
    assert all(torch.equal(gemm.multiply(x, weight, tiles), product) for _ in range(20))


@pytest.mark.parametrize("num_rows", [2048, 2500, 8192])
@pytest.mark.parametrize("is_second", [False, True])
def test_a_gated_product_reads_late_rows_once_they_have_arrived(num_rows: int, is_second: bool) -> None:
    """Rows are NaN until long after the launch, when another stream copies them, and a number behind them.

    A copy from the host needs no multiprocessor: the kernel has all of them.
    """
    gemm, other = GatedGemm(CUDA), torch.cuda.Stream()
    x, weight = randn(num_rows, 2048), randn(2 * 7168, 2048) * 2048**-0.5
    halves = slice(0, 1280), slice(1280, num_rows)
    own, late = halves[is_second], halves[not is_second]
    arriving, number = x[late].cpu().pin_memory(), torch.zeros(1, dtype=torch.int64, device=CUDA)
    numbers = torch.arange(21).pin_memory()
    missing = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    tiles = gemm.tiles(randn(8192, 2048), weight)
    assert tiles is not None
    expected = gemm.multiply(x, weight, tiles)
    for run in range(1, 21):
        x[late] = float("nan")
        torch.cuda.synchronize()
        arrival = Arrival(number.data_ptr(), run, missing.data_ptr(), 10**10, 1)
        with torch.cuda.stream(other):
            torch.cuda._sleep(run * 100_000)
            x[late].copy_(arriving, non_blocking=True)
            number.copy_(numbers[run : run + 1], non_blocking=True)
        product = gemm.multiply(x, weight, tiles, late=LateRows(own, arrival))
        assert torch.equal(product, expected), run


@pytest.mark.parametrize("num_rows", [1, 3, 16, 64, 100, 256, 1024])
@pytest.mark.parametrize(("hidden_size", "inner_size"), [(1024, 3072), (4096, 12288), (5120, 17408)])
def test_the_products_of_an_mlp_take_in_norm_activation_and_residual(
    hidden_size: int, inner_size: int, num_rows: int
) -> None:
    ops = KernelOps(CUDA)
    x, norm = randn(num_rows, hidden_size), Norm(randn(hidden_size), EPS)
    gate_up_matrix = randn(2 * inner_size, hidden_size) * hidden_size**-0.5
    down_matrix = randn(hidden_size, inner_size) * inner_size**-0.5
    gate_up, down = (
        Affine(PlainWeight.of(gate_up_matrix), None),
        Affine(PlainWeight.of(down_matrix), randn(hidden_size)),
    )
    activated, hidden = ops.gated_linear_of_norm(Stream(x), norm, gate_up)
    normed = F.rms_norm(x.float(), (hidden_size,), norm.weight.float(), EPS)
    gate, up = (normed @ gate_up_matrix.float().T).chunk(2, dim=-1)
    assert_near(activated, F.silu(gate) * up)
    assert torch.equal(hidden, x)
    product = x.float() + activated.float() @ down_matrix.float().T
    assert down.bias is not None
    for affine, expected in ((down, product + down.bias.float()), (Affine(down.weight, None), product)):
        stream = ops.linear_onto(hidden.clone(), activated, affine)
        assert_near(stream.hidden.float() + (0.0 if stream.delta is None else stream.delta.float()), expected)


@pytest.mark.parametrize(("shard_start", "columns"), [(0, VOCABULARY), (VOCABULARY // 2, VOCABULARY // 2)])
def test_adjustments_of_long_requests_change_logits_as_the_reference_says(shard_start: int, columns: int) -> None:
    num_rows, longest = 300, 6000
    tables = ReqToTokenPool(num_rows, longest, 1, 16, CUDA)
    tables.token_table.random_(0, VOCABULARY // 50)  # so that most tokens come several times
    adjustments = tables.adjustments
    adjustments.penalties[:-1] = torch.rand(num_rows, 3, device=CUDA) + 0.5
    adjustments.penalties[::3] = torch.tensor([1.0, 0.0, 0.0], device=CUDA)
    adjustments.bias_ids[:] = torch.randperm(VOCABULARY, device=CUDA)[: adjustments.bias_ids.shape[1]]
    adjustments.bias_values.normal_()
    adjustments.stop_ids[:] = torch.randperm(VOCABULARY, device=CUDA)[: adjustments.stop_ids.shape[1]]
    lengths = torch.randint(2, longest, (num_rows,), device=CUDA)
    adjustments.limits[:-1] = torch.stack((lengths // 2, lengths + 7, lengths % 900, lengths % 400), dim=1)
    slots = torch.randperm(num_rows, device=CUDA)
    logits = torch.randn(num_rows, columns, device=CUDA) * 4
    expected, kernels = logits.clone(), AdjustmentKernels.allocate(num_rows, columns, CUDA)
    rest = (slots, lengths[slots], tables.token_table, adjustments, shard_start)
    adjust_logits(expected, *rest)
    kernels(logits, *rest)
    assert torch.equal(logits, expected)
    assert not kernels.counts.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_a_whole_vocabulary_is_drawn_from_as_the_sampler_says(dtype: torch.dtype, spread: float) -> None:
    num_rows = 24
    logits = (torch.randn(num_rows, VOCABULARY, device=CUDA) * spread).to(dtype)
    temperatures = torch.rand(num_rows, device=CUDA)
    temperatures[::4] = 0
    seeds = torch.randint(-(1 << 62), 1 << 62, (num_rows,), device=CUDA)
    rows = DrawRows(temperatures, seeds, torch.randint(0, 100_000, (num_rows,), device=CUDA))
    ids, values = draw(logits, rows, 0, VOCABULARY, pdl=True)
    expected_ids, expected_values = sampler.draw_from_shard(logits, rows, 0, VOCABULARY)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(values, expected_values)


@pytest.mark.parametrize("spread", [1.0, 3.0])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(20, 0.95, 0.0), (NO_TOP_K, 0.95, 0.0), (NO_TOP_K, NO_TOP_P, 0.05), (50, NO_TOP_P, 0.0), (1000, 0.5, 0.01)],
)
def test_filters_keep_what_sorting_keeps(top_k: int, top_p: float, min_p: float, spread: float) -> None:
    num_rows = 8
    logits = (torch.randn(num_rows, VOCABULARY, device=CUDA) * spread).bfloat16()
    temperatures = torch.full((num_rows,), 0.6, device=CUDA)
    top_ks = torch.full((num_rows,), top_k, device=CUDA)
    top_ps, min_ps = (torch.full((num_rows,), value, device=CUDA, dtype=torch.float64) for value in (top_p, min_p))
    filters = (None, temperatures, top_ks, top_ps, min_ps)
    scaled = logits.float() / temperatures.unsqueeze(1)
    kept = scaled >= filter_thresholds(logits, *filters, pdl=True).unsqueeze(1)
    assert torch.equal(kept, scaled >= sampler.filter_thresholds(logits, *filters).unsqueeze(1))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("group", "kv_heads"), [(4, 8), (2, 8), (5, 8), (8, 1)])
@pytest.mark.parametrize(("rows", "shared"), [(16, 4096), (64, 4096), (100, 640), (256, 2048)])
def test_a_shared_prefix_gives_what_every_row_reads_by_itself(
    rows: int, shared: int, group: int, kv_heads: int, head_dim: int
) -> None:
    """One row of each block shares nothing, one less than the others."""
    page_size, own, processors = 16, 5, torch.cuda.get_device_properties(CUDA).multi_processor_count
    first_pages = shared // page_size
    table = torch.randperm(first_pages + rows * (first_pages + own), device=CUDA).to(torch.int32)
    own_pages = table[first_pages:].view(rows, -1)
    pages = torch.cat((table[:first_pages].expand(rows, -1), own_pages[:, -own:]), 1).contiguous()
    pages[3::16, :first_pages] = own_pages[3::16, :first_pages]
    pages[5::16, first_pages // 2] = own_pages[5::16, 0]
    lens = shared + torch.randint(1, own * page_size, (rows,), device=CUDA)
    q, slots = randn(rows, kv_heads * group, head_dim), torch.arange(rows, device=CUDA)
    keys, values = (randn(len(table) * page_size, kv_heads, head_dim) for _ in range(2))
    kv = PagedKV(keys, values, pages, page_size)
    tiles = DecodeTiles.choose(q.dtype, head_dim, rows * kv_heads, 40_960, processors, 232_448)
    scratch = DecodeScratch.allocate(rows, kv_heads * group, kv_heads, tiles.num_splits, head_dim, CUDA)
    expected, got = torch.empty_like(q), torch.full_like(q, float("nan"))
    decode_attention(q, kv, slots, lens, 0.09, expected, tiles, scratch)
    memory = SharedPrefix.allocate(rows, kv_heads * group, kv_heads, head_dim, processors, CUDA)
    part = memory.of(rows, group, kv_heads, processors)
    find_shared(slots, lens, pages, page_size, group, 1, part.lens)
    shared_attention(q, kv, slots, 0.09, part, pdl=True)
    decode_attention(q, kv, slots, lens, 0.09, got, tiles, scratch, shared=part)
    assert_near(got, expected)
    wanted = torch.full_like(part.lens, shared)
    wanted[3::16] = wanted[5::16] = 0
    assert part.lens.tolist() == wanted.tolist()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("group", "kv_heads"), [(4, 8), (2, 8), (5, 8), (8, 4)])
@pytest.mark.parametrize("rows", [24, 64, 100, 256, 500])
def test_even_shares_give_what_is_read_row_by_row(rows: int, group: int, kv_heads: int, head_dim: int) -> None:
    """Some rows are padding, whose length is 0 or 1."""
    page_size, longest, processors = 16, 2048, torch.cuda.get_device_properties(CUDA).multi_processor_count
    pages = torch.randperm(rows * longest // page_size, device=CUDA).to(torch.int32).view(rows, -1)
    lens = torch.randint(1, longest, (rows,), device=CUDA)
    lens[::7], lens[1::11], lens[-1] = 1, 0, longest
    q, slots = randn(rows, kv_heads * group, head_dim), torch.randperm(rows, device=CUDA)
    keys, values = (randn(pages.numel() * page_size, kv_heads, head_dim) for _ in range(2))
    kv = PagedKV(keys, values, pages, page_size)
    tiles = DecodeTiles.choose(q.dtype, head_dim, rows * kv_heads, 40_960, processors, 232_448)
    scratch = DecodeScratch.allocate(rows, kv_heads * group, kv_heads, tiles.num_splits, head_dim, CUDA)
    expected, got = torch.empty_like(q), torch.full_like(q, float("nan"))
    decode_attention(q, kv, slots, lens, 0.09, expected, tiles, scratch)
    shares = EvenShares.allocate(rows, kv_heads * group, kv_heads, head_dim, shares_at_once(kv_heads, processors), CUDA)
    find_shares(lens, shares)
    for _ in range(20):
        even_attention(q, kv, slots, lens, 0.09, got.fill_(float("nan")), shares, pdl=2)
        assert_near(got[lens > 0], expected[lens > 0])


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype"), [(64, torch.bfloat16), (128, torch.bfloat16), (128, torch.float8_e4m3fn)], ids=str
)
@pytest.mark.parametrize(
    ("group", "kv_heads", "page_size"), [(4, 8, 16), (2, 8, 64), (5, 8, 16), (8, 4, 32), (1, 2, 16), (8, 1, 16)]
)
@pytest.mark.parametrize("rows", [1, 4, 16, 64, 100, 256, 500])
def test_streamed_attention_gives_what_is_read_row_by_row(
    rows: int, group: int, kv_heads: int, page_size: int, head_dim: int, kv_dtype: torch.dtype
) -> None:
    check_streamed(rows, group, kv_heads, page_size, head_dim, kv_dtype, None)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("group", "kv_heads", "page_size"), [(2, 4, 16), (4, 1, 16), (5, 2, 64), (1, 8, 32)])
@pytest.mark.parametrize(("head_dim", "window"), [(256, None), (256, 1024), (256, 30), (128, 300), (128, 1)])
@pytest.mark.parametrize("rows", [1, 4, 64, 256])
def test_streamed_attention_of_wide_heads_and_windows(
    rows: int, head_dim: int, window: int | None, group: int, kv_heads: int, page_size: int, kv_dtype: torch.dtype
) -> None:
    check_streamed(rows, group, kv_heads, page_size, head_dim, kv_dtype, window)


def check_streamed(
    rows: int, group: int, kv_heads: int, page_size: int, head_dim: int, kv_dtype: torch.dtype, window: int | None
) -> None:
    """Some rows are padding, whose length is 0 or 1. What lies behind a row's end, or in pages before its window, is not a number."""
    longest, processors = 2048, torch.cuda.get_device_properties(CUDA).multi_processor_count
    assert is_streamed(CUDA, torch.bfloat16, kv_dtype, head_dim, group, kv_heads, page_size)
    assert can_stream(CUDA, kv_dtype, head_dim, group, page_size)
    pages = torch.randperm(rows * longest // page_size, device=CUDA).to(torch.int32).view(rows, -1)
    lens = torch.randint(1, longest, (rows,), device=CUDA)
    if rows > 1:
        lens[::7], lens[1::11], lens[-1] = 1, 0, longest
    q, slots = randn(rows, kv_heads * group, head_dim), torch.randperm(rows, device=CUDA)
    keys, values = (randn(pages.numel() * page_size, kv_heads, head_dim) for _ in range(2))
    positions = torch.arange(longest, device=CUDA)
    locations = pages[slots].long().repeat_interleave(page_size, 1) * page_size + positions % page_size
    behind = locations[positions >= lens[:, None]]
    keys[behind] = values[behind] = float("nan")
    if window is not None:
        first_pages = (lens - window).clamp(min=0) // page_size
        before = locations[positions // page_size < first_pages[:, None]]
        keys[before] = values[before] = float("nan")
    scales = (1.0, 1.0) if kv_dtype is torch.bfloat16 else (0.5, 1.5)
    kv = PagedKV(keys.to(kv_dtype), values.to(kv_dtype), pages, page_size, *scales)
    tiles = DecodeTiles.choose(q.dtype, head_dim, rows * kv_heads, 40_960, processors, 232_448)
    scratch = DecodeScratch.allocate(rows, kv_heads * group, kv_heads, tiles.num_splits, head_dim, CUDA)
    expected, got = torch.empty_like(q), torch.empty_like(q)
    decode_attention(q, kv, slots, lens, 0.09, expected, tiles, scratch, window)
    shares = EvenShares.allocate(rows, kv_heads * group, kv_heads, head_dim, shares_of(kv_heads, processors), CUDA)
    find_shares(lens, shares, window)
    for _ in range(20):
        stream_attention(q, kv, slots, lens, 0.09, got.fill_(float("nan")), shares, window)
        assert_near(got[lens > 0], expected[lens > 0])
    assert not shares.arrived.any()


@pytest.mark.parametrize(("group", "kv_heads"), [(1, 2), (2, 4), (4, 1)])
@pytest.mark.parametrize(("window", "offset"), [(None, None), (None, 0), (1024, 1)])
@pytest.mark.parametrize("length", [1, 2, 33, 34, 700, 1023, 1024, 1070, 2050, 9000])
def test_wide_heads_attend_from_the_projection_as_by_one_kernel_after_the_other(
    length: int, window: int | None, offset: int | None, group: int, kv_heads: int
) -> None:
    """Launched again and again behind each other: each launch may start before the one before it has ended. `offset` is as in norms."""
    num_heads, head_dim, page_size, num_splits = group * kv_heads, 256, 16, 64
    assert is_wide(CUDA, torch.bfloat16, torch.bfloat16, head_dim, group, page_size)
    pages = torch.randperm(1024, device=CUDA).to(torch.int32).view(1, -1)
    lens, slots = torch.tensor([length], device=CUDA), torch.zeros(1, dtype=torch.int64, device=CUDA)
    keys, values = (randn(pages.numel() * page_size, kv_heads, head_dim) for _ in range(2))
    positions = torch.arange(pages.numel() * page_size, device=CUDA)
    locations = pages[0].long().repeat_interleave(page_size) * page_size + positions % page_size
    keys[locations[length - 1 :]] = values[locations[length - 1 :]] = float("nan")  # the new ones are not there yet
    new = locations[length - 1 : length]
    qkv = randn(1, (num_heads + 2 * kv_heads) * head_dim)
    weights = None if offset is None else (randn(head_dim), randn(head_dim))
    angles = torch.rand(1, head_dim // 2, device=CUDA)
    cos, sin = angles.cos(), angles.sin()

    kv, prepared = PagedKV(keys.clone(), values.clone(), pages, page_size), qkv.clone()
    places = new, kv.k_buffer, kv.v_buffer
    prepare_qkv(prepared, num_heads, weights, EPS, cos, sin, *places, is_plus_one=offset == 1)
    scratch = DecodeScratch.allocate(1, num_heads, num_heads, num_splits, head_dim, CUDA)
    q = prepared[:, : num_heads * head_dim].view(1, num_heads, head_dim)
    expected = torch.empty_like(q)
    decode_attention(q, kv, slots, lens, 0.09, expected, DecodeTiles(1), scratch, window)
    memory = PagedKV(keys, values, pages, page_size)
    rows = new, memory, slots, lens
    for got in [
        wide_decode(qkv, weights, EPS, cos, sin, *rows, 0.09, num_splits, scratch, window, True, offset == 1)
        for _ in range(20)
    ]:
        assert_near(got.view_as(expected), expected)
    assert_near(keys[new], kv.k_buffer[new])
    assert values[new].equal(kv.v_buffer[new])
    assert not scratch.arrived.any()


@pytest.mark.parametrize("num_live", [0, 1, 5, 30, 256])
def test_decodes_at_the_end_of_captured_rows_are_read_and_nobody_else(num_live: int) -> None:
    """By both kernels of equal shares. Others than the last rows are none, whose results are left alone."""
    rows, longest, page_size, kv_heads, group, head_dim = 256, 2048, 16, 8, 2, 128
    processors = torch.cuda.get_device_properties(CUDA).multi_processor_count
    pages = torch.randperm(rows * longest // page_size, device=CUDA).to(torch.int32).view(rows, -1)
    lens = torch.randint(1, longest, (rows,), device=CUDA)
    lens[: rows - num_live] = 0
    q, slots = randn(rows, kv_heads * group, head_dim), torch.randperm(rows, device=CUDA)
    keys, values = (randn(pages.numel() * page_size, kv_heads, head_dim) for _ in range(2))
    kv = PagedKV(keys, values, pages, page_size)
    tiles = DecodeTiles.choose(q.dtype, head_dim, rows * kv_heads, 40_960, processors, 232_448)
    scratch = DecodeScratch.allocate(rows, kv_heads * group, kv_heads, tiles.num_splits, head_dim, CUDA)
    expected, got = torch.empty_like(q), torch.empty_like(q)
    decode_attention(q, kv, slots, lens, 0.09, expected, tiles, scratch)
    assert can_stream(CUDA, torch.bfloat16, head_dim, group, page_size)
    for attend, at_once in ((even_attention, shares_at_once), (stream_attention, shares_of)):
        shares = EvenShares.allocate(rows, kv_heads * group, kv_heads, head_dim, at_once(kv_heads, processors), CUDA)
        find_shares(lens, shares)
        for _ in range(5):
            attend(q, kv, slots, lens, 0.09, got.fill_(float("nan")), shares)
            assert got[lens == 0].isnan().all()
            assert num_live == 0 or (got - expected)[lens > 0].norm() <= 0.01 * expected[lens > 0].norm()
        assert not shares.arrived.any()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [2, 4, 5])
@pytest.mark.parametrize("chunks", [[(0, 1024)], [(0, 1)], [(300, 70), (0, 129), (4000, 9), (0, 640)], [(64, 15)] * 64])
def test_extend_attention_finds_its_rows_by_itself(chunks: list[tuple[int, int]], group: int, head_dim: int) -> None:
    page_size, kv_heads = 16, 8
    most = max(prefix + count for prefix, count in chunks) + page_size
    pages = torch.randperm(len(chunks) * (most // page_size), device=CUDA).to(torch.int32).view(len(chunks), -1)
    keys, values = (randn(pages.numel() * page_size, kv_heads, head_dim) for _ in range(2))
    kv = PagedKV(keys, values, pages, page_size)
    prefixes, counts = (torch.tensor(column, device=CUDA) for column in zip(*chunks, strict=True))
    slots, num_tokens, padding = torch.arange(len(chunks), device=CUDA), int(counts.sum()), torch.zeros(64, device=CUDA)
    q = randn(num_tokens + 100, kv_heads * group, head_dim)
    expected, got = (torch.full_like(q, float("nan")) for _ in range(2))
    tiles = ExtendTiles.choose(q.dtype, head_dim, len(q) * group, 232_448)
    starts = counts.cumsum(0) - counts
    extend_attention(q, kv, slots, prefixes, counts, starts, int(counts.max()), 0.09, expected, tiles)
    rows = [torch.cat((values, padding.long()))[:64] for values in (slots, prefixes, counts)]
    extend_any_rows(q, kv, rows[0], rows[1], rows[2], 0.09, got, tiles)
    assert torch.equal(got[:num_tokens], expected[:num_tokens])
    assert got[num_tokens:].isnan().all()
