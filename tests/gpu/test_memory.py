"""A GPU's memory: no mix of requests takes more than was measured at the start, and what does not fit is refused."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from srt.model_executor.memory.device_memory import Tag
from srt.model_executor.memory.memory_profile import CUDA_SLACK, FIRST_USE_BYTES, graph_bytes
from srt.model_executor.startup.peak_step import peak_section
from srt.model_executor.startup.warm_up import warm_up
from srt.protocol.messages import LogprobSpec, SamplingSpec
from srt.server_args import ServerArgs
from srt.utils.errors import StartError
from tests.support.plan_driver import Job, PlanDriver, greedy, token_ids
from tests.support.runners import make_runner

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
REAL_CONFIG = Path(__file__).parents[2] / "benchmarks" / "configs" / "qwen3-0.6b.json"
CHUNK, SLOTS = 2048, 48
OPTIONS: dict[str, Any] = {
    "device": CUDA,
    "dtype": "bfloat16",
    "load_format": "dummy",
    "chunked_prefill_size": CHUNK,
    "max_running_requests": SLOTS,
    "max_total_tokens": None,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four layers of a real shape, with its vocabulary: logits are the largest of what a step takes."""
    config = {**json.loads(REAL_CONFIG.read_text()), "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    gc.collect()
    torch.cuda.empty_cache()
    return tmp_path


def worst_mix(vocab_size: int) -> list[Job]:
    """All slots but one decode with every adjustment, while a long prompt that wants all of its logprobs goes by in chunks."""
    rng = np.random.default_rng(0)
    worst = peak_section(2, 8, 8, 16, vocab_size).admissions[0].sampling
    spec = LogprobSpec(output=True, prompt_start=0, top=128)
    lengths = [*([3] * (SLOTS - 1)), 3 * CHUNK]
    return [Job(token_ids(rng, length, vocab_size), worst, index, spec) for index, length in enumerate(lengths)]


def random_mix(seed: int, vocab_size: int) -> list[Job]:
    """Prompts short and long, and of each kind some: nothing at all, one of them, or all."""
    rng = np.random.default_rng(seed)
    worst = peak_section(2, 8, 8, 16, vocab_size).admissions[0].sampling
    choices = [greedy(6), SamplingSpec(6), SamplingSpec(6, top_p=0.9), SamplingSpec(6, presence_penalty=1.0), worst]
    specs = [None, LogprobSpec(output=True, top=20), LogprobSpec(output=True, prompt_start=0, top=128)]
    jobs = []
    for index in range(int(rng.integers(20, 2 * SLOTS))):
        prompt = token_ids(rng, int(rng.choice([1, 5, 100, 700, CHUNK, 6000])), vocab_size)
        sampling, logprobs = choices[int(rng.integers(len(choices)))], specs[int(rng.integers(len(specs)))]
        jobs.append(Job(prompt, sampling, index, logprobs))
    return jobs


def test_no_mix_of_requests_takes_more_than_was_measured(folder: Path) -> None:
    runner = make_runner(folder, 16, **OPTIONS)
    assert runner.state.max_total_num_tokens > 1_000_000
    measured, peaks = runner.loaded.memory.num_bytes["activations"], []
    vocab_size = runner.loaded.config.vocab_size
    for jobs in (worst_mix(vocab_size), *(random_mix(seed, vocab_size) for seed in range(3))):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        PlanDriver(runner, 16, chunk=CHUNK, share=True).run(jobs)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert max(peaks) <= measured, (peaks, measured)
    assert max(peaks) >= 0.5 * measured, (peaks, measured)  # else the measure is of something else


def test_all_memory_that_is_kept_has_a_name(folder: Path) -> None:
    """But for what libraries take when they are first used; and no step takes any more that it keeps."""
    before = torch.cuda.memory_allocated()
    runner = make_runner(folder, 16, **OPTIONS)
    kept = torch.cuda.memory_allocated() - before
    names: tuple[Tag, ...] = ("weights", "kv_cache", "buffers")
    named = [runner.loaded.memory.num_bytes[name] for name in names]
    assert min(named) > 0
    assert kept - FIRST_USE_BYTES <= sum(named) <= kept, (named, kept)
    warm_up(runner)
    PlanDriver(runner, 16, chunk=CHUNK, share=True).run(worst_mix(runner.loaded.config.vocab_size))
    kept = torch.cuda.memory_allocated() - before
    named = [runner.loaded.memory.num_bytes[name] for name in names]
    assert kept - FIRST_USE_BYTES <= sum(named) <= kept, (named, kept)


def test_thousands_of_requests_leave_what_was_to_be_kept_free(folder: Path) -> None:
    runner = make_runner(folder, 16, **{**OPTIONS, "max_running_requests": 8192})
    free, total = torch.cuda.mem_get_info(CUDA)
    args = ServerArgs(model_path="x", max_running_requests=8192)
    # Half of the slack may have gone to what libraries load.
    needed = (
        runner.loaded.memory.num_bytes["activations"]
        + graph_bytes(args, runner.loaded.config)
        + int(total * CUDA_SLACK / 2)
    )
    assert free >= needed, (free, needed)


def test_graphs_take_no_more_than_was_set_aside(folder: Path) -> None:
    runner = make_runner(folder, 16, **OPTIONS)
    runner.graphs.capture_all()
    args = ServerArgs(model_path="x")
    assert 0 < runner.loaded.memory.num_bytes["cuda_graph"] <= graph_bytes(args, runner.loaded.config)


def test_a_step_that_does_not_fit_is_refused_with_the_options_to_change(folder: Path) -> None:
    hog = torch.empty(torch.cuda.mem_get_info(CUDA)[0] - (6 << 30), dtype=torch.uint8, device=CUDA)
    with pytest.raises(StartError, match="--chunked-prefill-size or --max-running-requests"):
        make_runner(folder, 16, **{**OPTIONS, "chunked_prefill_size": 32768, "max_running_requests": 4096})
    del hog


def test_weights_that_do_not_fit_are_refused_before_they_are_made(folder: Path) -> None:
    config = {**json.loads(REAL_CONFIG.read_text()), "hidden_size": 16384, "intermediate_size": 65536}
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 80}))
    with pytest.raises(StartError, match=r"weights take .* GB are free"):
        make_runner(folder, 16, **OPTIONS)
