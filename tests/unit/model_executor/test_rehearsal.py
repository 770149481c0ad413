"""A rehearsal of the first steps leaves no trace: the same tokens afterwards, whether it succeeds or not, and nobody waits for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from srt.distributed.parallel_state import TensorParallel
from srt.model_executor import model_runner
from srt.model_executor.model_runner import ModelRunner
from srt.model_executor.warm_up import num_distinct_layers
from srt.protocol.messages import PlanSection
from srt.server_args import ServerArgs
from srt.utils.model_config import ModelConfig
from tests.support.checkpoints import CheckpointFactory
from tests.support.plan_driver import Job, PlanDriver, greedy
from tests.support.ranks import CPU, run_ranks, single_rank
from tests.support.runners import make_runner


class RehearsingRunner(ModelRunner):
    """Rehearses on a CPU too, where there is no kernel to compile."""

    def _profile_num_pages(self) -> int:
        self._rehearse()
        return super()._profile_num_pages()


def rehearsing_runner(folder: Path, tp: TensorParallel | None = None) -> ModelRunner:
    args = ServerArgs(str(folder), device="cpu", max_total_tokens=8192, max_running_requests=24, dtype="float32")
    return RehearsingRunner(args, ModelConfig.from_folder(folder), str(folder), tp or single_rank(), CPU)


def tokens_of(runner: ModelRunner) -> list[list[int]]:
    jobs = [Job(list(range(1, 4 + 9 * index)), greedy(12)) for index in range(4)]
    PlanDriver(runner, runner.page_size).run(jobs)
    return [job.outputs for job in jobs]


def test_a_rehearsal_leaves_no_trace(checkpoint: CheckpointFactory) -> None:
    folder = checkpoint("qwen3")
    plain, rehearsed = make_runner(folder, 16, dtype="float32"), rehearsing_runner(folder)
    assert tokens_of(rehearsed) == tokens_of(plain)
    assert rehearsed.weight_bytes == plain.weight_bytes


def test_what_fails_in_it_is_told_once_and_the_start_goes_on(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint("qwen3")
    expected = tokens_of(make_runner(folder, 16, dtype="float32"))

    def fail(*about: object) -> list[list[PlanSection]]:
        raise RuntimeError("no threads")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(model_runner, "warm_up_requests", fail)
        runner = rehearsing_runner(folder)
    assert [record.getMessage() for record in caplog.records] == [
        "Kernels are compiled one after the other, because of RuntimeError: no threads"
    ]
    runner.warm_up()
    assert tokens_of(runner) == expected


def test_no_rank_waits_for_another_ones_rehearsal(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    folder = checkpoint("qwen3")

    def on_rank(tp: TensorParallel) -> list[list[int]]:
        make: Callable[..., ModelRunner] = rehearsing_runner
        runner = make(folder, tp=tp) if tp.rank else make_runner(folder, 16, tp, dtype="float32")
        return tokens_of(runner)

    first, second = run_ranks(2, tmp_path, on_rank)
    assert first == second == tokens_of(make_runner(folder, 16, dtype="float32"))


@pytest.mark.parametrize(
    ("windows", "count"), [((None,) * 9, 2), ((8, 8, 8, None, 8, 8, 8, None), 4), ((None, 8), 2), ((None,), 2)]
)
def test_so_many_layers_have_all_kernels_among_them(windows: tuple[int | None, ...], count: int) -> None:
    assert num_distinct_layers(windows) == count
