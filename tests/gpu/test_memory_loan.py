"""Memory of a GPU that is released and taken back under captured graphs: afterwards everything is as before, at the same addresses."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from srt.model_executor.graphs.cuda_graph_runner import GraphCapture
from srt.model_executor.memory.memory_loan import MemoryLoan, memory_loan
from srt.model_executor.model_runner import ModelRunner
from srt.protocol.engine_work import MEMORY_TAGS, LoadWeights, WeightsSource
from srt.utils.errors import UpdateError
from tests.gpu.test_weight_updates import CUDA, REAL, captured, drawn
from tests.support.adapter_cases import SPECS, cases_of, load
from tests.support.checkpoints import CheckpointFactory
from tests.support.library_models import write_library_checkpoint
from tests.support.plan_driver import PlanDriver
from tests.support.quantised_checkpoint import WEIGHT_ONLY, write_quantised

pytestmark = pytest.mark.gpu

ALL = list(MEMORY_TAGS)
LARGE: dict[str, Any] = {**REAL, "num_layers": 6}
MB = 1 << 20
WAYS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("qwen3", REAL, {}),
    ("qwen3", REAL, {"quantization": "fp8"}),
    ("qwen3", REAL, {"kv_cache_dtype": "fp8_e4m3"}),
    ("qwen3", REAL, {"enable_deterministic_inference": True}),
    ("qwen3", {}, {"load_format": "dummy"}),
    ("qwen3_moe", {}, {"quantization": "fp8"}),
    ("deepseek_v3", {}, {}),
    ("gpt_oss", {}, {}),
]


def idle() -> None:
    """Report progress to nobody."""


def lent(folder: Path, **options: Any) -> tuple[ModelRunner, MemoryLoan]:
    """Return a runner with all graphs captured whose memory can be released."""
    runner = captured(folder, enable_memory_saver=True, **options)
    return runner, memory_loan(runner, WeightsSource(str(folder), ""))


def free_bytes() -> int:
    """The device's free memory, as nvidia-smi shows it; what PyTorch's allocator keeps for later is given back before."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(CUDA)[0]


def addresses(runner: ModelRunner) -> list[int]:
    """The addresses of all weights, keys and values, and of the segments of the graphs' pool."""
    pool, parts = runner.state.token_to_kv_pool, runner.loaded.memory.parts
    tensors = [*runner.loaded.model.parameters(), *pool.k_buffer, *pool.v_buffer]
    return [one.data_ptr() for one in tensors] + sorted(parts["cuda_graph"].segments)


def occupy() -> None:
    """Fill other memory with NaNs, as another process may, and give it back."""
    other = torch.full((2 << 30,), 255, dtype=torch.uint8, device=CUDA)
    del other
    free_bytes()


@pytest.fixture
def refused_captures(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after which no graph can be captured."""

    def fail(*args: Any) -> None:
        raise AssertionError("a graph is captured again")

    return lambda: monkeypatch.setattr(GraphCapture, "pieces", fail)


@pytest.mark.parametrize(("family", "sizes", "options"), WAYS)
def test_what_comes_back_is_what_was_released(
    checkpoint: CheckpointFactory,
    refused_captures: Callable[[], None],
    family: str,
    sizes: dict[str, Any],
    options: dict[str, Any],
) -> None:
    runner, loan = lent(checkpoint(family, **sizes), dtype="bfloat16", **options)
    refused_captures()
    before, places = drawn(runner), addresses(runner)
    weights = [one.clone() for one in runner.loaded.model.parameters()]
    for _ in range(2):
        assert loan.release(ALL, None, idle) >= runner.loaded.weight_bytes + runner.state.kv_bytes
        occupy()
        loan.resume(ALL, None, idle)
        assert addresses(runner) == places and not runner.graphs.num_left
        assert all(map(torch.equal, weights, runner.loaded.model.parameters()))
        assert drawn(runner) == before


def test_a_model_of_the_library_comes_back(tmp_path: Path) -> None:
    write_library_checkpoint(tmp_path, "llama", {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512})
    runner, loan = lent(tmp_path, dtype="bfloat16", model_impl="transformers", attention_backend="triton")
    before = drawn(runner)
    loan.release(ALL, None, idle)
    occupy()
    loan.resume(ALL, None, idle)
    assert drawn(runner) == before


def test_packed_integers_come_back(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    folder, _ = write_quantised(checkpoint("qwen3"), tmp_path / "packed", WEIGHT_ONLY["packed int4 with zeros"])
    runner, loan = lent(folder, dtype="bfloat16")
    before = drawn(runner)
    loan.release(ALL, None, idle)
    occupy()
    loan.resume(ALL, None, idle)
    assert drawn(runner) == before


def test_adapters_stay_and_more_are_loaded_meanwhile(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    folder = checkpoint("qwen3", tied=False)
    cases = cases_of(folder, tmp_path, 4)
    runner, loan = lent(folder, dtype="float32", enable_lora=True, max_lora_rank=8, max_loras_per_batch=4)
    first, *others = SPECS
    load(runner, tmp_path, first)
    loan.release(ALL, None, idle)
    for name in others:
        load(runner, tmp_path, name)
    loan.resume(ALL, None, idle)
    jobs = [case.job() for case in cases]
    runner.reset()
    PlanDriver(runner, 16).run(jobs)
    assert [job.outputs for job in jobs] == [case.expected for case in cases]


def test_parts_are_released_one_by_one(checkpoint: CheckpointFactory) -> None:
    runner, loan = lent(checkpoint("qwen3", **LARGE), dtype="bfloat16")
    before, parts = drawn(runner), runner.loaded.memory.parts
    assert parts["weights"].num_bytes >= runner.loaded.weight_bytes
    assert parts["kv_cache"].num_bytes >= runner.state.kv_bytes
    assert parts["cuda_graph"].num_bytes > 0
    for tag in ALL:
        assert loan.release([tag], None, idle) == parts[tag].num_bytes
        occupy()
        loan.resume([tag], None, idle)
        assert drawn(runner) == before
    loan.release(ALL, None, idle)
    for tag in reversed(ALL):
        loan.resume([tag], None, idle)
    assert drawn(runner) == before


def test_all_of_it_is_free_for_others(checkpoint: CheckpointFactory) -> None:
    """Needs a GPU on which nothing else runs."""
    runner, loan = lent(checkpoint("qwen3", **LARGE), dtype="bfloat16")
    drawn(runner)
    for tags in (*([tag] for tag in ALL), ALL):
        free = free_bytes()
        num_bytes = loan.release(tags, None, idle)
        assert abs(free_bytes() - free - num_bytes) <= 2 * MB
        loan.resume(tags, None, idle)
        assert abs(free_bytes() - free) <= 2 * MB


def test_memory_that_others_hold_is_asked_for_again_later(checkpoint: CheckpointFactory) -> None:
    """Needs a GPU on which nothing else runs."""
    runner, loan = lent(checkpoint("qwen3", **LARGE), dtype="bfloat16")
    before, places = drawn(runner), addresses(runner)
    loan.release(ALL, None, idle)
    parts = runner.loaded.memory.parts
    needed = sum(part.num_bytes for part in parts.values())
    # Beside the first part nothing fits, whatever was said to be free.
    runner.loaded.memory.num_bytes["activations"] = -needed
    hog = torch.empty(free_bytes() - parts["weights"].num_bytes - 64 * MB, dtype=torch.uint8, device=CUDA)
    for _ in range(2):
        used = torch.cuda.mem_get_info(CUDA)[0]
        with pytest.raises(UpdateError, match="OUT_OF_MEMORY"):
            loan.resume(ALL, None, idle)
        assert abs(torch.cuda.mem_get_info(CUDA)[0] - used) <= 2 * MB
        assert all(part.is_released for part in parts.values())
    runner.loaded.memory.num_bytes["activations"] = 1 << 40
    with pytest.raises(UpdateError, match="The memory is taken by others"):
        loan.resume(ALL, None, idle)
    runner.loaded.memory.num_bytes["activations"] = 0
    del hog
    free_bytes()
    loan.resume(ALL, None, idle)
    assert addresses(runner) == places and drawn(runner) == before


def test_a_hundred_cycles_leak_nothing(checkpoint: CheckpointFactory) -> None:
    """Needs a GPU on which nothing else runs."""
    runner, loan = lent(checkpoint("qwen3", **REAL), dtype="bfloat16")
    before = drawn(runner)

    def resident() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024

    free, sizes = [], []
    for _ in range(100):
        loan.release(ALL, None, idle)
        loan.resume(ALL, None, idle)
        free.append(torch.cuda.mem_get_info(CUDA)[0])
        sizes.append(resident())
    kept = runner.loaded.memory.parts["weights"].num_bytes
    assert max(free[10:]) - min(free[10:]) <= 2 * MB, free
    assert min(sizes[-10:]) - min(sizes[10:20]) < 0.3 * kept, sizes
    assert drawn(runner) == before


def test_weights_are_updated_while_their_memory_is_released(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    old, new = (checkpoint("qwen3", seed=seed, **REAL) for seed in (0, 1))
    runner, loan = lent(old, dtype="bfloat16")
    before = drawn(runner)
    loan.release(ALL, None, idle)
    with pytest.raises(UpdateError):
        loan.update_weights(LoadWeights(str(tmp_path)), idle)
    assert runner.loaded.memory.parts["weights"].is_released
    loan.update_weights(LoadWeights(str(new)), idle)
    loan.resume(["kv_cache", "cuda_graph"], None, idle)
    assert drawn(runner) == drawn(captured(new, dtype="bfloat16")) != before
    loan.release(["weights"], None, idle)
    loan.resume(["weights"], None, idle)
    loan.update_weights(LoadWeights(str(old)), idle)
    assert drawn(runner) == before


def test_without_the_option_memory_is_allocated_as_ever(checkpoint: CheckpointFactory) -> None:
    runner = captured(checkpoint("qwen3", **REAL), dtype="bfloat16")
    assert not runner.loaded.memory.parts
    lending, _ = lent(checkpoint("qwen3", **REAL), dtype="bfloat16")
    assert drawn(runner) == drawn(lending)


def test_a_process_with_released_memory_ends_without_an_error(checkpoint: CheckpointFactory) -> None:
    """What the allocator calls is in Python, which ends before the allocator does."""
    program = f"""
from pathlib import Path
from tests.gpu.test_memory_loan import ALL, idle, lent
runner, loan = lent(Path({str(checkpoint("qwen3"))!r}), dtype="bfloat16")
loan.release(ALL, None, idle)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
