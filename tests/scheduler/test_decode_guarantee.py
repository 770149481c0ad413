"""Those who stream while a very long prompt comes, in virtual time: a fake GPU, plans that run ahead, results that travel."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import pytest

from srt.managers.scheduler.effects import Frontend, ToFrontend, ToWorkers, Worker
from srt.managers.scheduler.scheduler import Scheduler
from srt.managers.scheduler.step_times import LEAST_CHUNK
from srt.protocol.messages import (
    AckBatch,
    FrontendHello,
    GenerateRequest,
    LogprobSpec,
    PlanSection,
    SamplingSpec,
    StepPlan,
    StepResult,
    TokenBatch,
    WorkerHello,
    int32_array,
)
from srt.server_args import ServerArgs
from tests.support.wire import at_scheduler

STALL_US = 5_000
LONG = 100_000


@dataclass(frozen=True, slots=True)
class Gpu:
    """Microseconds of a step: decodes cost by the row and by the context that they look back on, prompts by the token and pair."""

    base: float = 6_000.0
    per_row: float = 60.0
    per_context: float = 0.002
    per_token: float = 25.0
    per_pair: float = 0.001

    def decodes_us(self, contexts: list[int]) -> float:
        return self.base + self.per_row * len(contexts) + self.per_context * sum(contexts) if contexts else 2_000.0

    def prompt_us(self, start: int, count: int) -> float:
        return count * (self.per_token + self.per_pair * (start + count / 2))


@dataclass(slots=True)
class Step:
    begin: float
    decodes_us: float
    prompts_us: float
    rows: list[int]  # rids
    num_prompt_tokens: int

    @property
    def end(self) -> float:
        return self.begin + self.decodes_us + self.prompts_us


@dataclass
class SchedulerCore:
    """One scheduler and its GPU, which begins a step when the one before has ended and its plan is there. Time is in µs."""

    gpu: Gpu
    num_slots: int = 64
    chunk: int = 2048
    steps: list[Step] = field(default_factory=list)
    _waiting: list[StepPlan] = field(default_factory=list)
    _rids: dict[int, int] = field(default_factory=dict)  # by slot
    _lengths: dict[int, int] = field(default_factory=dict)
    now: float = 0.0

    def __post_init__(self) -> None:
        args = ServerArgs(model_path="m", max_decode_stall=STALL_US / 1000, chunked_prefill_size=self.chunk)
        self._scheduler = Scheduler(args, "p")
        hello = WorkerHello(0, "p", "c", "d", 16, 40_000, self.num_slots, 1 << 17, 1000)
        self._scheduler.handle(Worker(0), hello, 0.0)
        self._scheduler.handle(Frontend(0), FrontendHello(0, "p"), 0.0)

    def ask(self, rid: int, prompt_len: int, max_new: int, *, stream: bool = True) -> None:
        """A prompt that no other one shares; its seed is its rid."""
        prompt = int32_array(np.random.default_rng(rid).integers(0, 1000, prompt_len))
        request = GenerateRequest(
            rid,
            f"r{rid}",
            prompt,
            int32_array([0]),
            [int32_array()],
            SamplingSpec(max_new),
            LogprobSpec(),
            rid,
            stream=stream,
        )
        self._scheduler.handle(Frontend(0), at_scheduler(request), self.now / 1e6)

    def run(self, num_steps: int) -> list[Step]:
        """So many steps, or until there is nothing to do. What they were."""
        first = len(self.steps)
        self._tick()
        while self._waiting and len(self.steps) < first + num_steps:
            self._execute(self._waiting.pop(0))
            self._tick()
        return self.steps[first:]

    def _tick(self) -> None:
        for effect in self._scheduler.tick(self.now / 1e6):
            if isinstance(effect, ToWorkers) and isinstance(effect.message, StepPlan):
                self._waiting.append(effect.message)
            elif isinstance(effect, ToFrontend) and isinstance(effect.message, TokenBatch):
                self._scheduler.handle(Frontend(0), AckBatch(effect.message.number), self.now / 1e6)

    def _execute(self, plan: StepPlan) -> None:
        (section,) = plan.sections
        step = self._time(section)
        self.steps.append(step)
        self.now = step.end
        count = int(section.extend_samples.sum()) + len(section.decode_slots)
        ids = np.full(count, 7, np.int32)
        result = StepResult(plan.step, np.ones(count, np.int32), ids, 0, [], round(step.end - step.begin))
        self._scheduler.handle(Worker(0), result, self.now / 1e6)

    def _time(self, section: PlanSection) -> Step:
        for admission in section.admissions:
            self._rids[admission.slot] = admission.seed
        decodes = section.decode_slots.tolist()
        decodes_us = self.gpu.decodes_us([self._lengths[slot] for slot in decodes])
        prompts_us = 0.0
        columns = (section.extend_slots.tolist(), section.extend_starts.tolist(), section.extend_counts.tolist())
        for slot, start, count in zip(*columns, strict=True):
            prompts_us += self.gpu.prompt_us(start, count)
            self._lengths[slot] = start + count
        for slot in decodes:
            self._lengths[slot] += 1
        rids = [self._rids[slot] for slot in decodes]
        return Step(self.now, decodes_us, prompts_us, rids, int(section.extend_counts.sum()))


def gaps_us(steps: list[Step]) -> dict[int, list[tuple[float, float]]]:
    """Of each stream: the time from one token to the next, and what the later step would have taken without prompts."""
    last: dict[int, float] = {}
    gaps: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for step in steps:
        for rid in step.rows:
            if rid in last:
                gaps[rid].append((step.end - last[rid], step.decodes_us))
            last[rid] = step.end
    return gaps


def kept_us(gpu: Gpu) -> float:
    """What goes on in any case: the least chunk of a short prompt, and of a long one."""
    return 2 * gpu.prompt_us(LONG, LEAST_CHUNK)


@pytest.mark.parametrize("gpu", [Gpu(), Gpu(base=1_500.0, per_row=10.0), Gpu(per_token=100.0, per_pair=0.0)])
def test_a_prompt_of_100_000_tokens_delays_none_of_32_streams_by_more_than_one_chunks_step(gpu: Gpu) -> None:
    core = SchedulerCore(gpu)
    for rid in range(32):
        core.ask(rid, 200, 2_000)
    core.run(60)
    core.ask(99, LONG, 4)
    steps = core.run(1200)
    assert sum(step.num_prompt_tokens for step in steps) == LONG
    gaps = gaps_us(steps)
    assert len(gaps) >= 32
    for rid in range(32):
        assert len(gaps[rid]) == len(steps) - 1, "a stream was left out of a step"
        for gap, alone in gaps[rid]:
            assert gap <= 2.05 * alone + STALL_US + kept_us(gpu)


def test_streams_go_on_while_prompts_never_pause() -> None:
    """Each step has prompts to compute, from the first on: what decodes take alone is found out all the same."""
    gpu = Gpu()
    core = SchedulerCore(gpu)
    steps: list[Step] = []
    for rid in range(0, 3000, 3):
        for more in range(3):
            core.ask(rid + more, 300, 40)
        steps += core.run(2)
    late = [step for step in steps[200:] if step.rows]
    assert sum(1 for step in late if step.num_prompt_tokens == 0) < 0.1 * len(late), "prompts are seldom left out"
    assert max(len(step.rows) for step in late) > 32
    for step in late:
        assert step.prompts_us <= 1.3 * step.decodes_us + STALL_US + kept_us(gpu)


def test_before_anything_is_known_a_prompt_takes_little() -> None:
    """The first stream of a server's life meets its first long prompt."""
    gpu = Gpu(per_token=2_000.0)
    core = SchedulerCore(gpu)
    core.ask(1, 20, 500)
    core.run(1)
    core.ask(99, LONG, 4)
    for step in core.run(200):
        assert step.prompts_us <= step.decodes_us + STALL_US + kept_us(gpu)


def test_prompts_use_the_time_that_they_may_take() -> None:
    gpu = Gpu()
    core = SchedulerCore(gpu)
    for rid in range(32):
        core.ask(rid, 200, 2_000)
    core.run(60)
    core.ask(99, LONG, 4)
    mixed = [step for step in core.run(200) if step.num_prompt_tokens]
    used = sum(step.prompts_us for step in mixed[8:])
    assert used >= 0.85 * sum(step.decodes_us + STALL_US for step in mixed[8:])


def test_a_batch_that_nobody_watches_is_computed_in_as_few_steps_as_its_prompts_fill() -> None:
    """Small chunks beside decodes would keep the last ones waiting, for nobody's sake."""
    watched, unwatched = (
        SchedulerCore(Gpu(), num_slots=128, chunk=8192),
        SchedulerCore(Gpu(), num_slots=128, chunk=8192),
    )
    lengths = np.random.default_rng(0).integers(100, 1025, 128).tolist()
    for core in (watched, unwatched):
        for rid, length in enumerate(lengths):
            core.ask(rid, length, 100, stream=core is watched)
    num_steps = {}
    for core in (watched, unwatched):
        num_steps[core is watched] = sum(1 for step in core.run(10_000) if step.num_prompt_tokens)
    assert num_steps[False] == -(-sum(lengths) // 8192)
    assert num_steps[True] > 2 * num_steps[False]
