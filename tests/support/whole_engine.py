"""A scheduler and a worker's runner in one thread: real plans, on a real model, without processes and sockets."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from srt.managers.scheduler.core import SchedulerCore
from srt.managers.scheduler.effects import Effect, Frontend, ToFrontend, ToWorkers, Worker
from srt.managers.scheduler.scheduler import Scheduler
from srt.managers.tp_worker.process import hello_of
from srt.model_executor.model_runner import ModelRunner
from srt.model_executor.step.step_output import StepOutput
from srt.protocol.codec import decode, encode, protocol_hash
from srt.protocol.messages import (
    Abort,
    AckBatch,
    FrontendHello,
    GenerateRequest,
    LogprobSpec,
    RequestDone,
    SamplingSpec,
    StepPlan,
    StepResult,
    TokenBatch,
    TokenLogprobs,
    int32_array,
)
from srt.server_args import ServerArgs
from tests.support.wire import at_scheduler, request_at_scheduler


@dataclass
class Answer:
    """What came for one choice of a request."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    done: RequestDone | None = None
    cached: int = 0


class WholeEngine:
    """Runs requests to their end. A plan is executed when it is made, and its result is heard at once, or late: behind the next plan.

    Two plans may be made at once. Set `hears_all` to hear both results before the next plan.
    """

    def __init__(self, args: ServerArgs, runner: ModelRunner, hears_late: bool = False) -> None:
        self._hears_late = hears_late
        self.hears_all = False
        self._runner = runner
        self._scheduler = Scheduler(args, protocol_hash())
        self._scheduler.handle(Worker(0), hello_of(0, args.page_size, runner), 0.0)
        self._scheduler.handle(Frontend(0), FrontendHello(0, protocol_hash()), 0.0)
        self._results: deque[tuple[int, StepOutput]] = deque()
        self.answers: dict[tuple[int, int], Answer] = {}  # by rid and choice
        self._num_runs = 0
        self._now = 0.0

    @property
    def core(self) -> SchedulerCore:
        assert self._scheduler._core is not None
        return self._scheduler._core

    def run(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """Return the `count` greedy tokens that follow each prompt."""
        first = self._num_runs
        self._num_runs += len(prompts)
        for rid, prompt in enumerate(prompts, first):
            self.submit(
                GenerateRequest(
                    rid=rid,
                    label=f"request {rid}",
                    prompt_ids=int32_array(prompt),
                    choices=int32_array([0]),
                    output_ids=[int32_array()],
                    sampling=SamplingSpec(count, temperature=0.0),
                    logprobs=LogprobSpec(),
                    seed=1,
                )
            )
        self.finish()
        answers = [self.answers[rid, 0] for rid in range(first, self._num_runs)]
        assert all(answer.done is not None and answer.done.reason == "length" for answer in answers), answers
        return [answer.ids for answer in answers]

    def submit(self, request: GenerateRequest) -> None:
        for choice in request.choices.tolist():
            self.answers[request.rid, choice] = Answer()
        self._apply(self._scheduler.handle(Frontend(0), request_at_scheduler(request), self._now))

    def abort(self, rid: int) -> None:
        self._apply(self._scheduler.handle(Frontend(0), at_scheduler(Abort(rid, -1)), self._now))

    def finish(self) -> None:
        """Run until all requests have ended."""
        while any(answer.done is None for answer in self.answers.values()):
            self.step()

    def step(self) -> None:
        """Plan, execute, and hear one result, or all."""
        self._now += 0.01
        num_before = len(self._results)
        self._apply(self._scheduler.tick(self._now))
        self._scheduler.check()
        assert self.core.memory.tables_hash() == self._runner.inspect()["tables_hash"]
        is_ahead = self._hears_late and len(self._results) == 1 and not num_before
        for _ in range(len(self._results) if self.hears_all else int(bool(self._results) and not is_ahead)):
            step, output = self._results.popleft()
            rows = output.result()
            result = StepResult(step, rows.counts, rows.ids, 0, rows.logprobs, 1000)
            self._apply(self._scheduler.handle(Worker(0), result, self._now))

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ToWorkers) and isinstance(effect.message, StepPlan):
                self._execute(effect.message)
            elif isinstance(effect, ToFrontend) and isinstance(effect.message, TokenBatch):
                self._receive(effect.message)

    def _execute(self, plan: StepPlan) -> None:
        received = decode(encode(plan, 0, 0)).message
        assert isinstance(received, StepPlan)
        self._results.append((plan.step, self._runner.sample(self._runner.execute(received.sections[0]))))

    def _receive(self, batch: TokenBatch) -> None:
        ids = batch.ids.tolist()
        columns = (batch.rids, batch.choices, batch.first, batch.counts, batch.cached)
        for rid, choice, first, count, cached in zip(*(column.tolist() for column in columns), strict=True):
            answer = self.answers[rid, choice]
            assert first == len(answer.ids)
            answer.ids += ids[:count]
            answer.cached = cached
            del ids[:count]
        for logprobs in batch.logprobs:
            self.answers[logprobs.rid, logprobs.choice].logprobs.append(logprobs)
        for done in batch.done:
            self.answers[done.rid, done.choice].done = done
        self._apply(self._scheduler.handle(Frontend(0), AckBatch(batch.number), self._now))
