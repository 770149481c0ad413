"""One of the stages of a pipeline, on GPUs: `python -m tests.gpu.stage_ranks CASE STAGE STAGES RENDEZVOUS [FOLDER]`.

All stages may run on one GPU: their processes take turns there. It says what it found and `done`, or what is wrong.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import sys
import time
from collections import deque
from pathlib import Path
from typing import cast

import numpy as np
import torch

from srt.distributed.errors import CollectiveError
from srt.distributed.parallel_state import TensorParallel
from srt.distributed.pipeline import Pipeline, StageIds
from srt.distributed.rendezvous import init_pipeline, open_device_links
from srt.distributed.stage_memory import LinkSizes
from srt.layers.sampler import Draws
from srt.model_executor.model_runner import ModelRunner
from srt.model_executor.startup.warm_up import warm_up
from srt.model_executor.step.draw_store import DrawStore, StepIds
from srt.model_executor.step.step_output import StepOutput
from srt.protocol.messages import Admission, LogprobSpec, PageDelta, PlanSection, SamplingSpec, int32_array
from srt.utils.model_config import ModelConfig
from tests.support.plan_driver import Job, PlanDriver, greedy, token_ids
from tests.support.runners import make_runner

PAGE = 16
NUM_ROWS = {"window": 6, "single": 2}
NUM_STEPS = 60
SIZES = LinkSizes(row_bytes=5120, most_rows=700, most_ids=256, most_in_flight=3)


HAMMERED = LinkSizes(row_bytes=8192, most_rows=1500, most_ids=256, most_in_flight=3)
HAMMER_STEPS = 12_000 if torch.cuda.device_count() > 1 else 300  # on one GPU the processes take turns

BEGUN_S = time.monotonic()


def note(phase: str) -> None:
    """Print how far this stage has come: if it hangs, the last line says where."""
    print(f"{time.monotonic() - BEGUN_S:.1f} s: {phase}", flush=True)


def check(is_right: bool, *what: object) -> None:
    if not is_right:
        raise SystemExit(f"wrong: {what}")


def links(pipeline: Pipeline, device: torch.device) -> None:
    """Many steps of any size in a row, at most as many in flight as the links serve, with other work of any length between them."""
    open_device_links(pipeline, SIZES, device, 60.0)
    same, own = random.Random(3), random.Random(pipeline.stage)
    matrix, table = torch.randn(2048, 2048, device=device), torch.zeros((256, 512), dtype=torch.int32, device=device)
    last, started = pipeline.num_stages - 1, deque[tuple[int, list[int], object]]()
    for step in range(400):
        count, num_ids = same.choice((1, 2, 8, 256, 700)), same.choice((1, 3, 256))
        ids = [same.randrange(1 << 30) for _ in range(num_ids)]
        if own.random() < 0.3:
            for _ in range(own.choice((1, 4, 16))):
                torch.mm(matrix, matrix)
        if pipeline.stage:
            rows = torch.empty((count, SIZES.row_bytes // 2), dtype=torch.bfloat16, device=device)
            pipeline.links.receive_hidden(rows)
            expected = rows_of(step, pipeline.stage - 1, count, device)
            check(torch.equal(rows, expected), "rows", step, count)
        if pipeline.stage < last:
            pipeline.links.send_hidden(rows_of(step, pipeline.stage, count, device))
            arriving = pipeline.links.receive_ids(num_ids)
            slots = np.arange(num_ids)
            slots[1:2] = -1
            pipeline.links.write_ids(arriving, slots, np.full(num_ids, step % 512), table)
            started.append((step, ids, arriving))
            if len(started) == SIZES.most_in_flight:
                check_ids(table, *started.popleft())
        else:
            words = torch.tensor(ids, dtype=torch.int64).pin_memory()
            pipeline.links.send_ids(Drawn(words))
            torch.cuda.synchronize()  # so that the words stay until they are read
    while started:
        check_ids(table, *started.popleft())


def check_ids(table: torch.Tensor, step: int, ids: list[int], arriving: object) -> None:
    check(arriving.wait().tolist() == ids, "ids on the host", step)  # type: ignore[attr-defined]
    written = table[: len(ids), step % 512].tolist()
    check(written[0] == ids[0] and written[2:] == ids[2:], "ids in the table", step)
    check(len(ids) == 1 or written[1] != ids[1], "an id that was dropped", step)


def hammer(pipeline: Pipeline, device: torch.device) -> None:
    """Thousands of steps that no host waits for, but for the scheduler's limit of steps in flight; the devices compare every byte.

    What is received goes to one buffer, as in a graph, so rows that are late or overwritten show as those of another step. The stages
    also work on their own between two copies, for random times, so that each is ahead of the other for a while.
    """
    open_device_links(pipeline, HAMMERED, device, 60.0)
    same, own = random.Random(5), random.Random(pipeline.stage)
    last, width = pipeline.num_stages - 1, HAMMERED.row_bytes // 4
    # Numbers that are the same on all stages: rows of a step begin at another place each time, and the step is added to them.
    pattern = torch.randint(1 << 30, (2 * HAMMERED.most_rows, width), generator=torch.Generator().manual_seed(1))
    pattern = pattern.to(device, torch.int32)
    received = torch.zeros((HAMMERED.most_rows, width), dtype=torch.int32, device=device)
    drawn = torch.arange(HAMMERED.most_ids, device=device)
    table = torch.zeros((HAMMERED.most_ids, HAMMER_STEPS), dtype=torch.int32, device=device)
    store = DrawStore.allocate(device, HAMMERED.most_ids, HAMMERED.most_in_flight)
    values, matrix = torch.zeros(HAMMERED.most_ids, device=device), torch.randn(1024, 1024, device=device)
    wrong = torch.zeros((2, HAMMER_STEPS), dtype=torch.int64, device=device)  # numbers in rows, and ids, of each step
    in_flight = deque[tuple[int, int, StageIds]]()

    def busy() -> None:
        for _ in range(own.choice((0, 0, 0, 1, 2, 20))):
            torch.mm(matrix, matrix)

    def rows_at(step: int, stage: int, count: int) -> torch.Tensor:
        begin = (37 * step + 11 * stage) % HAMMERED.most_rows
        return pattern[begin : begin + count] + step

    def write_oldest() -> None:
        step, num_ids, ids = in_flight.popleft()
        ids.wait()  # as the scheduler has the result of this step before it plans the next one
        pipeline.links.write_ids(ids, np.arange(num_ids), np.full(num_ids, step), table)
        wrong[1, step] = (table[:num_ids, step] != ids_at(drawn[:num_ids], step)).sum()

    for step in range(HAMMER_STEPS):
        count, num_ids = (
            same.choice((1, 2, 3, 64, 256, same.randint(1, HAMMERED.most_rows))),
            same.choice((1, 2, 64, 256)),
        )
        if len(in_flight) == HAMMERED.most_in_flight:
            write_oldest()
        busy()
        if pipeline.stage:
            pipeline.links.receive_hidden(received[:count])
            wrong[0, step] = (received[:count] != rows_at(step, pipeline.stage - 1, count)).sum()
            busy()
        if pipeline.stage < last:
            pipeline.links.send_hidden(rows_at(step, pipeline.stage, count))
            in_flight.append((step, num_ids, pipeline.links.receive_ids(num_ids)))
            continue
        row_slots, positions = drawn[:num_ids], torch.full((num_ids,), step, device=device)
        store.store(Draws(ids_at(row_slots, step), values[:num_ids]), row_slots, positions, table)
        pipeline.links.send_ids(store.latest(num_ids))
        in_flight.append((step, num_ids, cast("StageIds", _OwnIds(store.latest(num_ids)))))
        if len(in_flight) == HAMMERED.most_in_flight:
            in_flight.popleft()[2].wait()
    while in_flight and pipeline.stage < last:
        write_oldest()
    for what, counts in zip(("numbers of rows", "ids"), wrong.tolist(), strict=True):
        steps = [(step, count) for step, count in enumerate(counts) if count]
        check(not steps, what, len(steps), steps[:8])


def ids_at(rows: torch.Tensor, step: int) -> torch.Tensor:
    return (rows * 7919 + step * 104729) % (1 << 20)


class _OwnIds:
    """The last stage's ids: only their arrival on the host counts."""

    def __init__(self, ids: StepIds) -> None:
        self._ids = ids

    def wait(self) -> None:
        self._ids.wait()


class Drawn:
    """Ids that are on the host already."""

    def __init__(self, words: torch.Tensor) -> None:
        self.words = words

    def wait(self) -> np.ndarray:
        raise SystemExit("wrong: a host waits for ids that the device sends")


def rows_of(step: int, stage: int, count: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(100 * step + stage)
    return torch.randn(
        (count, SIZES.row_bytes // 2), dtype=torch.float32, generator=generator, device=device
    ).bfloat16()


def dead(pipeline: Pipeline, device: torch.device) -> None:
    """Stage 0 leaves while stage 1 waits for it."""
    open_device_links(pipeline, SIZES, device, 3.0)
    pipeline.min_int(0)
    if pipeline.stage == 0:
        return
    rows = torch.empty((4, SIZES.row_bytes // 2), dtype=torch.bfloat16, device=device)
    try:
        with pipeline.naming_lost_peer():
            pipeline.links.receive_hidden(rows)
            torch.cuda.synchronize()
    except CollectiveError as error:
        check(str(error) == "stage 1 lost the others: stage 0 sent nothing for 3 s", str(error))
    else:
        check(False, "rows without a sender")


def runner_for(pipeline: Pipeline | None, device: torch.device, folder: Path, has_graphs: bool) -> ModelRunner:
    num_slots, chunk = 8, 24
    if pipeline is not None:
        hidden = ModelConfig.from_folder(folder).hidden_size
        row_bytes = hidden * torch.float32.itemsize
        # A test's plans do not wait for results of steps without draws, so more steps may be in flight than a scheduler allows.
        open_device_links(pipeline, LinkSizes(row_bytes, 1024 + num_slots, num_slots, 64), device, 60.0)
    runner = make_runner(
        folder,
        PAGE,
        TensorParallel(0, 1, None, device),
        device,
        pipeline=pipeline,
        dtype="float32",
        max_running_requests=num_slots,
        chunked_prefill_size=chunk,
        attention_backend="triton",
        cuda_graph_bs=(1, 2, 4, 8),
        disable_cuda_graph=not has_graphs,
    )
    note("loaded")
    warm_up(runner)
    note("warm")
    runner.graphs.capture_all()
    note("captured")
    return runner


def jobs() -> list[Job]:
    """Prompts of many lengths, two with a common beginning; greedy, drawn and penalised; one with logprobs."""
    rng = np.random.default_rng(0)
    common = token_ids(rng, 40, 500)
    prompts = [token_ids(rng, count, 500) for count in (1, 5, 17, 60)] + [[*common, 7], [*common, 8, 9]]
    made = [Job(prompt, greedy(20)) for prompt in prompts]
    drawn = SamplingSpec(20, temperature=0.9, top_p=0.9), SamplingSpec(20, temperature=0.8, frequency_penalty=0.5)
    made += [Job(prompt, drawn[seed % 2], seed=seed) for seed, prompt in enumerate(prompts)]
    return [*made, Job([*common, 7, 8], greedy(6), logprobs=LogprobSpec(output=True, prompt_start=0))]


def tokens(runner: ModelRunner) -> list[list[int]]:
    """Requests one step after the other."""
    made = jobs()
    PlanDriver(runner, PAGE, chunk=24, share=True).run(made)
    return [job.outputs for job in made]


def in_turn(runner: ModelRunner, num_rows: int) -> list[list[int]]:
    """Two groups of rows that decode in turn, three steps in flight, as in a server with two stages.

    While a stage waits for the one before, its host launches all kernels of the step. So those that start early do so at once.
    """
    outputs: list[list[int]] = [[] for _ in range(num_rows)]
    in_flight: deque[tuple[list[int], StepOutput]] = deque()

    def answer() -> None:
        slots, output = in_flight.popleft()
        for slot, id_ in zip(slots, output.result().ids.tolist(), strict=True):
            outputs[slot].append(id_)

    with torch.inference_mode():
        for step in range(NUM_STEPS):
            if len(in_flight) == 3:
                answer()
            slots = list(range(step % 2, num_rows, 2))
            section = decodes_of(slots) if step > 1 else prompts_of(slots)
            in_flight.append((slots, runner.launch(section)))
        while in_flight:
            answer()
    return outputs


def prompts_of(slots: list[int]) -> PlanSection:
    lengths = [3 + slot for slot in slots]
    pages = -(-(max(lengths) + NUM_STEPS) // PAGE)
    return PlanSection(
        [
            Admission(
                slot,
                int32_array([5 + slot] * length),
                length,
                0,
                slot,
                SamplingSpec(NUM_STEPS, temperature=0.7 * (slot % 3 == 1)),
                LogprobSpec(),
            )
            for slot, length in zip(slots, lengths, strict=True)
        ],
        [
            PageDelta(
                int32_array(slots),
                int32_array([pages] * len(slots)),
                int32_array([slot * pages + page for slot in slots for page in range(pages)]),
            )
        ],
        int32_array(slots),
        int32_array([0] * len(slots)),
        int32_array(lengths),
        int32_array([1] * len(slots)),
        int32_array(),
    )


def decodes_of(slots: list[int]) -> PlanSection:
    none = int32_array()
    return PlanSection([], [PageDelta(none, none, none)], none, none, none, none, int32_array(slots))


def main(case: str, stage: int, num_stages: int, rendezvous: str, folder: str) -> None:
    device = torch.device("cuda", stage % torch.cuda.device_count())
    torch.cuda.set_device(device)
    faulthandler.dump_traceback_later(100)
    pipeline = None if num_stages == 1 else init_pipeline(stage, num_stages, rendezvous, 60.0, 3)
    with torch.inference_mode():
        kind, _, without = case.partition(" without ")
        if folder:
            runner = runner_for(pipeline, device, Path(folder), not without)
            print(json.dumps(tokens(runner) if kind == "tokens" else in_turn(runner, NUM_ROWS[kind])))
        else:
            assert pipeline is not None
            {"links": links, "hammer": hammer, "dead": dead}[case](pipeline, device)
    if pipeline is not None and case != "dead":
        pipeline.min_int(0)  # nobody leaves before all have read what was sent
    print("done", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(
        sys.argv[1],
        int(sys.argv[2]),
        int(sys.argv[3]),
        sys.argv[4],
        *sys.argv[5:],
        *([""] if len(sys.argv) < 6 else []),
    )
