"""A scheduler and a worker's runner in one thread: real plans, on a real model, without processes and sockets."""

from __future__ import annotations

from collections import deque

from srt.managers.scheduler.core import SchedulerCore
from srt.managers.scheduler.effects import Effect, Frontend, ToFrontend, ToWorkers, Worker
from srt.managers.scheduler.scheduler import Scheduler
from srt.managers.tp_worker.process import hello_of
from srt.model_executor.model_runner import ModelRunner
from srt.protocol.codec import decode, encode, protocol_hash
from srt.protocol.messages import (
    AckBatch,
    FrontendHello,
    GenerateRequest,
    LogprobSpec,
    SamplingSpec,
    StepPlan,
    StepResult,
    TokenBatch,
    int32_array,
)
from srt.server_args import ServerArgs
from tests.support.wire import request_at_scheduler


class WholeEngine:
    """Runs requests to their end. A plan is executed when it is made, and its result is heard when the window of plans is full."""

    def __init__(self, args: ServerArgs, runner: ModelRunner) -> None:
        self._runner = runner
        self._scheduler = Scheduler(args, protocol_hash())
        self._scheduler.handle(Worker(0), hello_of(0, args.page_size, runner), 0.0)
        self._scheduler.handle(Frontend(0), FrontendHello(0, protocol_hash()), 0.0)
        self._results: deque[StepResult] = deque()
        self._outputs: list[list[int]] = []
        self._now = 0.0

    @property
    def core(self) -> SchedulerCore:
        assert self._scheduler._core is not None
        return self._scheduler._core

    def run(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """Return the `count` greedy tokens that follow each prompt."""
        first = len(self._outputs)
        for prompt in prompts:
            request = GenerateRequest(
                rid=len(self._outputs),
                label=f"request {len(self._outputs)}",
                prompt_ids=int32_array(prompt),
                choices=int32_array([0]),
                output_ids=[int32_array()],
                sampling=SamplingSpec(count, temperature=0.0),
                logprobs=LogprobSpec(),
                seed=1,
            )
            self._outputs.append([])
            self._apply(self._scheduler.handle(Frontend(0), request_at_scheduler(request), self._now))
        while any(len(outputs) < count for outputs in self._outputs[first:]):
            self._now += 0.01
            self._apply(self._scheduler.tick(self._now))
            self._scheduler.check()
            assert self.core.memory.tables_hash() == self._runner.inspect()["tables_hash"]
            if self._results:
                self._apply(self._scheduler.handle(Worker(0), self._results.popleft(), self._now))
        return self._outputs[first:]

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ToWorkers) and isinstance(effect.message, StepPlan):
                self._execute(effect.message)
            elif isinstance(effect, ToFrontend) and isinstance(effect.message, TokenBatch):
                self._receive(effect.message)

    def _execute(self, plan: StepPlan) -> None:
        received = decode(encode(plan, 0, 0)).message
        assert isinstance(received, StepPlan)
        rows = self._runner.sample(self._runner.execute(received.sections[0])).result()
        self._results.append(StepResult(plan.step, rows.counts, rows.ids, 0, rows.logprobs, 1000))

    def _receive(self, batch: TokenBatch) -> None:
        ids = batch.ids.tolist()
        for rid, count in zip(batch.rids.tolist(), batch.counts.tolist(), strict=True):
            self._outputs[rid] += ids[:count]
            del ids[:count]
        assert all(done.reason == "length" for done in batch.done), batch.done
        self._apply(self._scheduler.handle(Frontend(0), AckBatch(batch.number), self._now))
