"""The scheduler's part of a trace: waiting and running requests, plans, results, and sent tokens."""

from __future__ import annotations

import time
from collections.abc import Callable

from srt.managers.process.runtime_switches import ControlWords
from srt.managers.process.tracer import BATCH, REQUEST, STATE, STEP, Tracer, batch_number, request_number
from srt.managers.scheduler.request import Request
from srt.mem_cache.radix_cache import ITEM
from srt.protocol.messages import Abort, PlanSection, StepPlan, StepResult, TokenBatch
from srt.protocol.views import RequestView

MAX_NAMES = 32  # names of decoding requests on one step


class SchedulerTrace:
    """Records the scheduler's events. Callers check `is_on` first, except for `answered`. `request_in` finds the request in a slot."""

    def __init__(self, tracer: Tracer, control: ControlWords, request_in: Callable[[int], Request]) -> None:
        self._tracer = tracer
        self._control = control
        self._request_in = request_in
        self._open: dict[int, str] = {}  # by request number: its state in the trace `_number`
        self._number = 0
        self._planning_since_s = 0.0

    @property
    def is_on(self) -> bool:
        return self._tracer.is_on

    def heard(self, frontend: int, message: RequestView | Abort, began_s: float) -> None:
        if self._number != self._control.trace:
            self._number = self._control.trace
            self._open.clear()
        number = request_number(frontend, message.rid)
        if isinstance(message, Abort):
            if message.choice <= 0:  # all choices, or choice 0, whose states are shown
                self._tracer.slice("abort", began_s)
                self._leave(number, began_s, reason="abort")
            return
        self._tracer.slice("receive", began_s, request=message.label, prompt_tokens=len(message.prompt_ids) // ITEM)
        self._tracer.arrow("t", REQUEST, number, began_s)
        self._enter(number, "waiting", began_s)

    def watch_tick(self, began_s: float) -> Callable[[StepPlan], None]:
        """Return a function to call with each plan of the tick that begins now, before the next plan, which may preempt its requests."""
        self._planning_since_s = began_s
        return self._planned

    def _planned(self, plan: StepPlan) -> None:
        began_s, self._planning_since_s = self._planning_since_s, time.monotonic()
        self._plan(plan, began_s, self._planning_since_s)

    def answered(self, result: StepResult, began_s: float) -> None:
        """Record a result. Called for every step, because a recording may begin after a number of steps."""
        if self.is_on:
            self._tracer.slice("result", began_s, step=result.step, num_tokens=len(result.ids), step_us=result.step_us)
            self._tracer.arrow("f", STEP, result.step, began_s)
        self._control.count_step()

    def sent(self, frontend: int, batch: TokenBatch, began_s: float) -> None:
        self._tracer.slice("send tokens", began_s, frontend=frontend, batch=batch.number, num_tokens=len(batch.ids))
        self._tracer.arrow("s", BATCH, batch_number(frontend, batch.number), began_s)
        for done in batch.done:
            if done.choice == 0:
                self._leave(request_number(frontend, done.rid), began_s, reason=done.reason)

    def _plan(self, plan: StepPlan, began_s: float, ended_s: float) -> None:
        section = plan.sections[0]
        prompts = [
            {"request": self._request_in(slot).label, "start": start, "count": count}
            for slot, start, count in zip(
                section.extend_slots.tolist(),
                section.extend_starts.tolist(),
                section.extend_counts.tolist(),
                strict=True,
            )
        ]
        decoding = [self._request_in(slot).label for slot in section.decode_slots[:MAX_NAMES].tolist()]
        self._tracer.slice(
            "plan",
            began_s,
            ended_s,
            step=plan.step,
            prompts=prompts,
            num_decodes=len(section.decode_slots),
            decoding=decoding,
        )
        self._tracer.arrow("s", STEP, plan.step, began_s)
        self._trace_requests(section, began_s)

    def _trace_requests(self, section: PlanSection, at_s: float) -> None:
        admitted = {admission.slot: admission for admission in section.admissions}
        for slot in section.extend_slots.tolist():
            request = self._request_in(slot)
            number = request_number(request.frontend, request.rid)
            self._tracer.arrow("t", REQUEST, number, at_s)
            if slot in admitted and request.choice == 0 and not request.progress.num_preempted:
                self._enter(number, "running", at_s, cached_tokens=admitted[slot].cached)

    def _enter(self, number: int, state: str, at_s: float, **args: object) -> None:
        self._leave(number, at_s)
        self._open[number] = state
        self._tracer.begin(STATE, number, state, at_s, **args)

    def _leave(self, number: int, at_s: float, **args: object) -> None:
        state = self._open.pop(number, None)
        if state is not None:
            self._tracer.end(STATE, number, state, at_s, **args)
