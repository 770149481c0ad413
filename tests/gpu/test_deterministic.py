"""With --enable-deterministic-inference on a GPU, a request gets the same ids and logprobs, to the bit, whatever else the server does."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from srt.kernels.attention import invariant_attention
from srt.kernels.attention.invariant_attention import attend_chunks, attend_decodes
from srt.kernels.attention.paged_kv import PagedKV
from srt.kernels.elementwise.invariant_sums import sum_add_norm
from srt.kernels.gemm.invariant_gemm import gated_product, invariant_parts, invariant_product, pdl_of
from srt.kernels.gemm.invariant_hopper import HopperProducts
from srt.kernels.sampling.row_logprobs import row_logprobs
from srt.layers.batch_invariant_gpu import BatchInvariantGpuOps
from srt.layers.ops import Affine, LayerOps, Norm, Stream
from srt.model_executor.model_runner import ModelRunner
from srt.protocol.messages import LogprobSpec
from tests.support.attention_reference import extend_attention_reference
from tests.support.checkpoints import CheckpointFactory
from tests.support.invariance import make_probes, run_trials
from tests.support.plan_driver import Job, PlanDriver, greedy
from tests.support.real_worlds import WORLDS, RealModel
from tests.support.runners import make_runner
from tests.unit.kernels.paged_world import make_paged_world

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="this mode is for Hopper"
    ),
]
CUDA = torch.device("cuda", 0)
CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
COUNTS = (1, 2, 3, 8, 16, 17, 32, 33, 64, 65, 100, 128, 129, 256, 257, 512, 1000)
SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (1024, 3072), (4096, 1024), (96, 64), (509, 96)]
VOCABULARY = 509


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_of_a_product_is_the_same_beside_any_number_of_others(dtype: torch.dtype, n: int, k: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(COUNTS[-1], k, device=CUDA).to(dtype)
    weight, bias = torch.randn(n, k, device=CUDA).to(dtype), torch.randn(n, device=CUDA).to(dtype)
    whole = invariant_product(x, weight, bias)
    expected = x[:64].double() @ weight.double().t() + bias.double()
    error = (whole[:64].double() - expected).abs().max() / expected.abs().max()
    assert error < (4e-3 if dtype is torch.bfloat16 else 1e-5)
    assert differing(lambda rows: invariant_product(x[rows], weight, bias), whole) == []


@pytest.mark.parametrize(("n", "k"), [(24576, 4096), (20480, 96)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gated_row_is_the_same_beside_any_number_of_others(dtype: torch.dtype, n: int, k: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(COUNTS[-1], k, device=CUDA).to(dtype), torch.randn(n, k, device=CUDA).to(dtype)
    whole = gated_product(x, weight)
    gates, ups = (x[:64].double() @ weight.double().t()).chunk(2, dim=-1)
    expected = F.silu(gates) * ups
    error = (whole[:64].double() - expected).abs().max() / expected.abs().max()
    assert error < (4e-3 if dtype is torch.bfloat16 else 1e-5)
    assert differing(lambda rows: gated_product(x[rows], weight), whole) == []


GATED_SHAPES = [(24576, 4096), (34816, 5120), (28672, 4096), (12288, 4096)]
PLAIN_SHAPES = [(6144, 4096), (4096, 4096), (4096, 12288), (5120, 17408), (1024, 3072), (3584, 3584), (4096, 1024)]
PLAIN_SHAPES += [(151936, 1024)]
# Of one of two ranks.
PLAIN_SHAPES += [(3072, 4096), (4096, 2048), (4096, 6144), (75968, 4096)]
PLAIN_SHAPES += [(2048, 1024), (1024, 1024), (1024, 1536), (3072, 1024), (75968, 1024)]


@pytest.mark.parametrize(("n", "k"), [*PLAIN_SHAPES, *GATED_SHAPES])
def test_the_kernels_for_hopper_have_the_bits_of_those_in_triton(n: int, k: int) -> None:
    torch.manual_seed(0)
    is_gated = (n, k) in GATED_SHAPES
    x = torch.randn(4097, k, device=CUDA).bfloat16()
    weight = torch.randn(n, k, device=CUDA).mul(2 * k**-0.5).bfloat16()
    products = HopperProducts.on(CUDA)
    assert products is not None and products.serves(weight, is_gated)
    whole = gated_product(x, weight) if is_gated else invariant_product(x, weight)
    counts = (*COUNTS, 40, 48, 80, 96, 112, 160, 176, 192, 240, 300, 2000, 4097)
    assert [n for n in counts if not torch.equal(products.multiply(x[:n], weight, is_gated), whole[:n])] == []


@pytest.mark.parametrize("size", [64, 1024, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_normed_sum_is_the_same_beside_any_number_of_others(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(COUNTS[-1], 1024, device=CUDA).to(dtype), torch.randn(size, 1024, device=CUDA).to(dtype)
    hidden, bias, norm = (torch.randn(n, device=CUDA).to(dtype) for n in ((COUNTS[-1], size), (size,), (size,)))

    def normed(rows: slice) -> torch.Tensor:
        return torch.cat(
            sum_add_norm(invariant_parts(x[rows], weight), bias, hidden[rows], norm, 1e-6, pdl_of(x[rows])), 1
        )

    whole, product = normed(slice(None)), invariant_product(x, weight, bias)
    total = hidden + product
    assert torch.equal(whole[:, size:], total)
    tolerance = 1e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(whole[:, :size], F.rms_norm(total, (size,), norm, 1e-6), rtol=tolerance, atol=tolerance)
    assert differing(normed, whole) == []


@pytest.mark.parametrize("size", [64, 256, 1024, 4096, 5120])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_normed_sum_of_ranks_is_the_same_beside_any_number_of_others(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    ops, norm = BatchInvariantGpuOps(CUDA), Norm(torch.randn(size, device=CUDA).to(dtype), 1e-6)
    hidden, delta = torch.randn(2, COUNTS[-1], size, device=CUDA).to(dtype)

    def normed(rows: slice) -> torch.Tensor:
        return torch.cat(ops.norm_stream(Stream(hidden[rows].clone(), delta[rows].clone()), norm), 1)

    whole = normed(slice(None))
    assert torch.equal(whole[:, size:], hidden + delta)
    assert differing(normed, whole) == []


def differing(result_of: Callable[[slice], torch.Tensor], whole: torch.Tensor) -> list[int]:
    """Return the numbers of rows with which the last rows have other results than among all."""
    return [count for count in COUNTS if not torch.equal(result_of(slice(-count, None)), whole[-count:])]


@pytest.mark.parametrize(("group", "head_dim", "page_size"), [(4, 128, 16), (1, 64, 1), (7, 64, 16), (2, 16, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_token_attends_alike_in_chunks_and_in_decodes(
    dtype: torch.dtype, group: int, head_dim: int, page_size: int
) -> None:
    lengths = [1, 2, 63, 64, 65, 511, 512, 513, 1024, 1100, 1537, 2100]
    world = make_paged_world(lengths, 2, head_dim, page_size, dtype)
    kv = PagedKV(world.kv.k_buffer.to(CUDA), world.kv.v_buffer.to(CUDA), world.kv.page_table.to(CUDA), page_size)
    slots, lens = world.req_pool_indices.to(CUDA), world.seq_lens.to(CUDA)
    q = torch.randn(sum(lengths), 2 * group, head_dim, device=CUDA).to(dtype)
    ends, scale = lens.cumsum(0), head_dim**-0.5
    whole = torch.empty_like(q)
    attend_chunks(q, kv, slots, lens * 0, lens, ends - lens, max(lengths), scale, whole)
    # The reference is quadratic, so it gets the first requests only.
    few = sum(lengths[:7])
    expected = extend_attention_reference(
        q[:few].float(), PagedKV(kv.k_buffer.float(), kv.v_buffer.float(), kv.page_table, page_size),
        slots[:7], lens[:7] * 0, lens[:7], (ends - lens)[:7], scale,
    )  # fmt: skip
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(whole[:few].float(), expected, rtol=tolerance, atol=tolerance)
    for num_programs in (None, 1, 2, 5):
        last = torch.empty_like(q[ends - 1])
        attend_decodes(q[ends - 1], kv, slots, lens, 2304, 132, scale, last, num_programs=num_programs)
        assert torch.equal(last, whole[ends - 1]), num_programs
    for chunk in (1, 7, 64, 300):
        counts = lens.clamp(max=chunk)
        kept = torch.cat([torch.arange(int(end - count), int(end)) for end, count in zip(ends, counts, strict=True)])
        part = torch.empty_like(q[kept.to(CUDA)])
        starts = counts.cumsum(0) - counts
        attend_chunks(q[kept.to(CUDA)], kv, slots, lens - counts, counts, starts, int(counts.max()), scale, part)
        assert torch.equal(part, whole[kept.to(CUDA)]), chunk


@pytest.mark.parametrize("width", [509, 151936])
def test_logprobs_of_a_row_are_the_same_beside_others(width: int) -> None:
    logits = torch.randn(9, width + 3, device=CUDA)[:, :width] * 5
    found = row_logprobs(logits)
    torch.testing.assert_close(found, logits.log_softmax(-1), rtol=1e-5, atol=1e-5)
    for row in range(9):
        assert torch.equal(row_logprobs(logits[row : row + 1].clone()), found[row : row + 1])


def num_distinct(
    runner: ModelRunner,
    page_size: int,
    num_trials: int,
    vocab_size: int,
    lengths: Sequence[int],
    chunks: Sequence[int],
    batches: Sequence[int],
) -> int:
    """The largest number of different results that a probe gets in this many trials."""
    runner.graphs.capture_all()
    probes = make_probes(16, vocab_size, lengths=lengths)
    run_trials(runner, probes, num_trials, page_size, chunks, batches)
    assert all(probe.ids for probe in probes)
    return max(probe.num_distinct for probe in probes)


small_trials = partial(
    num_distinct,
    vocab_size=VOCABULARY,
    lengths=(3, 20, 37, 70),
    chunks=(7, 64, 512, 1 << 30),
    batches=(1, 2, 3, 7, 16, 48),
)
large_trials = partial(
    num_distinct, vocab_size=32_000, lengths=(3, 70, 505, 1100), chunks=(64, 512, 1 << 30), batches=(1, 3, 17, 64, 200)
)


def small_runner(checkpoint: CheckpointFactory, page_size: int, family: str = "qwen3", **options: Any) -> ModelRunner:
    folder = checkpoint(family, vocab_size=VOCABULARY)
    sizes: dict[str, Any] = {"max_total_tokens": 16384, "max_running_requests": 64}
    return make_runner(folder, page_size, device=CUDA, **sizes, **options)


def large_runner(folder: Path, page_size: int, shape: str = "qwen3-0.6b", **options: Any) -> ModelRunner:
    """Four layers of the size of a real model's, with random weights."""
    config = {**json.loads((CONFIGS / f"{shape}.json").read_text()), "num_hidden_layers": 4, "vocab_size": 32000}
    (folder / "config.json").write_text(json.dumps(config))
    sizes: dict[str, Any] = {"max_total_tokens": 1 << 18, "max_running_requests": 256}
    return make_runner(folder, page_size, device=CUDA, load_format="dummy", dtype="bfloat16", **sizes, **options)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])  # norms of heads, biases, neither
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_small_model_gives_one_result(checkpoint: CheckpointFactory, page_size: int, dtype: str, family: str) -> None:
    runner = small_runner(checkpoint, page_size, family, dtype=dtype, enable_deterministic_inference=True)
    assert small_trials(runner, page_size, 160) == 1


@pytest.mark.parametrize(("shape", "page_size"), [("qwen3-0.6b", 1), ("qwen3-0.6b", 16), ("llama-3.1-8b", 16)])
def test_a_large_model_gives_one_result(tmp_path: Path, shape: str, page_size: int) -> None:
    runner = large_runner(tmp_path, page_size, shape, enable_deterministic_inference=True)
    assert large_trials(runner, page_size, 160) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("number", range(len(WORLDS)))
def test_preemptions_and_deaths_change_no_bit(checkpoint: CheckpointFactory, dtype: str, number: int) -> None:
    page_size = WORLDS[number].page_size
    alone, worker = (
        small_runner(checkpoint, page_size, dtype=dtype, enable_deterministic_inference=True) for _ in range(2)
    )
    worker.graphs.capture_all()
    real = RealModel(alone, worker, page_size)
    real.run(0, WORLDS[number])
    assert real.num_compared > 300 and real.statistics["preemptions"] > 0


def test_the_check_finds_the_ordinary_mode(tmp_path: Path) -> None:
    assert large_trials(large_runner(tmp_path, 16), 16, 100) > 1


def test_the_check_finds_a_product_of_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(self: BatchInvariantGpuOps, x: torch.Tensor, affine: Affine) -> torch.Tensor:
        assert affine.matrix is not None
        return F.linear(x, affine.matrix, affine.bias)

    monkeypatch.setattr(BatchInvariantGpuOps, "gated_linear_of_norm", LayerOps.gated_linear_of_norm)
    monkeypatch.setattr(BatchInvariantGpuOps, "linear", multiply)
    assert large_trials(large_runner(tmp_path, 16, enable_deterministic_inference=True), 16, 100) > 1


def test_the_check_finds_splits_that_depend_on_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = invariant_attention.attend_chunks

    def other_splits(*arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(invariant_attention, "SPLIT", 256)
            whole(*arguments)

    monkeypatch.setattr("srt.layers.attention.invariant_triton_backend.attend_chunks", other_splits)
    assert large_trials(large_runner(tmp_path, 16, enable_deterministic_inference=True), 16, 100) > 1


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
def test_logprobs_are_those_of_the_ordinary_mode_but_for_rounding(checkpoint: CheckpointFactory, family: str) -> None:
    results = []
    for is_on in (False, True):
        runner = small_runner(checkpoint, 16, family, dtype="float32", enable_deterministic_inference=is_on)
        jobs = [
            Job([(7 * i) % VOCABULARY for i in range(n)], greedy(4), logprobs=LogprobSpec(True, 1)) for n in (50, 9)
        ]
        PlanDriver(runner, 16, chunk=20).run(jobs)
        results.append(jobs)
    for plain, invariant in zip(*results, strict=True):
        assert plain.outputs == invariant.outputs
        for a, b in zip(plain.prompt_logprobs, invariant.prompt_logprobs, strict=True):
            assert abs(a.chosen - b.chosen).max() < 1e-4
