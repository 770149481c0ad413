"""A scheduler under a steady load, measured step by step: a worker that answers at once, a frontend that acknowledges at once."""

from __future__ import annotations

import gc
import time
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from srt.managers.scheduler.effects import Effect, Frontend, ToFrontend, ToWorkers, Worker
from srt.managers.scheduler.scheduler import Scheduler
from srt.protocol.codec import decode, decode_view, encode
from srt.protocol.messages import (
    AckBatch,
    FrontendHello,
    GenerateRequest,
    LogprobSpec,
    Message,
    SamplingSpec,
    StepPlan,
    StepResult,
    TokenBatch,
    WorkerHello,
    int32_array,
)
from srt.protocol.views import RequestView
from srt.server_args import ServerArgs

PHASES = (
    "arrivals: decode and take",
    "result: decode, stops, ends",
    "plan, and gather what is sent",
    "encode",
    "acknowledge",
)
VOCAB = 32_000
PAGE_SIZE = 16
Float64Array = NDArray[np.float64]
M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Load:
    """Answers have 1 to 2 x `answer_len` - 1 tokens, so that one in `answer_len` rows ends in a step."""

    name: str
    prompt_len: int
    answer_len: int
    waiting: int

    @property
    def pages(self) -> int:
        """That a request may need."""
        return -(-(self.prompt_len + 2 * self.answer_len - 1) // PAGE_SIZE)


class LoadedScheduler:
    """Always `load.waiting` requests wait while `rows` run: who ends is replaced. Beside what runs, memory holds `cached_tokens`."""

    def __init__(self, rows: int, load: Load, policy: str, cached_tokens: int = 16_384) -> None:
        self._rng = np.random.default_rng(0)
        self._load = load
        self._rid = 0
        self._num_to_arrive = rows + load.waiting
        self._plans: deque[StepPlan] = deque()
        self._acks: list[bytes] = []
        self._now = 0.0
        args = ServerArgs(model_path="m", max_queued_requests=1 << 20, schedule_policy=policy)
        self.scheduler = Scheduler(args, "p")
        pages = rows * load.pages + cached_tokens // PAGE_SIZE
        hello = WorkerHello(0, "p", "c", "d", PAGE_SIZE, pages, rows, 1 << 15, VOCAB)
        self.scheduler.handle(Worker(0), hello, 0.0)
        self.scheduler.handle(Frontend(0), FrontendHello(0, "p"), 0.0)
        self._fill_cache(pages)
        self.measure(3 * min(load.answer_len, 300))  # lengths of running answers are mixed from here on
        gc.collect()
        gc.freeze()  # as the scheduler's process does

    def measure(self, steps: int) -> Float64Array:
        """CPU microseconds [step, phase]."""
        return np.array([self._step() for _ in range(steps)])

    def _step(self) -> list[float]:
        """One step: what arrived meanwhile, the oldest plan's result, the next plan, the batch. Microseconds of each phase."""
        handle, now = self.scheduler.handle, self._now
        self._now += 0.01
        arrivals = [encode(self._request(), 1, 0) for _ in range(self._num_to_arrive)]
        result = self._result() if self._plans else None
        acks, self._acks = self._acks, []
        times = [time.thread_time_ns()]
        for data in arrivals:
            handle(Frontend(0), decode_view(data).message, now)
        times.append(time.thread_time_ns())
        if result is not None:
            handle(Worker(0), decode(result).message, now)
        times.append(time.thread_time_ns())
        effects = self.scheduler.tick(now)
        times.append(time.thread_time_ns())
        for effect in effects:
            if isinstance(effect, (ToWorkers, ToFrontend)):
                encode(effect.message, 1, 0)
        times.append(time.thread_time_ns())
        for data in acks:
            handle(Frontend(0), decode_view(data).message, now)
        times.append(time.thread_time_ns())
        self._take(effects)
        return [(end - begin) / 1000 for begin, end in pairwise(times)]

    def _take(self, effects: list[Effect]) -> None:
        batches = messages_of(effects, TokenBatch)
        self._num_to_arrive = sum(len(batch.done) for batch in batches)
        self._acks += [encode(AckBatch(batch.number), 1, 0) for batch in batches]
        self._plans += messages_of(effects, StepPlan)

    def _request(self) -> GenerateRequest:
        length = int(self._rng.integers(1, 2 * self._load.answer_len))
        return self._request_of(self._load.prompt_len, length)

    def _request_of(self, prompt_len: int, max_new_tokens: int) -> GenerateRequest:
        self._rid += 1
        prompt = self._rng.integers(0, VOCAB, prompt_len, np.int32)
        sampling = SamplingSpec(max_new_tokens, stop_ids=int32_array([VOCAB + 1]))
        return generate(self._rid, prompt, sampling)

    def _result(self) -> bytes:
        return answer(self._plans.popleft(), self._rng)

    def _fill_cache(self, pages: int) -> None:
        """Run requests that leave their prompts in the cache, until memory is full."""
        length = 2 * PAGE_SIZE
        later = self._num_to_arrive
        for i in range(pages * PAGE_SIZE // length):
            self.scheduler.handle(Frontend(0), as_received(self._request_of(length, 1)), 0.0)
            if i % 64 == 0:
                self._num_to_arrive = 0
                self._step()
        while self._plans:
            self._num_to_arrive = 0
            self._step()
        self._num_to_arrive = later


def generate(rid: int, prompt: NDArray[np.int32], sampling: SamplingSpec) -> GenerateRequest:
    return GenerateRequest(rid, str(rid), prompt, int32_array([0]), [int32_array()], sampling, LogprobSpec(), rid)


def as_received(request: GenerateRequest) -> RequestView:
    """As the scheduler's link decodes it."""
    message = decode_view(encode(request, 1, 0)).message
    assert isinstance(message, RequestView)
    return message


def answer(plan: StepPlan, rng: np.random.Generator) -> bytes:
    """The result of a worker that draws any token."""
    (section,) = plan.sections
    count = int(section.extend_samples.sum()) + len(section.decode_slots)
    ids = rng.integers(0, VOCAB, count, np.int32)
    return encode(StepResult(plan.step, np.ones(count, np.int32), ids, 0, [], 0), 1, 0)


def messages_of(effects: list[Effect], kind: type[M]) -> list[M]:
    return [e.message for e in effects if isinstance(e, (ToWorkers, ToFrontend)) and isinstance(e.message, kind)]
