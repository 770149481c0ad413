"""The stages of a pipeline: together they give every request the tokens of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from srt.distributed.errors import CollectiveError
from srt.distributed.parallel_state import TensorParallel
from srt.distributed.pipeline import Arrival, Ints, MessageLinks, Pipeline, StageIds
from srt.distributed.stage_memory import LinkSizes
from srt.model_executor.stage_runner import AwaitedIds
from srt.protocol.messages import LogprobSpec, SamplingSpec
from srt.utils.model_config import ModelConfig
from tests.support.checkpoints import CheckpointFactory
from tests.support.plan_driver import Job, PlanDriver, greedy, token_ids
from tests.support.ranks import run_stages
from tests.support.recorder import Recorder
from tests.support.runners import make_runner
from tests.support.stage_device import HostMemory, open_links

PAGE = 16
SLOW_FAMILIES = ("llama", "gpt_oss", "deepseek_v3", "cohere2")
PENALISED = SamplingSpec(12, temperature=0.9, top_p=0.9, frequency_penalty=0.5)


def new_jobs() -> list[Job]:
    """Prompts of many lengths, two with a common beginning; greedy and drawn; one asks for logprobs."""
    rng = np.random.default_rng(0)
    common = token_ids(rng, 40, 500)
    prompts = [token_ids(rng, count, 500) for count in (1, 5, 17, 60)] + [[*common, 7], [*common, 8, 9]]
    jobs = [Job(prompt, greedy(12)) for prompt in prompts]
    jobs += [Job(prompt, PENALISED, seed=seed) for seed, prompt in enumerate(prompts)]
    return [*jobs, Job([*common, 7, 8], greedy(6), logprobs=LogprobSpec(output=True, prompt_start=0))]


def outputs_of(
    folder: Path, tp: TensorParallel | None, pipeline: Pipeline | None, has_graphs: bool = False, **options: Any
) -> list[list[int]]:
    jobs = new_jobs()
    if has_graphs:
        options = {**options, "capture": Recorder(), "cuda_graph_bs": (2, 4, 8)}
    runner = make_runner(folder, PAGE, tp, pipeline=pipeline, max_running_requests=8, **options)
    runner.graphs.capture_all()
    PlanDriver(runner, PAGE, chunk=24, share=True).run(jobs)
    if has_graphs:
        least = 20 + 3 * (len(runner.loaded.stage.layers) + 1)
        assert options["capture"].num_replays >= least, "of decodes, and of pieces of prompts"
    if runner.loaded.stage.is_last:
        assert len(jobs[-1].output_logprobs) and len(jobs[-1].prompt_logprobs)
    return [job.outputs for job in jobs]


def check_stages(
    folder: Path, tmp_path: Path, stages: int, tp_size: int = 1, maps: LinkSizes | None = None, **options: Any
) -> None:
    """With `maps` the stages write each other's memory instead of sending messages."""
    expected = outputs_of(folder, None, None, **options)

    def work(tp: TensorParallel, pipeline: Pipeline) -> list[list[int]]:
        if maps is not None:
            pipeline.links = open_links(pipeline, maps, HostMemory(pipeline.stage))
        return outputs_of(folder, tp, pipeline, **options)

    for found in run_stages(stages, tp_size, tmp_path, work):
        assert found == expected


@pytest.mark.parametrize("family", ["qwen3_moe", *(pytest.param(one, marks=pytest.mark.full) for one in SLOW_FAMILIES)])
def test_two_stages_draw_what_the_whole_model_draws(family: str, checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    check_stages(checkpoint(family), tmp_path, 2)


@pytest.mark.parametrize(
    "partition", [(1, 3), pytest.param((2, 2), marks=pytest.mark.full)]
)  # in the first, stage 0 has no layer that sees all tokens
def test_stages_share_the_pages_of_windows(
    partition: tuple[int, int], checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    folder = checkpoint("gemma2", num_layers=4, config={"sliding_window": 20})
    check_stages(folder, tmp_path, 2, pp_layer_partition=partition)


def test_stages_of_several_ranks_and_uneven_sizes(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    check_stages(checkpoint("qwen3", tied=False, num_layers=4), tmp_path, 2, 2, pp_layer_partition=(1, 3))


def test_stages_replay_graphs_of_decode_steps(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    check_stages(checkpoint("qwen3", num_layers=3), tmp_path, 3, has_graphs=True)


@pytest.mark.parametrize("has_graphs", [False, True])
def test_stages_that_write_each_others_memory_draw_the_same(
    has_graphs: bool, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    folder = checkpoint("qwen3", num_layers=3)
    hidden = ModelConfig.from_folder(folder).hidden_size
    sizes = LinkSizes(row_bytes=4 * hidden, most_rows=24 + 8, most_ids=8, most_in_flight=64)
    check_stages(folder, tmp_path, 3, maps=sizes, has_graphs=has_graphs)


def test_stages_of_one_layer_each_with_fp8_memory(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    check_stages(checkpoint("qwen3", num_layers=4), tmp_path, 4, kv_cache_dtype="fp8_e4m3")


def test_a_stage_holds_its_own_layers_alone(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    folder = checkpoint("qwen3", tied=False)
    whole = make_runner(folder, PAGE)

    def sizes(tp: TensorParallel, pipeline: Pipeline) -> tuple[int, int, int]:
        runner = make_runner(folder, PAGE, tp, pipeline=pipeline)
        return runner.loaded.weight_bytes, runner.state.kv_bytes, runner.state.num_pages

    first, last = run_stages(2, 1, tmp_path, sizes)
    assert first[0] + last[0] == whole.loaded.weight_bytes
    assert first[1] == last[1] == whole.state.kv_bytes / 2
    assert first[2] == last[2] == whole.state.num_pages


class Readers(TorchDispatchMode):
    """Records the operators that run, and which of them read the memory that a stage has received."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.received: list[Tensor] = []
        self.operators: list[tuple[str, bool]] = []
        links: Any = pipeline.links
        receive = links.receive_hidden

        def receive_hidden(out: Tensor) -> None:
            self.received.append(out)
            receive(out)

        links.receive_hidden = receive_hidden

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        memory = {one.untyped_storage().data_ptr() for one in self.received}
        reads = [one for one in args if isinstance(one, Tensor) and one.untyped_storage().data_ptr() in memory]
        if not func.is_view:
            self.operators.append((str(func), bool(reads)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_behind_the_angles_a_stage_copies_what_it_has_received(
    family: str, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    """Kernels of layers start early and read what was written before: in front of them a launch must wait for all earlier ones."""
    folder = checkpoint(family, num_layers=4)

    def work(tp: TensorParallel, pipeline: Pipeline) -> list[tuple[str, bool]]:
        runner = make_runner(folder, PAGE, tp, pipeline=pipeline)
        if pipeline.stage == 0:
            PlanDriver(runner, PAGE).run([Job([5, 6, 7], greedy(2))])
            return []
        readers = Readers(pipeline)
        with readers:
            PlanDriver(runner, PAGE).run([Job([5, 6, 7], greedy(2))])
        return readers.operators

    operators = run_stages(2, 1, tmp_path, work)[1]
    launches = [name for name, reads in operators if reads or name in ("aten.cos.default", "aten.sin.default")]
    assert {name for name, reads in operators if reads} == {"aten.mul.Tensor"}, "layers read the copy"
    copies = [place for place, name in enumerate(launches) if name == "aten.mul.Tensor"]
    assert len(copies) == 2, "one in each step"
    assert all(launches[place - 1] == "aten.sin.default" for place in copies)


class ToldWork:
    """The receipt of a message that arrives when the test says so, or never."""

    def __init__(self, is_lost: bool = False) -> None:
        self.num_waits = 0
        self._is_lost = is_lost

    def wait(self) -> bool:
        self.num_waits += 1
        if self._is_lost:
            raise RuntimeError("Connection closed by peer [127.0.0.1]. This is typically a crash")
        return True


def arrival(ids: list[int], work: ToldWork) -> Arrival:
    return Arrival(torch.tensor(ids, dtype=torch.int32), work, 1)


def ints(*values: int) -> Any:
    return cast("Any", np.array(values, np.int64))


def awaited_for(table: torch.Tensor) -> AwaitedIds:
    def write(ids: StageIds, slots: Ints, positions: Ints) -> None:
        MessageLinks.write_ids(ids, slots, positions, table)

    return AwaitedIds(write)


def test_ids_are_awaited_only_for_the_rows_that_decode() -> None:
    table = torch.zeros((4, 8), dtype=torch.int32)
    awaited, works = awaited_for(table), [ToldWork() for _ in range(3)]
    awaited.add(arrival([11, 12], works[0]), ints(0, 1), ints(3, 4))
    awaited.add(arrival([13], works[1]), ints(2), ints(5))
    awaited.add(arrival([14], works[2]), ints(3), ints(6))
    awaited.write_for(ints(2))
    assert [work.num_waits for work in works] == [1, 1, 0]
    assert (table[0, 3], table[1, 4], table[2, 5], table[3, 6]) == (11, 12, 13, 0)
    awaited.write_for(ints(0, 1, 2))
    assert works[2].num_waits == 0
    awaited.write_all()
    assert table[3, 6] == 14


def test_a_late_id_does_not_reach_the_next_request_of_its_slot() -> None:
    table = torch.zeros((2, 8), dtype=torch.int32)
    awaited = awaited_for(table)
    awaited.add(arrival([11, 12], ToldWork()), ints(0, 1), ints(3, 3))
    awaited.drop(ints(0))
    awaited.write_all()
    assert (table[0, 3], table[1, 3]) == (0, 12)


def test_a_row_without_finite_logits_leaves_a_token_that_can_be_embedded() -> None:
    table = torch.full((1, 8), 5, dtype=torch.int32)
    awaited = awaited_for(table)
    awaited.add(arrival([-1], ToldWork()), ints(0), ints(2))
    awaited.write_for(ints(0))
    assert table[0, 2] == 0


class Messages:
    """A group of stages whose messages have these fates."""

    def __init__(self, works: list[ToldWork]) -> None:
        self._works = iter(works)

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> ToldWork:
        del tensors, rank, tag
        return next(self._works)


def test_a_stage_that_is_lost_before_it_reads_an_earlier_message_is_named() -> None:
    works = [ToldWork(), ToldWork(is_lost=True), ToldWork()]
    links = MessageLinks(1, 2, cast("Any", Messages([*works, ToldWork()])), most_sent=1)
    for _ in range(3):
        links.send_hidden(torch.zeros(1, 2))
    with pytest.raises(CollectiveError, match=r"^stage 2 of the pipeline is lost: Connection closed by peer"):
        links.send_hidden(torch.zeros(1, 2))
    assert [work.num_waits for work in works] == [1, 1, 0]


def test_a_lost_stage_is_named_to_every_thread_that_waits() -> None:
    work = ToldWork(is_lost=True)
    lost = arrival([0], work)
    for _ in range(2):
        with pytest.raises(CollectiveError, match=r"^stage 1 of the pipeline is lost: Connection closed by peer"):
            lost.wait()
    assert lost.has_ended and work.num_waits == 1
