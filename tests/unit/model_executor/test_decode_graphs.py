"""Decode steps through graphs: the same tokens as without, whatever is padded, mixed in between, or captured late.

A capture that only remembers the work stands in for CUDA's: what is replayed is the work that a graph would hold.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from srt.distributed.parallel_state import TensorParallel
from srt.layers.attention import backend_choice
from srt.layers.attention.base import Reading
from srt.layers.sampler import Draws
from srt.model_executor.forward_batch_info import ForwardBatch
from srt.model_executor.graphs import decode_runner
from srt.model_executor.graphs.cuda_graph_runner import PADDED_STEPS, CudaGraphRunner, Work, graph_sizes
from srt.model_executor.graphs.decode_runner import DecodeRunner, find_graph
from srt.model_executor.loaded_model import LoadedModel
from srt.model_executor.memory.memory_profile import graph_bytes
from srt.model_executor.model_runner import ModelRunner
from srt.model_executor.startup.warm_up import warm_up
from srt.model_executor.step.draw_store import RING, DrawStore
from srt.model_executor.step.executed_step import DecodeOutput
from srt.model_executor.step.input_buffers import GraphInputBuffers
from srt.model_executor.step.page_mailbox import PAGE_BITS
from srt.model_executor.step.slot_mirror import Ints, NewPages
from srt.models.causal_lm import CausalLM
from srt.protocol.messages import (
    Admission,
    LogprobSpec,
    PageDelta,
    PlanSection,
    SamplingSpec,
    int32_array,
)
from srt.sampling.sampling_batch_info import SamplingKind
from srt.server_args import ServerArgs
from tests.support.checkpoints import CheckpointFactory
from tests.support.plan_driver import Job, PlanDriver, greedy, run_section
from tests.support.ranks import run_ranks
from tests.support.recorder import PlansAtOnce, Recorder, UnseenGraphs
from tests.support.runners import decodes_of, make_runner

EMPTY = int32_array()
SIZES = (1, 2, 4, 8, 16)


def jobs(count: int) -> list[Job]:
    """Greedy, with a temperature, and with all that a graph does not serve; of many lengths."""
    rng = random.Random(5)
    specs = [
        greedy(9),
        SamplingSpec(14, temperature=0.8),
        SamplingSpec(23, temperature=1.3),
        SamplingSpec(12, temperature=0.7, top_p=0.8),
        SamplingSpec(17, temperature=0.0, repetition_penalty=1.3),
    ]
    made = []
    for index in range(count):
        spec = specs[index % len(specs)]
        logprobs = LogprobSpec(output=True, top=2) if index % 7 == 3 else None
        prompt = [rng.randrange(100) for _ in range(rng.randrange(1, 40))]
        made.append(Job(prompt, spec, seed=rng.getrandbits(64), logprobs=logprobs))
    return made


def plain_jobs(count: int) -> list[Job]:
    return [
        Job([7 + i, 8, 9] * (i + 1), SamplingSpec(11 + 3 * i, temperature=(0.0, 0.9)[i % 2]), seed=i)
        for i in range(count)
    ]


def planning_at_once(folder: Path, page_size: int, **options: Any) -> ModelRunner:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend_choice, "TorchNativeBackend", PlansAtOnce)
        return make_runner(folder, page_size, **options)


def with_graphs(checkpoint: CheckpointFactory, page_size: int, recorder: Recorder, **options: Any) -> ModelRunner:
    options = {"piecewise_cuda_graph_max_tokens": 0, "cuda_graph_bs": SIZES} | options
    return planning_at_once(checkpoint("qwen3"), page_size, capture=recorder, **options)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("captures", [False, True])
def test_a_plan_that_is_made_before_a_step_knows_the_pages_that_the_step_begins(
    checkpoint: CheckpointFactory, page_size: int, captures: bool
) -> None:
    """The expected tokens are of plans that are made at the first layer."""
    expected, found = ([Job([7 + i, 8, 9] * (2 + 3 * i), greedy(40)) for i in range(4)] for _ in range(2))
    PlanDriver(make_runner(checkpoint("qwen3"), page_size), page_size).run(expected)
    if captures:
        runner = with_graphs(checkpoint, page_size, Recorder())
        while runner.graphs.num_left:
            runner.graphs.capture_next()
    else:
        runner = planning_at_once(checkpoint("qwen3"), page_size)
    PlanDriver(runner, page_size).run(found)
    assert [job.outputs for job in found] == [job.outputs for job in expected]


class Resident:
    """Stands in for all layers in one kernel: the model itself, as long as rows are short."""

    most_positions = 12

    def __init__(self, model: CausalLM, rows: int) -> None:
        self._model, self._rows = model, rows
        self.lengths: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        assert len(input_ids) == self._rows
        self.lengths.append(batch.seq_lens.tolist())
        hidden: torch.Tensor = self._model(input_ids, positions, batch)
        return hidden


@pytest.mark.parametrize("captures", [False, True])
def test_short_rows_go_through_all_layers_at_once_and_longer_ones_do_not(
    checkpoint: CheckpointFactory, captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By graphs of their own, since others serve the same number of rows."""
    expected, found = ([Job([7 + i, 8, 9], greedy(14 + 6 * i)) for i in range(3)] for _ in range(2))
    PlanDriver(make_runner(checkpoint("qwen3"), 4), 4).run(expected)
    made: dict[int, Resident] = {}

    def resident(loaded: LoadedModel, *rest: object) -> dict[int, Resident]:
        made.update({rows: Resident(loaded.our_model, rows) for rows in (1, 2)})
        return made

    monkeypatch.setattr(decode_runner, "resident_layers_of", resident)
    runner = with_graphs(checkpoint, 4, Recorder(), cuda_graph_bs=(1, 2, 4))
    assert decodes_of(runner).graphs[Reading.RESIDENT].sizes == (1, 2)
    while captures and runner.graphs.num_left:
        runner.graphs.capture_next()
    for layers in made.values():
        layers.lengths.clear()
    driver = PlanDriver(runner, 4)
    driver.run(found[:1])
    driver.run(found[1:])
    assert [job.outputs for job in found] == [job.outputs for job in expected]
    # A prompt of three, whose first token came with it: the last step that is short enough ends with twelve positions.
    assert made[1].lengths == [[length] for length in range(4, 13)]
    assert made[2].lengths == [[length, length] for length in range(4, 13)]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_tokens_are_those_of_steps_without_graphs(checkpoint: CheckpointFactory, page_size: int) -> None:
    expected, found = jobs(13), jobs(13)
    PlanDriver(make_runner(checkpoint("qwen3"), page_size), page_size, chunk=25).run(expected)
    recorder = Recorder()
    runner = with_graphs(checkpoint, page_size, recorder)
    while runner.graphs.num_left:
        runner.graphs.capture_next()
    assert recorder.num_captures == 4 * len(SIZES)
    PlanDriver(runner, page_size, chunk=25).run(found)
    assert [job.outputs for job in found] == [job.outputs for job in expected]
    assert recorder.num_replays > 20
    for mine, other in zip(found, expected, strict=True):
        for row, other_row in zip(mine.output_logprobs, other.output_logprobs, strict=True):
            np.testing.assert_allclose(row.chosen, other_row.chosen, atol=1e-5)


def test_graphs_that_are_captured_while_requests_run_change_nothing(checkpoint: CheckpointFactory) -> None:
    expected, found = plain_jobs(6), plain_jobs(6)
    PlanDriver(make_runner(checkpoint("qwen3"), 4), 4, chunk=16).run(expected)
    recorder = Recorder()
    runner = with_graphs(checkpoint, 4, recorder)

    class Capturing(PlanDriver):
        def _step(self, waiting: list[Job], running: list[Job]) -> None:
            super()._step(waiting, running)
            if len(self.steps) % 3 == 0 and runner.graphs.num_left:
                runner.graphs.capture_next()

    Capturing(runner, 4, chunk=16).run(found)
    assert [job.outputs for job in found] == [job.outputs for job in expected]
    assert runner.graphs.num_left == 0
    assert recorder.num_replays > 10


def test_draws_are_counted_as_the_device_counts_them_through_warm_ups_captures_and_replays(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, found = jobs(9), jobs(9)
    PlanDriver(make_runner(checkpoint("qwen3"), 4), 4, chunk=25).run(expected)
    graphs = UnseenGraphs()
    monkeypatch.setattr(DrawStore, "allocate", graphs.allocate_store)
    runner = with_graphs(checkpoint, 4, graphs)
    warm_up(runner)
    half = runner.graphs.num_left // 2
    while runner.graphs.num_left > half:
        runner.graphs.capture_next()
    PlanDriver(runner, 4, chunk=25).run(found)
    while runner.graphs.num_left:
        runner.graphs.capture_next()
    again = jobs(9)
    PlanDriver(runner, 4, chunk=25).run(again)
    outputs = [[job.outputs for job in some] for some in (found, again, expected)]
    assert outputs[0] == outputs[1] == outputs[2]
    assert graphs.num_replays > 20
    assert int(runner.loaded.draw_store.last) == runner.loaded.draw_store._number


def section_of(slots: list[int]) -> PlanSection:
    return PlanSection([], [PageDelta(EMPTY, EMPTY, EMPTY)], EMPTY, EMPTY, EMPTY, EMPTY, int32_array(slots))


def admit(
    slots: list[int], prompt: list[int], pages_each: int, sampling: SamplingSpec, logprobs: LogprobSpec | None = None
) -> PlanSection:
    """All at once, with pages to spare."""
    wanted = logprobs or LogprobSpec()
    admissions = [Admission(s, int32_array(prompt), len(prompt), 0, s, sampling, wanted) for s in slots]
    count = len(slots)
    pages = PageDelta(int32_array(slots), int32_array([pages_each] * count), int32_array(range(count * pages_each)))
    zeros, counts = int32_array([0] * count), int32_array([len(prompt)] * count)
    return PlanSection(admissions, [pages], int32_array(slots), zeros, counts, int32_array([1] * count), EMPTY)


def test_a_padded_step_leaves_all_other_slots_and_pages_as_they_are(checkpoint: CheckpointFactory) -> None:
    runner = with_graphs(checkpoint, 4, Recorder())
    while runner.graphs.num_left:
        runner.graphs.capture_next()
    run_section(runner, admit([0, 1, 2, 3, 4], [5, 6, 7], 3, greedy(9)))
    tables, memory = runner.state.req_to_token_pool, runner.state.token_to_kv_pool
    before = (
        tables.token_table.clone(),
        tables.page_table.clone(),
        tables.seq_lens.clone(),
        memory.k_buffer[0].clone(),
    )
    result = run_section(runner, section_of([3, 0, 4]))
    assert len(result.ids) == 3
    others = [1, 2]
    assert torch.equal(tables.token_table[others], before[0][others])
    assert torch.equal(tables.page_table, before[1])
    assert (tables.seq_lens - before[2]).tolist()[:6] == [1, 0, 0, 1, 1, 0]
    assert int(tables.seq_lens[tables.dummy_slot]) == 0
    changed = (memory.k_buffer[0] != before[3]).flatten(1).any(dim=1).nonzero().flatten().tolist()
    dummy_page = range(runner.state.num_pages * 4, runner.state.num_pages * 4 + 4)
    written = {int(tables.page_table[slot, 0]) * 4 + 3 for slot in (0, 3, 4)}
    assert set(changed) - set(dummy_page) == written


def test_the_slots_of_the_step_before_are_not_told_again(checkpoint: CheckpointFactory) -> None:
    runner = with_graphs(checkpoint, 4, Recorder())
    run_section(runner, admit([0, 1], [5, 6, 7], 3, greedy(9)))
    buffers = decodes_of(runner).buffers
    slots = np.array([0, 1])
    with torch.inference_mode():
        _tell_in_turn(buffers, slots, decodes_of(runner))


def _tell_in_turn(buffers: GraphInputBuffers, slots: Ints, decodes: DecodeRunner) -> None:
    assert buffers.stage(slots, None)
    assert not buffers.stage(slots, None)
    assert not buffers.stage(slots.copy(), None)
    assert not buffers.stage(slots, NewPages([0], [9])), "pages are not copied"
    assert _told(buffers, decodes) == [[0, 1], [9, -1]]
    decodes.store(Draws(torch.zeros(1, dtype=torch.int64), torch.zeros(1)))
    assert not buffers.stage(slots, None)
    assert _told(buffers, decodes) == [[0, 1], [-1, -1]], "the pages of the step before must not be entered again"
    assert buffers.stage(slots[::-1].copy(), NewPages([1], [7]))
    assert _told(buffers, decodes) == [[1, 0], [-1, 7]]
    decodes.store(Draws(torch.zeros(1, dtype=torch.int64), torch.zeros(1)))
    assert buffers.stage(slots[:1], None)
    assert _told(buffers, decodes) == [[0, buffers._tables.dummy_slot], [-1, -1]]


def _told(buffers: GraphInputBuffers, decodes: DecodeRunner) -> list[list[int]]:
    """The slots and the pages that rows begin, as the device finds them in the next step."""
    number = int(decodes._parts.draw_store.last) + 1
    words = buffers._mailbox.words[number % RING, :2].tolist()
    pages = [word & ((1 << PAGE_BITS) - 1) if word >> PAGE_BITS == number else -1 for word in words]
    return [buffers.row_slots[:2].tolist(), pages]


def test_rows_that_decode_on_are_launched_by_what_was_chosen_for_them(checkpoint: CheckpointFactory) -> None:
    """But not while there is something to capture, and not where they are to be read in another way."""
    recorder = Recorder()
    runner = with_graphs(checkpoint, 4, recorder)
    decodes = decodes_of(runner)
    run_section(runner, admit([0, 1], [5, 6, 7], 9, greedy(30)))
    run_section(runner, section_of([0, 1]))
    assert recorder.num_replays == 0
    runner.graphs.capture_next()  # the largest; the planner goes on with the same rows
    run_section(runner, section_of([0, 1]))
    assert recorder.num_replays == 2, "a graph for the forward pass, and one for sampling"
    runner.graphs.capture_all()
    run_section(runner, section_of([0, 1]))
    chosen = decodes._chosen
    assert chosen is not None
    assert chosen.size == 2
    run_section(runner, section_of([0, 1]))
    assert decodes._chosen is chosen
    with torch.inference_mode():
        step = runner._planner.plan_decodes(section_of([0, 1]))
        assert step is not None
        assert step.slots is chosen.slots
        decodes.forward(step._replace(reading=Reading.EVEN))
        assert decodes._chosen is not chosen
        decodes.sample(step)


def test_a_step_that_was_not_sampled_is_not_followed_by_another(checkpoint: CheckpointFactory) -> None:
    """Its pages would be entered again."""
    runner = with_graphs(checkpoint, 4, Recorder())
    run_section(runner, admit([0, 1], [5, 6, 7], 9, greedy(30)))
    runner.execute(section_of([0, 1]))
    with pytest.raises(AssertionError, match="were not stored"):
        runner.execute(section_of([0, 1]))


def test_a_slot_that_was_admitted_anew_between_two_steps_of_the_same_slots_has_its_own_pages(
    checkpoint: CheckpointFactory,
) -> None:
    runner = with_graphs(checkpoint, 4, Recorder())
    while runner.graphs.num_left:
        runner.graphs.capture_next()
    run_section(runner, admit([0], [5, 6, 7, 8], 1, greedy(9)))
    begins = PlanSection(
        [], [PageDelta(int32_array([0]), int32_array([1]), int32_array([40]))], EMPTY, EMPTY, EMPTY, EMPTY,
        int32_array([0]),
    )  # fmt: skip
    run_section(runner, begins)
    run_section(runner, admit([0], [5, 6, 7, 8], 2, greedy(9)))
    run_section(runner, section_of([0]))
    assert runner.state.req_to_token_pool.page_table[0, :2].tolist() == [0, 1]


def test_what_graphs_cannot_serve_is_launched_from_the_same_tables(checkpoint: CheckpointFactory) -> None:
    recorder = Recorder()
    runner = with_graphs(checkpoint, 4, recorder)
    while runner.graphs.num_left:
        runner.graphs.capture_next()
    run_section(runner, admit([0, 1], [5, 6, 7], 3, SamplingSpec(9, temperature=1.0), LogprobSpec(output=True)))
    output = runner.execute(section_of([1, 0]))
    assert isinstance(output, DecodeOutput)
    assert (output.step.kind, recorder.num_replays) == (SamplingKind.OTHER, 1)
    assert runner.sample(output).result().counts.tolist() == [1, 1]
    assert recorder.num_replays == 1


def test_filters_are_a_graph_of_their_own_and_greedy_rows_beside_them_are_as_alone(
    checkpoint: CheckpointFactory,
) -> None:
    specs = [
        SamplingSpec(12, temperature=0.7, top_k=3),
        SamplingSpec(12, temperature=0.0),
        SamplingSpec(12, temperature=1.2, top_p=0.6, min_p=0.05),
        SamplingSpec(12, temperature=1.1),
    ]
    expected = [Job([5 + i, 6, 7], spec, seed=i) for i, spec in enumerate(specs)]
    found = [Job(list(job.prompt), job.sampling, job.seed) for job in expected]
    for job in expected:
        PlanDriver(make_runner(checkpoint("qwen3"), 4), 4).run([job])
    runner = with_graphs(checkpoint, 4, recorder := Recorder())
    while runner.graphs.num_left:
        runner.graphs.capture_next()
    PlanDriver(runner, 4).run(found)
    assert [job.outputs for job in found] == [job.outputs for job in expected]
    assert recorder.num_replays == 2 * 11


def test_penalties_biases_and_held_back_stops_are_a_graph_of_their_own(checkpoint: CheckpointFactory) -> None:
    """And who comes next into their slots, or is beside them, has nothing of it."""
    ids = int32_array(range(0, 500, 3))
    biases: dict[str, Any] = {"bias_ids": ids, "bias_values": np.linspace(-4, 4, len(ids)).astype(np.float32)}
    specs = [
        SamplingSpec(12, temperature=0.0, repetition_penalty=1.4),
        SamplingSpec(12, temperature=0.9, top_p=0.8, frequency_penalty=0.7, presence_penalty=-0.4),
        SamplingSpec(12, temperature=0.0, **biases),
        SamplingSpec(12, temperature=0.0, min_new_tokens=6, stop_ids=ids),
        SamplingSpec(12, temperature=1.1),
    ]
    first = [Job([5 + i, 6, 7], spec, seed=i) for i, spec in enumerate(specs)]
    later = [Job([50 + i, 6, 7], greedy(9), seed=i) for i in range(8)]
    expected = [first, later]
    found = [[Job(list(job.prompt), job.sampling, job.seed) for job in jobs] for jobs in expected]
    alone = PlanDriver(make_runner(checkpoint("qwen3"), 4, max_running_requests=8), 4)
    for job in first + later:
        alone.run([job])
    runner = with_graphs(checkpoint, 4, recorder := Recorder(), max_running_requests=8, cuda_graph_bs=SIZES[:-1])
    while runner.graphs.num_left:
        runner.graphs.capture_next()
    driver = PlanDriver(runner, 4)
    for jobs in found:
        driver.run(jobs)
    assert [[job.outputs for job in jobs] for jobs in found] == [[job.outputs for job in jobs] for jobs in expected]
    assert recorder.num_replays == 2 * (11 + 8)


def test_prompts_logits_are_padded_to_sizes_that_decodes_have(checkpoint: CheckpointFactory) -> None:
    runner = with_graphs(checkpoint, 4, Recorder())
    decodes, head = decodes_of(runner), runner.loaded.model.lm_head
    hidden = torch.randn(9, runner.loaded.config.hidden_size)
    with torch.inference_mode():
        for rows in ([3], [8, 0, 5], [0, 1, 2, 3, 4, 5, 6, 7, 8], [1] * 20):
            padded = decodes.padded(torch.tensor(rows))
            assert padded[: len(rows)].tolist() == rows
            assert len(padded) in SIZES or len(rows) > SIZES[-1]
            logits = decodes.logits_of(hidden[padded])[: len(rows)]
            assert logits.shape == (len(rows), runner.loaded.config.vocab_size)
            torch.testing.assert_close(logits, head.logits(hidden[rows]), atol=1e-5, rtol=1e-5)


def test_sizes_that_were_asked_for_are_captured_however_large(checkpoint: CheckpointFactory) -> None:
    options: dict[str, Any] = {"cuda_graph_bs": (8, 300), "max_running_requests": 600}
    runner = with_graphs(checkpoint, 4, Recorder(), **options)
    assert [runner.graphs.capture_next() for _ in range(runner.graphs.num_left)] == [300, 8]
    extra = graph_bytes(ServerArgs(model_path="x", **options), runner.loaded.config) - graph_bytes(
        ServerArgs(model_path="x"), runner.loaded.config
    )
    assert extra == 4 * runner.loaded.config.vocab_size * (300 - 256)


class Failing(Recorder):
    """Has room for so many captures."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room

    def pieces(self, work: Callable[[Work], None]) -> list[Work]:
        if self.num_captures == self._room:
            raise RuntimeError("out of shared memory")
        return super().pieces(work)


@pytest.mark.parametrize(("room", "kept"), [(0, ()), (6, (16,)), (4 * len(SIZES), SIZES)])
def test_a_capture_that_fails_ends_capturing_and_nothing_else(
    checkpoint: CheckpointFactory, caplog: pytest.LogCaptureFixture, room: int, kept: tuple[int, ...]
) -> None:
    """The first; the third graph of a second size; and the first of prompts, behind those of all decodes."""
    expected, found = plain_jobs(6), plain_jobs(6)
    PlanDriver(make_runner(checkpoint("qwen3"), 4), 4).run(expected)
    runner = with_graphs(checkpoint, 4, recorder := Failing(room), piecewise_cuda_graph_max_tokens=64)
    while runner.graphs.num_left:
        runner.graphs.capture_next()
    assert recorder.num_captures == room
    assert [record.message for record in caplog.records if "out of shared memory" in record.message] != []
    (graphs,) = decodes_of(runner).graphs.values()
    assert graphs.sizes == kept
    PlanDriver(runner, 4).run(found)
    assert [job.outputs for job in found] == [job.outputs for job in expected]
    assert (recorder.num_replays > 0) == bool(kept)


def test_a_capture_that_fails_on_all_ranks_alike_ends_capturing_on_each_and_nothing_else(
    checkpoint: CheckpointFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = checkpoint("qwen3"), plain_jobs(4)
    PlanDriver(make_runner(folder, 4), 4).run(expected)
    monkeypatch.setattr(backend_choice, "TorchNativeBackend", PlansAtOnce)

    def work(tp: TensorParallel) -> tuple[list[list[int]], int]:
        options: dict[str, Any] = {"cuda_graph_bs": SIZES, "piecewise_cuda_graph_max_tokens": 0, "tp_size": 2}
        runner = make_runner(folder, 4, tp=tp, capture=Failing(6), **options)
        sizes = [runner.graphs.capture_next(), runner.graphs.capture_next()]
        jobs = plain_jobs(4)
        PlanDriver(runner, 4).run(jobs)
        assert sizes[0] == SIZES[-1], sizes
        return [job.outputs for job in jobs], runner.graphs.num_left

    for outputs, num_left in run_ranks(2, tmp_path, work):
        assert num_left == 0
        assert outputs == [job.outputs for job in expected]


def make_graphs(sizes: tuple[int, ...], pads: bool = True) -> CudaGraphRunner:
    return CudaGraphRunner(sizes, pads, lambda size: [lambda: None], Recorder())


def capture_next(graphs: CudaGraphRunner) -> int:
    size = graphs.next_size
    graphs.capture_one_batch_size(size)
    return size


def test_only_graphs_with_adapters_serve_steps_with_adapters() -> None:
    graphs = {Reading.BY_ROW: make_graphs((64,)), Reading.ADAPTED: make_graphs((64,))}
    graphs[Reading.BY_ROW].capture_one_batch_size(64)
    assert find_graph(graphs, Reading.ADAPTED, 60) is None
    graphs[Reading.ADAPTED].capture_one_batch_size(64)
    assert find_graph(graphs, Reading.ADAPTED, 60) == (graphs[Reading.ADAPTED], 64)
    assert find_graph(graphs, Reading.BY_ROW, 60) == (graphs[Reading.BY_ROW], 64)


def test_a_step_takes_graphs_of_its_kind_unless_others_fit_it_better() -> None:
    graphs = {Reading.BY_ROW: make_graphs((32, 64, 256)), Reading.EVEN: make_graphs((64, 256))}
    assert find_graph(graphs, Reading.EVEN, 60) is None
    graphs[Reading.EVEN].capture_one_batch_size(256)
    assert find_graph(graphs, Reading.EVEN, 60) == (graphs[Reading.EVEN], 256), "better than none"
    graphs[Reading.BY_ROW].capture_one_batch_size(64)
    assert find_graph(graphs, Reading.EVEN, 60) == (graphs[Reading.BY_ROW], 64)
    graphs[Reading.EVEN].capture_one_batch_size(64)
    assert find_graph(graphs, Reading.EVEN, 60) == (graphs[Reading.EVEN], 64)
    graphs[Reading.SHARED] = make_graphs((256,))
    graphs[Reading.SHARED].capture_one_batch_size(256)
    assert find_graph(graphs, Reading.SHARED, 60) == (graphs[Reading.SHARED], 256), (
        "what is shared is worth the padding"
    )
    assert find_graph(graphs, Reading.BY_ROW, 60) == (graphs[Reading.BY_ROW], 64)


def test_the_largest_size_is_captured_first_then_the_one_in_demand_then_the_largest_of_the_others() -> None:
    graphs = make_graphs((1, 2, 4, 8))
    assert graphs.size_for(1) is None
    assert [capture_next(graphs) for _ in range(2)] == [8, 1]
    assert graphs.size_for(2) == 8, "a larger graph serves until its own is there"
    assert [capture_next(graphs) for _ in range(2)] == [2, 4]
    assert graphs.num_left == 0
    assert [graphs.size_for(rows) for rows in (1, 2, 3, 5, 8, 9)] == [1, 2, 4, 8, 8, None]


def captures_of(rows: Iterable[int]) -> list[int]:
    """What is captured while steps of so many rows follow each other, one capture at most between two of them."""
    graphs, captured = make_graphs(graph_sizes(256)), []
    for num_rows in rows:
        graphs.size_for(num_rows)
        if graphs.is_missing_one:
            captured.append(capture_next(graphs))
    return captured


def test_a_step_misses_a_graph_where_there_is_none_or_one_that_is_much_larger() -> None:
    graphs = make_graphs((24, 32, 48, 64))
    assert not graphs.is_missing_one
    graphs.size_for(65)
    assert not graphs.is_missing_one, "there is no size for so many rows"
    graphs.size_for(32)
    assert graphs.is_missing_one
    assert capture_next(graphs) == 64
    assert graphs.is_missing_one, "twice as large is too large"
    assert graphs.size_for(48) == 64
    assert graphs.next_size == 32, "a step that has a near one misses nothing"
    assert capture_next(graphs) == 32
    assert graphs.size_for(20) == 32
    assert not graphs.is_missing_one
    graphs.size_for(10)
    assert not graphs.is_missing_one, "what counts is the best size, not the rows"
    assert graphs.num_left == 2


def test_a_larger_graph_that_turns_out_to_be_near_is_missed_no_more() -> None:
    graphs = make_graphs((48, 64))
    graphs.size_for(48)
    assert capture_next(graphs) == 64
    assert not graphs.is_missing_one


def test_a_burst_captures_less_than_half_of_the_sizes() -> None:
    assert captures_of(range(256, 0, -1)) == [256, 160, 96, 56, 32, 16, 8, 4, 2, 1]
    assert captures_of([256] * 9) == [256]
    assert captures_of([100] * 9) == [256, 112]


def test_a_graph_that_many_steps_are_padded_beside_is_missed_in_the_end() -> None:
    assert captures_of([256, 160, *[130] * (PADDED_STEPS - 1)]) == [256, 160]
    assert captures_of([256, 160, *[130] * PADDED_STEPS]) == [256, 160, 144]


def test_steps_that_share_miss_what_they_share_in_and_no_size_of_others() -> None:
    graphs = {Reading.BY_ROW: make_graphs((32, 64, 256)), Reading.SHARED: make_graphs((64, 256))}
    assert find_graph(graphs, Reading.SHARED, 20) is None
    assert [one.is_missing_one for one in graphs.values()] == [True, True]
    for one in graphs.values():
        one.forget_missed()
    graphs[Reading.SHARED].capture_one_batch_size(256)
    find_graph(graphs, Reading.SHARED, 20)
    assert [one.is_missing_one for one in graphs.values()] == [False, True]


def test_without_padding_only_exact_sizes_are_replayed() -> None:
    graphs = make_graphs((1, 4), pads=False)
    for _ in range(2):
        capture_next(graphs)
    assert [graphs.size_for(rows) for rows in (1, 2, 4, 5)] == [1, None, 4, None]
    assert not graphs.is_missing_one


def test_without_padding_a_step_misses_its_own_size_alone() -> None:
    graphs = make_graphs((1, 4, 5), pads=False)
    graphs.size_for(3)
    assert not graphs.is_missing_one
    graphs.size_for(4)
    assert [capture_next(graphs) for _ in range(2)] == [5, 4]
    assert not graphs.is_missing_one


def test_what_is_missed_is_captured_first_by_decodes_then_by_prompts(checkpoint: CheckpointFactory) -> None:
    """Decodes from slots 0 and 1, prompts of a few tokens."""
    options: dict[str, Any] = {"cuda_graph_bs": (2, 8), "piecewise_cuda_graph_max_tokens": 64}
    runner = with_graphs(checkpoint, 4, Recorder(), **options)
    warm_up(runner)
    assert not runner.graphs.is_missing_one, "what warms up says nothing of what comes"
    run_section(runner, admit([0, 1], [5, 6, 7], 3, greedy(9)))
    assert runner.graphs.is_missing_one
    assert runner.graphs.capture_next() == 64
    run_section(runner, section_of([0, 1]))
    assert [runner.graphs.capture_next() for _ in range(3)] == [8, 2, 32]
    assert not runner.graphs.is_missing_one
    assert runner.graphs.num_left == 0


def test_where_captures_end_nothing_is_missed(checkpoint: CheckpointFactory) -> None:
    runner = with_graphs(checkpoint, 4, Failing(0), piecewise_cuda_graph_max_tokens=64)
    run_section(runner, admit([0, 1], [5, 6, 7], 3, greedy(9)))
    run_section(runner, section_of([0, 1]))
    runner.graphs.capture_next()
    run_section(runner, section_of([0, 1]))
    assert not runner.graphs.is_missing_one


def test_sizes_end_at_the_most_rows() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(6) == (1, 2, 4, 6)
    assert graph_sizes(256)[-1] == 256
    assert all(size <= 300 for size in graph_sizes(300)) and 300 in graph_sizes(300)
