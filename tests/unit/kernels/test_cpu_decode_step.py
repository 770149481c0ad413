"""The compiled decode step of a CPU computes what the model's own layers compute, whatever the rows, types and number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from srt.kernels.build import cpu_library
from srt.kernels.cpu.decode_step import CpuDecodeStep
from srt.model_executor.forward_batch_info import ForwardBatch
from srt.model_executor.model_runner import ModelRunner
from srt.protocol.messages import SamplingSpec
from tests.support.checkpoints import CheckpointFactory
from tests.support.plan_driver import Job, PlanDriver
from tests.support.quantised_checkpoint import WEIGHT_ONLY, WITH_INPUTS, write_quantised
from tests.support.runners import decodes_of, make_runner
from tests.support.whole_engine import WholeEngine

pytestmark = pytest.mark.skipif(
    not cpu_library.is_supported(), reason="this processor has no AVX2, so PyTorch runs the steps"
)

PAGE_SIZE = 4
NUM_TOKENS = 7
WINDOW: dict[str, object] = {
    "use_sliding_window": True,
    "sliding_window": 9,
    "max_window_layers": 1,
    "layer_types": None,
}
MODELS: list[tuple[str, dict[str, object]]] = [("qwen3", {}), ("llama", {}), ("qwen2", {}), ("qwen2", WINDOW)]
CLOSE = {"float32": 2e-5, "bfloat16": 4e-2}  # relative to the largest logit


@pytest.fixture(scope="module", autouse=True)
def library(cpu_kernels: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("srt.kernels.cpu.decode_step.load_library", lambda: cpu_library.open_library(cpu_kernels))
        yield


def jobs(count: int) -> list[Job]:
    spec = SamplingSpec(max_new_tokens=NUM_TOKENS, temperature=0.0)
    return [Job([(7 * row + i) % 90 + 3 for i in range(3 + 5 * row)], spec) for row in range(count)]


def plain_and_compiled(runner: ModelRunner, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The logits of the step that ran last, by the layers and by the compiled code, and how far the stored keys and values differ."""
    decodes, loaded = decodes_of(runner), runner.loaded
    step, batch = decodes._parts.cpu_step, decodes._batch(num_rows)
    assert step is not None
    with torch.inference_mode():
        step.logits_into(batch, decodes.logits[:num_rows])
        compiled, stored = decodes.logits[:num_rows].float(), memory_of(runner, batch)
        loaded.attn_backend.init_forward_metadata(batch)
        hidden = loaded.model(batch.input_ids, batch.positions, batch)
        plain = loaded.logits_processor.logits(hidden, loaded.model.lm_head)
    differences = [(a - b).abs().max() for a, b in zip(stored, memory_of(runner, batch), strict=True)]
    return plain, compiled, differences


def memory_of(runner: ModelRunner, batch: ForwardBatch) -> list[torch.Tensor]:
    """The keys and values of the step's tokens in all layers."""
    pool = runner.state.token_to_kv_pool
    return [
        buffer[batch.locations_of(layer)].float()
        for layer in range(runner.loaded.config.num_layers)
        for buffer in pool.get_kv(layer)
    ]


def new_step_logits(runner: ModelRunner, num_rows: int) -> torch.Tensor:
    """The logits of the first rows of the step that ran last, by a compiled step of its own."""
    loaded, decodes = runner.loaded, decodes_of(runner)
    step = CpuDecodeStep.of(loaded.our_model, loaded.config, runner.state.token_to_kv_pool)
    assert step is not None
    with torch.inference_mode():
        step.logits_into(decodes._batch(num_rows), decodes.logits[:num_rows])
        return decodes.logits[:num_rows].clone()


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("family", "config"), MODELS, ids=["norms of heads", "plain", "biases", "a window"])
def test_logits_keys_and_values_are_those_of_the_layers(
    family: str, config: dict[str, object], dtype: str, checkpoint: CheckpointFactory
) -> None:
    runner = make_runner(checkpoint(family, config=config, vocab_size=509), PAGE_SIZE, dtype=dtype)
    for num_rows in (1, 5):
        PlanDriver(runner, PAGE_SIZE).run(jobs(num_rows))
        plain, compiled, differences = plain_and_compiled(runner, num_rows)
        bound = CLOSE[dtype] * float(plain.abs().max())
        assert (plain - compiled).abs().max() <= bound
        assert max(differences) <= CLOSE[dtype] * 10
        runner.reset()


EIGHT_BITS = [
    ("int8 weights", 2e-4),
    ("int8 channels and tokens", 0.02),
    *((name, 2e-4 if name in WEIGHT_ONLY else 0.05) for name in [*WEIGHT_ONLY, *WITH_INPUTS] if "fp8" in name),
]


@pytest.mark.parametrize(("name", "bound"), EIGHT_BITS)
def test_weights_of_8_bits_are_multiplied_as_the_layers_do(
    name: str, bound: float, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    """Where inputs are quantised too, one that lies between two numbers may become either."""
    stored, _ = write_quantised(
        checkpoint("qwen2", hidden_size=256, vocab_size=509), tmp_path, {**WEIGHT_ONLY, **WITH_INPUTS}[name]
    )
    runner = make_runner(stored, PAGE_SIZE, dtype="float32")
    PlanDriver(runner, PAGE_SIZE).run(jobs(5))
    plain, compiled, _ = plain_and_compiled(runner, 5)
    assert (plain - compiled).abs().max() <= bound * float(plain.abs().max())


@pytest.mark.parametrize("dtype", CLOSE)
def test_with_int8_the_output_layer_is_quantised_as_well(dtype: str, checkpoint: CheckpointFactory) -> None:
    runner = make_runner(checkpoint("llama", vocab_size=509), PAGE_SIZE, dtype=dtype, quantization="int8")
    PlanDriver(runner, PAGE_SIZE).run(jobs(5))
    head = runner.loaded.our_model.lm_head
    numbers, scales, _ = head.in_8_bits()
    head.weight = torch.nn.Parameter((numbers * scales[:, None]).to(head.weight.dtype), requires_grad=False)
    plain, compiled, _ = plain_and_compiled(runner, 5)
    assert (plain - compiled).abs().max() <= 10 * CLOSE[dtype] * float(plain.abs().max())


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_a_nan_is_not_lost_when_inputs_are_rounded(quantization: str, checkpoint: CheckpointFactory) -> None:
    runner = make_runner(checkpoint("llama", vocab_size=509), PAGE_SIZE, dtype="float32", quantization=quantization)
    PlanDriver(runner, PAGE_SIZE).run(jobs(1))
    with torch.inference_mode():
        runner.loaded.our_model.model.embed_tokens.weight.fill_(float("nan"))
    assert new_step_logits(runner, 1).isnan().all()


@pytest.mark.parametrize("quantization", [None, "int8", "fp8"])
def test_a_row_has_the_same_bits_whatever_the_rows_beside_it(qwen3_checkpoint: Path, quantization: str | None) -> None:
    runner = make_runner(qwen3_checkpoint, PAGE_SIZE, dtype="float32", quantization=quantization)
    PlanDriver(runner, PAGE_SIZE).run(jobs(7))
    together = new_step_logits(runner, 7)
    for num_rows in range(1, 7):
        assert torch.equal(new_step_logits(runner, num_rows), together[:num_rows])


def test_threads_share_a_step_and_change_nothing(qwen3_checkpoint: Path) -> None:
    runner = make_runner(qwen3_checkpoint, PAGE_SIZE, dtype="float32")
    PlanDriver(runner, PAGE_SIZE).run(jobs(5))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        shared = [new_step_logits(runner, 5) for _ in range(3)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(logits, new_step_logits(runner, 5)) for logits in shared)


def test_other_memory_than_the_weights_type_is_left_to_pytorch(qwen3_checkpoint: Path) -> None:
    runner = make_runner(qwen3_checkpoint, PAGE_SIZE, dtype="bfloat16", kv_cache_dtype="fp8_e4m3")
    assert decodes_of(runner)._parts.cpu_step is None


def test_without_a_library_pytorch_runs_the_step(qwen3_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("srt.kernels.cpu.decode_step.load_library", lambda: None)
    runner = make_runner(qwen3_checkpoint, PAGE_SIZE, dtype="float32")
    assert decodes_of(runner)._parts.cpu_step is None
    PlanDriver(runner, PAGE_SIZE).run(jobs(2))


def test_a_library_that_this_system_cannot_load_is_left_out_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / cpu_library.NAME
    broken.write_bytes(b"for another system")
    monkeypatch.setattr(cpu_library, "built_library", lambda: broken)
    assert cpu_library.load_library.__wrapped__() is None
    assert str(broken) in caplog.text


def test_a_model_of_too_many_layers_is_left_to_pytorch(qwen3_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(qwen3_checkpoint, PAGE_SIZE, dtype="float32")
    model, config, pool = runner.loaded.our_model, runner.loaded.config, runner.state.token_to_kv_pool
    assert CpuDecodeStep.of(model, config, pool) is not None
    monkeypatch.setattr("srt.kernels.cpu.decode_step._layers_of", lambda decoder: [*decoder.layers] * 512)
    monkeypatch.setattr(pool, "get_kv", lambda index, get=pool.get_kv: get(0))
    monkeypatch.setattr(pool, "group_of", [0] * 4096)
    assert CpuDecodeStep.of(model, config, pool) is None


def test_experts_are_left_to_pytorch(checkpoint: CheckpointFactory) -> None:
    runner = make_runner(checkpoint("qwen3_moe"), PAGE_SIZE, dtype="float32")
    assert CpuDecodeStep.of(runner.loaded.our_model, runner.loaded.config, runner.state.token_to_kv_pool) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_several_tokens_of_a_row_are_computed_as_one_by_one(checkpoint: CheckpointFactory, dtype: str) -> None:
    """A server that drafts verifies by the same code: even in bfloat16 it says what it says without drafts."""
    folder = checkpoint("qwen3")
    outputs = []
    drafts: dict[str, Any] = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(folder)}
    for options in ({}, drafts):
        runner = make_runner(folder, PAGE_SIZE, dtype=dtype, **options)
        engine = WholeEngine(runner.loaded.args, runner)
        outputs.append([engine.run([job.prompt], 40) for job in jobs(3)])
        num_steps = engine.core.counters.num_steps
    assert outputs[0] == outputs[1]
    assert num_steps < 3 * 20, "most drafts are right"
