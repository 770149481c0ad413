"""A whole worker on the Triton backend, in Triton's interpreter, against `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from srt.distributed.parallel_state import TensorParallel
from srt.layers.attention import triton_backend
from srt.layers.attention.attention_spec import AttentionSpec
from srt.layers.attention.base import Reading
from srt.layers.attention.triton_backend import TritonAttentionBackend
from srt.layers.device_adapters import DeviceAdapters
from srt.model_executor.forward_batch_info import ForwardBatch
from srt.model_executor.graphs import decode_runner, piece_inputs, piecewise_cuda_graph_runner
from srt.model_executor.startup.start_runner import start_runner
from srt.model_executor.step import step_planner
from srt.model_loader import model_adapters
from srt.server_args import ServerArgs
from srt.utils.model_config import ModelConfig
from tests.support.adapter_cases import SPECS, load
from tests.support.checkpoints import CheckpointFactory
from tests.support.oracle import Oracle
from tests.support.plan_driver import Job, PlanDriver, greedy, token_ids
from tests.support.random_adapter import write_adapter
from tests.support.recorder import Recorder
from tests.support.runners import make_runner

VOCABULARY = 512


@pytest.mark.parametrize(
    ("family", "page_size", "chunk"),
    [("llama", 1, 9), ("qwen2", 16, 32), ("qwen3", 16, 1 << 30), ("deepseek_v3", 4, 20)],
)
def test_greedy_tokens_equal_those_of_transformers(
    checkpoint: CheckpointFactory, family: str, page_size: int, chunk: int
) -> None:
    folder = checkpoint(family)
    oracle = Oracle(folder)
    rng = np.random.default_rng(2)
    prefix = token_ids(rng, 18, VOCABULARY)
    prompts = [prefix * (i % 2) + token_ids(rng, 3 + 5 * i, VOCABULARY) for i in range(5)]
    expected = [(prompt, oracle.expect(prompt, greedy(5))) for prompt in prompts]
    safe = [(prompt, e) for prompt, e in expected if e.is_safe]
    assert len(safe) >= 3
    args = ServerArgs(
        model_path=str(folder),
        device="cpu",
        page_size=page_size,
        max_total_tokens=1024,
        max_running_requests=8,
        attention_backend="triton",
    )
    cpu = torch.device("cpu")
    config = ModelConfig.from_folder(folder)
    runner = start_runner(args, config, str(folder), TensorParallel(0, 1, None, cpu), cpu)
    driver = PlanDriver(runner, page_size, chunk, share=True)
    jobs = [Job(prompt, greedy(5)) for prompt, _ in safe]
    driver.run(jobs[:2])
    driver.run(jobs[2:])
    assert [job.outputs for job in jobs] == [list(e.ids) for _, e in safe]


class Sharing(TritonAttentionBackend):
    """Reads shared prefixes once in float32 too, and keeps what was found."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self._readings.add(Reading.SHARED)
        self.found: list[list[int]] = []

    def begin_decodes(self, batch: ForwardBatch, reading: Reading) -> None:
        super().begin_decodes(batch, reading)
        if self._shared is not None:
            self.found.append(self._shared.lens.tolist())


@pytest.mark.parametrize("captures", [False, True])
def test_rows_that_share_a_prefix_draw_what_they_draw_alone(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, captures: bool
) -> None:
    def driver(capture: Recorder | None = None) -> PlanDriver:
        runner = make_runner(checkpoint("qwen3"), 4, attention_backend="triton", cuda_graph_bs=(2, 4), capture=capture)
        while capture is not None and runner.graphs.num_left:
            runner.graphs.capture_next()
        return PlanDriver(runner, 4, share=True)

    prompts = [list(range(3, 21)) + [30 + i] * (1 + i) for i in range(5)]  # 16 positions in common pages
    expected, found = ([Job(prompt, greedy(4 + 2 * i)) for i, prompt in enumerate(prompts)] for _ in range(2))
    driver().run(expected)

    monkeypatch.setattr(triton_backend, "TritonAttentionBackend", Sharing)
    for module in (triton_backend, step_planner):
        monkeypatch.setattr(module, "LEAST_SAVED", 2 * 16)
    for module in (step_planner, decode_runner):
        monkeypatch.setattr(module, "LEAST_SHARING_ROWS", 2)
    sharing = driver(recorder := Recorder() if captures else None)
    sharing.run(found[:1])
    sharing.run(found[1:])
    assert [job.outputs for job in found] == [job.outputs for job in expected]
    backend = sharing.runner.loaded.attn_backend
    assert isinstance(backend, Sharing)
    assert [16, 16, 16, 16] in backend.found, "all share"
    padding = [0] if captures else []
    assert [16, 16, 16, *padding] in backend.found, "whoever is left shares on"
    assert recorder is None or recorder.num_replays > 0


class Even(TritonAttentionBackend):
    """Has its programs read equally much in float32 too, and counts the steps."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self._readings.add(Reading.EVEN)
        self._captures_prompts = True
        self.num_even = 0

    def begin_decodes(self, batch: ForwardBatch, reading: Reading) -> None:
        super().begin_decodes(batch, reading)
        self.num_even += self._even is not None


@pytest.mark.parametrize("captures", [False, True])
def test_rows_of_uneven_lengths_draw_what_they_draw_when_read_one_by_one(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, captures: bool
) -> None:
    def driver(capture: Recorder | None = None) -> PlanDriver:
        runner = make_runner(checkpoint("qwen3"), 4, attention_backend="triton", cuda_graph_bs=(2, 4), capture=capture)
        while capture is not None and runner.graphs.num_left:
            runner.graphs.capture_next()
        return PlanDriver(runner, 4)

    prompts = [list(range(3, 3 + length)) for length in (2, 150, 9, 70, 30)]
    expected, found = ([Job(prompt, greedy(6 + i)) for i, prompt in enumerate(prompts)] for _ in range(2))
    driver().run(expected)
    monkeypatch.setattr(triton_backend, "TritonAttentionBackend", Even)
    monkeypatch.setattr(step_planner, "LEAST_SHARING_ROWS", 2)
    even = driver(recorder := Recorder() if captures else None)
    even.run(found)
    assert [job.outputs for job in found] == [job.outputs for job in expected]
    backend = even.runner.loaded.attn_backend
    assert isinstance(backend, Even)
    assert backend.num_even > 3
    assert recorder is None or recorder.num_replays > 0


@pytest.mark.parametrize("is_adapted", [False, True])
def test_steps_that_are_captured_whole_draw_the_same_tokens(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_adapted: bool
) -> None:
    """Prompts alone and beside decodes; and in pieces, where there are more of them than whole steps have room for."""
    monkeypatch.setattr(piece_inputs, "MOST_WHOLE_EXTENDS", 2)
    monkeypatch.setattr(piecewise_cuda_graph_runner, "MOST_WHOLE_TOKENS", 32)
    options: dict[str, Any] = {
        "attention_backend": "triton",
        "cuda_graph_bs": (4,),
        "piecewise_cuda_graph_max_tokens": 64,
        "enable_lora": is_adapted,
    }
    monkeypatch.setattr(
        model_adapters, "_step_adapters", lambda args, layers, *on: DeviceAdapters(layers, 2, 16, 5, *on)
    )
    folder, adapters = checkpoint("qwen3"), ["", "", ""]
    if is_adapted:
        adapters = ["all", "", "some"]
        for name in ("all", "some"):
            write_adapter(tmp_path / name, folder, SPECS[name])

    def driver(capture: Recorder | None = None) -> PlanDriver:
        runner = make_runner(folder, 4, capture=capture, max_running_requests=5, **options)
        for name in filter(None, adapters):
            load(runner, tmp_path, name)
        while capture is not None and runner.graphs.num_left:
            runner.graphs.capture_next()
        return PlanDriver(runner, 4, chunk=24, share=True)

    prefix = list(range(3, 13))
    lengths = (30, 2, 3, 10, 1)
    prompts = [prefix * (i % 2) + [30 + 7 * i + j for j in range(length)] for i, length in enumerate(lengths)]
    expected, found = (
        [Job(prompt, greedy(3 + i), adapter=adapters[i % 3]) for i, prompt in enumerate(prompts)] for _ in range(2)
    )
    driver().run(expected)
    monkeypatch.setattr(triton_backend, "TritonAttentionBackend", Even)
    whole, steps = driver(Recorder()), list[tuple[int, int, int]]()
    pieces = whole.runner.graphs.adapted_pieces if is_adapted else whole.runner.graphs.pieces
    assert pieces is not None
    replay_prepare = pieces.replay_prepare

    def noted(batch: ForwardBatch, size: int) -> None:
        steps.append((batch.num_extend_rows, batch.num_decode_rows, size))
        replay_prepare(batch, size)

    monkeypatch.setattr(pieces, "replay_prepare", noted)
    whole.run(found)
    assert [job.outputs for job in found] == [job.outputs for job in expected]
    assert {decodes > 0 for _, decodes, size in steps if size == 32} == {False, True}
    assert {size for extends, _, size in steps if extends > 2} == {64}
    assert pieces._buffers is not None and torch.isfinite(pieces._buffers.attended).all()
