"""Attention groups that share experts (--enable-dp-attention): each gives its own requests the tokens of the whole model."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from srt.distributed.errors import CollectiveError
from srt.distributed.expert_exchange import ExpertExchange
from srt.distributed.parallel_state import TensorParallel
from srt.layers.attention import backend_choice
from srt.layers.attention.base import DecodeReadings, Reading
from srt.model_executor.forward_batch_info import ForwardBatch
from srt.model_executor.graphs.cuda_graph_runner import Work
from srt.model_executor.model_runner import ModelRunner
from srt.model_executor.step import step_planner
from srt.protocol.messages import PlanSection
from srt.sampling.sampling_batch_info import SamplingKind
from tests.support.checkpoints import CheckpointFactory
from tests.support.plan_driver import Job, PlanDriver
from tests.support.ranks import run_groups
from tests.support.recorder import PlansAtOnce, Recorder
from tests.support.runners import make_runner
from tests.unit.model_executor.test_stages import PAGE, new_jobs, outputs_of

SLOW_FAMILIES = ("mixtral", "qwen2_moe", "deepseek_v3", "granitemoe")


class LateRank:
    """A runner whose rank now and then joins a step of other groups although it has a plan, as if its plan had not come yet."""

    def __init__(self, runner: ModelRunner, seed: int) -> None:
        self._runner = runner
        self._rng = random.Random(seed)
        self.num_joined = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def join_called(self) -> None:
        while self._runner.is_called:
            self.num_joined += 1
            self._runner.join()

    def execute(self, section: PlanSection) -> Any:
        if self._rng.random() < 0.5 and self._runner.is_called:
            self.num_joined += 1
            self._runner.join()
        return self._runner.execute(section)


class Ends:
    """The ranks that have served all their requests: they join the steps of the others until all have."""

    def __init__(self, num_ranks: int) -> None:
        self._left = num_ranks
        self._changed = threading.Condition()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def join_until_all_end(self, rank: LateRank) -> None:
        with self._changed:
            self._left -= 1
            self._changed.notify_all()
        while True:
            rank.join_called()
            with self._changed:
                self._changed.wait_for(lambda: not self._left or rank.is_called)
                if not rank.is_called:
                    return


def jobs_of(group: int) -> list[Job]:
    """All jobs in the first group, some of them in the others."""
    jobs = new_jobs()
    return jobs if group == 0 else jobs[group::2]


def exchange_of(tp: TensorParallel) -> ExpertExchange:
    assert isinstance(tp.exchange, ExpertExchange)
    return tp.exchange


def check_groups(
    folder: Path,
    tmp_path: Path,
    size: int,
    num_groups: int = 2,
    expert_groups: int = 1,
    recorders: Sequence[Recorder] = (),
    **options: Any,
) -> list[int]:
    """Return how often each rank has joined steps without tokens of its own. `recorders`, of the ranks, stand in for graphs."""
    outputs = outputs_of(folder, None, None, **options)
    ends = Ends(size)

    def work(tp: TensorParallel, group: int) -> tuple[list[list[int]], int]:
        rank = exchange_of(tp).ranks.rank
        capture = recorders[rank] if recorders else None
        runner = make_runner(folder, PAGE, tp, capture=capture, max_running_requests=8, **options)
        late = LateRank(runner, rank)
        runner.when_called(ends.wake)
        jobs = jobs_of(group)
        PlanDriver(late, PAGE, chunk=24, share=True).run(jobs)  # type: ignore[arg-type]  # has what a ModelRunner has
        ends.join_until_all_end(late)
        return [job.outputs for job in jobs], late.num_joined

    found = run_groups(num_groups, size, tmp_path, work, expert_groups)
    for rank, (drawn, _) in enumerate(found):
        group = rank // (size // num_groups)
        assert drawn == (outputs if group == 0 else outputs[group::2]), f"rank {rank}"
    return [joined for _, joined in found]


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "gpt_oss", *(pytest.param(one, marks=pytest.mark.full) for one in SLOW_FAMILIES)]
)
@pytest.mark.parametrize("expert_groups", [1, 2])
def test_two_groups_of_one_rank_draw_what_the_whole_model_draws(
    family: str, expert_groups: int, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    joined = check_groups(checkpoint(family), tmp_path, 2, expert_groups=expert_groups)
    assert joined[1], "the group with fewer requests was idle at the end"


@pytest.mark.parametrize("expert_groups", [1, 2])
def test_two_groups_of_two_ranks_draw_what_the_whole_model_draws(
    expert_groups: int, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    joined = check_groups(checkpoint("qwen3_moe"), tmp_path, 4, expert_groups=expert_groups)
    assert all(joined[2:]), "the group with fewer requests was idle at the end"


@pytest.mark.parametrize(("size", "expert_groups"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.full)])
def test_groups_replay_graphs_of_one_size_while_none_has_a_prompt(
    size: int, expert_groups: int, checkpoint: CheckpointFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_choice, "TorchNativeBackend", PlansAtOnce)
    recorders, sizes = [Recorder() for _ in range(size)], (1, 2, 4, 8)
    folder = checkpoint("qwen3_moe")
    options: dict[str, Any] = {"cuda_graph_bs": sizes}
    joined = check_groups(folder, tmp_path, size, expert_groups=expert_groups, recorders=recorders, **options)
    replays = [one.num_replays for one in recorders]
    assert all(recorder.num_captures == len(sizes) * len(SamplingKind) for recorder in recorders)
    assert joined[-1]
    assert min(replays) > 10, f"a group without tokens replays too: {replays}, {joined}"


class NotesReadings(PlansAtOnce):
    """Can read in all ways, and notes those of steps on the main thread, which runs the whole model, and on others, which run groups."""

    of_whole: ClassVar[set[Reading]] = set()
    of_groups: ClassVar[set[Reading]] = set()

    @property
    def decode_readings(self) -> DecodeReadings:
        return self

    def can_read(self, reading: Reading, num_rows: int) -> bool:
        del reading, num_rows
        return True

    def begin_decodes(self, batch: ForwardBatch, reading: Reading) -> None:
        del batch
        is_whole = threading.current_thread() is threading.main_thread()
        (self.of_whole if is_whole else self.of_groups).add(reading)


def test_groups_read_without_graphs_as_in_graphs(
    checkpoint: CheckpointFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of other readings would be compiled while requests wait."""
    monkeypatch.setattr(backend_choice, "TorchNativeBackend", NotesReadings)
    monkeypatch.setattr(step_planner, "LEAST_SHARING_ROWS", 2)
    check_groups(checkpoint("qwen3_moe"), tmp_path, 2)
    assert Reading.EVEN in NotesReadings.of_whole
    assert NotesReadings.of_groups == {Reading.BY_ROW}


class Failing(Recorder):
    """Fails after it has captured the graph with this number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._left = number

    def __call__(self, work: Work, warm_up: Work | None = None) -> Work:
        replay = super().__call__(work, warm_up)
        self._left -= 1
        if not self._left:
            raise RuntimeError("out of memory")
        return replay


@pytest.mark.parametrize(
    ("failing", "left"), [(2, [8, 8, 8, 8]), (4, [2, 2, 4, 8])], ids=["an early size", "the last size"]
)
def test_a_size_that_one_group_cannot_capture_is_dropped_by_all(
    failing: int, left: list[int], checkpoint: CheckpointFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_choice, "TorchNativeBackend", PlansAtOnce)
    folder, sizes = checkpoint("qwen3_moe"), (1, 2, 4, 8)

    def work(tp: TensorParallel, group: int) -> list[int]:
        capture = Failing(failing * len(SamplingKind) if group else 0)
        runner = make_runner(folder, PAGE, tp, capture=capture, max_running_requests=8, cuda_graph_bs=sizes)
        assert runner.graphs.decodes is not None and not runner.graphs.num_left
        return [runner.graphs.decodes.common_size(size) for size in sizes]

    assert run_groups(2, 2, tmp_path, work) == [left, left]


@pytest.mark.full
@pytest.mark.parametrize("options", [{"kv_cache_dtype": "fp8_e4m3"}, {"quantization": "int8"}], ids=str)
def test_groups_draw_the_same_with_fewer_bits(
    options: dict[str, Any], checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    check_groups(checkpoint("qwen3_moe"), tmp_path, 2, **options)


def test_a_group_without_tokens_in_a_step_still_computes_its_part(tmp_path: Path) -> None:
    """Rank 2 joins without tokens, while rank 3 of its group has the plan already: the group has none in this step."""

    def work(tp: TensorParallel, group: int) -> tuple[bool, list[int], list[float]]:
        exchange = exchange_of(tp)
        rank = exchange.ranks.rank
        num_tokens = {0: 3, 1: 3, 2: 0, 3: 5}[rank]
        has_entered = exchange.meet(num_tokens)
        counts = exchange.global_num_tokens
        rows = torch.arange(6.0).view(3, 2)[: counts[group]]
        (every,) = exchange.gather(rows)
        return has_entered, counts, exchange.sum_own(every * (rank + 1)).flatten().tolist()

    first, second, third, fourth = run_groups(2, 4, tmp_path, work)
    assert first == second == (True, [3, 0], [0.0, 10.0, 20.0, 30.0, 40.0, 50.0])
    assert (third, fourth) == ((True, [3, 0], []), (False, [3, 0], []))


def test_groups_exchange_rows_of_several_types(tmp_path: Path) -> None:
    def work(tp: TensorParallel, group: int) -> list[list[Any]]:
        exchange = exchange_of(tp)
        count = (1, 4, 2)[group]
        exchange.meet(count)
        halves = torch.full((count, 3), group + 0.5, dtype=torch.bfloat16)
        ids = torch.arange(count).view(count, 1) + 10 * group
        return [tensor.tolist() for tensor in exchange.gather(halves, ids)]

    for halves, ids in run_groups(3, 3, tmp_path, work):
        assert [row[0] for row in halves] == [0.5, *[1.5] * 4, *[2.5] * 2]
        assert [row[0] for row in ids] == [0, 10, 11, 12, 13, 20, 21]


def test_a_rank_that_precompiles_alone_needs_no_other_rank(tmp_path: Path) -> None:
    """The second rank runs three steps more than the first; afterwards they still count steps alike."""

    def work(tp: TensorParallel, group: int) -> list[int]:
        exchange = exchange_of(tp)
        rows = torch.arange(4.0).view(2, 2)
        for _ in range(3 * group):
            with tp.alone():
                assert exchange.meet(2)
                assert exchange.global_num_tokens == [2, 2]
                (every,) = exchange.gather(rows)
                assert torch.equal(every, torch.cat([rows, rows]))
                assert torch.equal(exchange.sum_own(every), 2 * rows)
        exchange.meet(1 + group)
        return exchange.global_num_tokens

    assert run_groups(2, 2, tmp_path, work) == [[1, 2], [1, 2]]


def test_a_rank_that_ends_fails_the_steps_of_all_others(tmp_path: Path) -> None:
    def work(tp: TensorParallel, group: int) -> str:
        exchange = exchange_of(tp)
        exchange.meet(1)
        if exchange.ranks.rank == 3:
            tp.close()
            return ""
        with pytest.raises(CollectiveError, match=r"lost the others|does not hear calls to steps"):
            exchange.meet(2)
        tp.close()
        return "lost"

    assert run_groups(2, 4, tmp_path, work) == ["lost", "lost", "lost", ""]
