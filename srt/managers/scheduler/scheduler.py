"""The scheduler of one engine, as a state machine: messages in, effects out. No clock, no sockets, no randomness.

    effects = scheduler.handle(source, message, now)      for every message that has arrived
    effects = scheduler.tick(now)                         when there are no more: plans steps, sends what is due

The life of a request: waiting (WaitingQueue) -> running in a slot (Planner, SlotTable) -> ended (Outbox). It is forgotten when its
frontend has acknowledged the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from srt.managers.scheduler.clients import Client, Labels
from srt.managers.scheduler.core import SchedulerCore
from srt.managers.scheduler.deadlines import Deadlines
from srt.managers.scheduler.effects import Effect, Fatal, Frontend, HandshakeDone, Source, ToFrontend, ToWorkers
from srt.managers.scheduler.engine_changes import EngineChanges
from srt.managers.scheduler.outbox import end_of
from srt.managers.scheduler.request import Request, Status, expand, id_at
from srt.managers.scheduler.results import is_stop
from srt.managers.scheduler.retry_after import EndRate
from srt.managers.scheduler.worker_stream import BrokenReplica, EngineChange, Handshake, Inspection
from srt.protocol.engine_work import CaptureGraph, EngineLedger, InspectTables, SetWeightVersion, UpdateWeights
from srt.protocol.messages import (
    Abort,
    AbortLabel,
    AckBatch,
    AskRange,
    ContinueGeneration,
    ControlReply,
    FlushCache,
    FromWorker,
    FrontendHello,
    GetState,
    Load,
    Message,
    PauseGeneration,
    PinResources,
    Prepared,
    Refused,
    Rejected,
    Scalar,
    StepAck,
    StepPlan,
    StepResult,
    WorkDone,
    WorkerFault,
    WorkerHello,
    WorkPlan,
)
from srt.protocol.views import FROM_FRONTEND, FromFrontendView, RequestView
from srt.server_args import ServerArgs

LOAD_INTERVAL_S = 0.2
# Idle workers capture graphs, but no sooner than this:
CAPTURE_AFTER_S = 0.5  # after their hello, so that the first token waits for no graph
CAPTURE_REST_S = 0.1  # after a step, for clients that ask again at once; or after a try that lacked kernels
PAUSE_MODES = ("abort", "retract", "in_place")
_FROM_WORKER = (WorkerHello, StepResult, StepAck, WorkDone, Prepared, WorkerFault)


class Scheduler:
    """Decides everything about the requests of an engine."""

    def __init__(self, args: ServerArgs, protocol_hash: str, ledger: EngineLedger | None = None) -> None:
        """`ledger` is what the schedulers before this one were told."""
        self._args = args
        self._protocol_hash = protocol_hash
        self._handshake = Handshake(args.num_ranks, protocol_hash)
        self._core: SchedulerCore | None = None
        self._clients: dict[int, Client] = {}
        self._labels = Labels()
        self._early: list[tuple[int, FromFrontendView]] = []  # messages from before the workers were ready
        self._arrived: list[Request] = []  # since the last tick: their ids are not checked yet
        self._next_serial = 1
        self._is_draining = False
        self._changes = EngineChanges(ledger or EngineLedger())
        self._pauses = self._changes.pauses
        self._now = 0.0
        self._end_rate = EndRate()
        self._asked_deep: list[tuple[Client, int]] = []  # clients and calls of GetState with `deep`
        self._last_load: tuple[float, Load] | None = None
        self._capture_from_s = 0.0  # idle workers capture graphs from this time on
        self._compiling_until_s = 0.0  # the next graph lacked kernels: no capture before this
        self._deadlines = Deadlines(args.request_waiting_timeout, args.request_running_timeout)

    # ---- For the host process

    @property
    def is_ready(self) -> bool:
        return self._core is not None

    @property
    def is_drained(self) -> bool:
        """True if nothing waits or runs, no step is in flight, and all ends were sent to their frontends."""
        if self._core is None:
            return not self._early
        return self._core.is_idle and all(client.outbox.is_sent for client in self._clients.values())

    @property
    def next_tick_s(self) -> float | None:
        """Time at which `tick` has work even if no message comes; None if only a message brings work."""
        if self._core is None:
            return None
        times: list[float | None] = []
        if self._deadlines.are_set:
            times.append(self._deadlines.next_s(self._core.planner.started()))
        if self._core.stream.can_capture and self._has_nothing_to_do(self._core):
            times.append(self._capture_from_s)
        times.append(self._core.resources.next_overdue_s())
        if self._last_load is not None and self._clients:
            reported_at, reported = self._last_load
            times.append(None if reported == self._core.load() else reported_at + LOAD_INTERVAL_S)
        return min((at for at in times if at is not None), default=None)

    def counters(self) -> dict[str, Scalar] | None:
        """Return all counters; None before the workers are ready."""
        return None if self._core is None else self._core.state()

    def request_in(self, slot: int) -> Request:
        """Return the request that runs in a slot which the latest plan has used."""
        assert self._core is not None, "there are no slots yet"
        return self._core.planner.request_in(slot)

    def handle(self, source: Source, message: Message | RequestView, now: float) -> list[Effect]:
        """Apply one message and return the answers that it asks for. Its other consequences come with the next `tick`."""
        self._now = now
        if isinstance(source, Frontend):
            if not isinstance(message, RequestView) and not isinstance(message, FROM_FRONTEND):
                rejected = Rejected(f"A frontend may not send {type(message).__name__} to a scheduler.")
                return [ToFrontend(source.number, rejected)]
            return self._from_frontend(source.number, message, now)
        rank = source.rank
        if not isinstance(message, _FROM_WORKER):
            return [Fatal(f"Worker {rank} sent {type(message).__name__}, which a worker may not send to a scheduler.")]
        try:
            return self._from_worker(rank, message, now)
        except BrokenReplica as error:
            return [Fatal(str(error))]

    def tick(self, now: float, watch: Callable[[StepPlan], None] | None = None) -> list[Effect]:
        """Plan steps until the window is full, then send the frontends what is new.

        `watch` is called with each plan while `request_in` still finds the plan's requests.
        """
        self._now = now
        if self._core is None:
            return []
        effects = self._changes.record(self._clients)
        effects += self._refuse_unknown_ids(self._core)
        if self._deadlines.are_set:
            self._end_overdue(self._core, now)
        effects += self._prepare(self._core, now)
        effects += self._plan(self._core, now, watch)
        effects += self._send_batches(self._core)
        effects += self._report_load(self._core, now)
        return effects

    def frontend_gone(self, number: int) -> None:
        """Forget a frontend that is gone. Its requests are aborted without a message."""
        client = self._clients.pop(number, None)
        self._pauses.end_of(number)
        self._early = [(frontend, message) for frontend, message in self._early if frontend != number]
        if client is not None:
            for request in client.all_requests():
                self._abort(request, notify=False)

    def last_words(self) -> list[Effect]:
        """Return the last messages of an engine that ends early: unsent tokens and ends, and the requests that were in unanswered steps."""
        core = self._core
        return [] if core is None else self._send_batches(core, is_last=True) + core.last_words(self._clients)

    def drain(self) -> None:
        """Accept no new requests from now on, but finish the present ones; without memory they cannot go on, and end."""
        self._pauses.end_all()
        self._is_draining = True
        if self._changes.lends_memory:
            self.abort_all()

    def abort_all(self) -> int:
        """Abort all requests that have not ended, and return the number of choices aborted."""
        return self._abort_live([request for client in self._clients.values() for request in client.all_requests()])

    def break_off(self) -> list[Effect]:
        """Abort everything at once, and tell all frontends all ends, however many batches they have not acknowledged."""
        self.abort_all()
        return [] if self._core is None else self._send_batches(self._core, is_last=True)

    def check(self) -> None:
        """Raise AssertionError if the scheduler's state contradicts itself."""
        if (core := self._core) is None:
            return
        core.planner.check()
        requests = [request for client in self._clients.values() for request in client.all_requests()]
        waiting = [request for request in requests if request.progress.status is Status.WAITING]
        running = [request for request in requests if request.progress.status is Status.RUNNING]
        assert len(waiting) == core.planner.num_waiting, (
            f"{len(waiting)} requests wait, the planner counts {core.planner.num_waiting}"
        )
        core.resources.check([*waiting, *running])
        assert sorted(r.progress.slot for r in running) == core.slots.used_slots(), (
            "a slot is used for a request that is forgotten"
        )

    # ---- Frontends

    def _from_frontend(self, number: int, message: FromFrontendView, now: float) -> list[Effect]:
        if isinstance(message, FrontendHello):
            return self._welcome(number, message)
        client = self._clients.get(number)
        if client is None:
            return [ToFrontend(number, Rejected("The first message must be FrontendHello."))]
        if self._core is None:
            self._early.append((number, message))
            return []
        if isinstance(message, RequestView):
            return self._accept(self._core, client, message, now)
        match message:
            case Abort(rid, choice):
                self._abort_live([r for r in client.choices(rid) if choice in (-1, r.choice)])
                return []
            case AbortLabel(call, label):
                num_aborted = self._abort_live(self._labels.named(label)) if label else self.abort_all()
                # Requests with this label may be on their way from other frontends.
                others: list[Effect] = [ToFrontend(other, message) for other in self._clients if other != number]
                return [ToFrontend(number, ControlReply(call, True, "", {"num_aborted": num_aborted})), *others]
            case AckBatch(batch):
                for request in client.outbox.acknowledge(batch):
                    client.forget(request)
                return []
            case AskRange():
                return self._send_again(self._core, client, message)
            case FlushCache(call):
                return [ToFrontend(number, self._core.flush(call, is_paused=self._pauses.is_on))]
            case PauseGeneration(call, mode):
                return self._pause(self._core, client, call, mode)
            case ContinueGeneration(call):
                self._pauses.end_all()
                return [*self._changes.record(self._clients), ToFrontend(number, ControlReply(call, True, "", {}))]
            case UpdateWeights():
                return self._update_weights(self._core, client, message)
            case SetWeightVersion(call, version):
                return self._changes.rename_weights(client, call, version, self._clients)
            case PinResources():
                self._settle(self._core, self._core.resources.pin(message))
                return []
            case GetState(call, deep):
                if not deep:
                    return [ToFrontend(number, self._state(self._core, call, []))]
                self._asked_deep.append((client, call))
                return []
            case _:
                assert_never(message)

    def why_not(self, hello: FrontendHello) -> str:
        """Why whoever says this is no frontend of ours; empty if it is one."""
        if hello.protocol_hash == self._protocol_hash:
            return ""
        return (
            f"The frontend speaks protocol {hello.protocol_hash}, the scheduler {self._protocol_hash}:"
            " both must come from the same installation."
        )

    def _welcome(self, number: int, hello: FrontendHello) -> list[Effect]:
        reason = self.why_not(hello)
        if reason:
            return [ToFrontend(number, Rejected(reason))]
        if number in self._clients:
            self.frontend_gone(number)
        client = self._clients[number] = Client(number, hello.process)
        self._pauses.meet(client)
        self._last_load = None  # the greeting tells this one the load, the next tick tells all
        return [] if self._core is None else self._core.greeting(number, self._changes.weight_version)

    def _accept(self, core: SchedulerCore, client: Client, message: RequestView, now: float) -> list[Effect]:
        if client.knows(message.rid):
            return [ToFrontend(client.number, Rejected(f"Request {message.rid} exists already."))]
        requests = expand(client.number, message, self._next_serial, now)
        refusal = self._reason_to_refuse(core, message, requests)
        if refusal is not None:
            core.counters.num_refused += 1
            retry_after_s = self._retry_after_s(core) if refusal[0] == 429 else 0
            return [ToFrontend(client.number, Refused(message.rid, *refusal, retry_after_s))]
        self._next_serial += len(requests)
        client.enter(requests)
        self._labels.enter(requests)
        self._arrived += requests
        for request in requests:
            core.planner.add(request, is_ready=core.resources.enter(request))
            self._deadlines.add(request)
            if request.progress.outputs:
                self._end_if_complete(request)
        return []

    def _reason_to_refuse(
        self, core: SchedulerCore, message: RequestView, requests: list[Request]
    ) -> tuple[int, str] | None:
        """Return the status and sentence of a refusal, or None to accept the request. core.py has the limits, also that of the queue."""
        if not message.resumed and (refusal := self._changes.why_refused(is_draining=self._is_draining)):
            return 503, refusal
        if self._labels.is_taken(message.label) and not message.resumed:
            return 400, f"A request with the id {message.label!r} is running or waiting already. Use another id."
        return core.reason_to_refuse(message, requests)

    def _refuse_unknown_ids(self, core: SchedulerCore) -> list[Effect]:
        """Refuse requests with unknown ids, of those since the last tick. They are checked together, and singly only if any is unknown."""
        arrived, self._arrived = self._arrived, []
        ids = b"".join([request.progress.id_bytes for request in arrived])
        if not arrived or core.reason_to_refuse_ids(ids) is None:
            return []
        effects: list[Effect] = []
        for request in arrived:
            reason = core.reason_to_refuse_ids(request.progress.id_bytes)
            client = self._clients.get(request.frontend)
            # An ended one was aborted meanwhile, and is reported as that, or was refused with another choice.
            if reason is None or client is None or request.progress.status is Status.ENDED:
                continue
            effects.append(ToFrontend(client.number, Refused(request.rid, 400, reason)))
            core.counters.num_refused += 1
            for choice in client.choices(request.rid):
                if choice.progress.status is not Status.ENDED:
                    self._end(choice, "error", notify=False)
                    client.forget(choice)
        return effects

    def _retry_after_s(self, core: SchedulerCore) -> int:
        return self._end_rate.retry_after_s(core.planner.num_waiting, self._now)

    def _end_if_complete(self, request: Request) -> None:
        """End a resumed request that has all its tokens already: only the message about its end was lost."""
        count = request.progress.num_output
        if count and is_stop(request, last := id_at(request.progress.outputs, count - 1)):
            self._end(request, "stop", matched=last)
        elif count >= request.max_new:
            self._end(request, "length")

    def _send_again(self, core: SchedulerCore, client: Client, ask: AskRange) -> list[Effect]:
        request = client.find(ask.rid, ask.choice)
        if request is None:
            return []  # it was aborted, or its end acknowledged, while the message travelled
        client.outbox.send_again(core.slots, request, max(ask.first, 0))
        return []

    # ---- The end of a request

    def _end(
        self,
        request: Request,
        reason: str,
        matched: int = -1,
        status: int = 0,
        message: str = "",
        *,
        notify: bool = True,
    ) -> None:
        """End a choice: it leaves the planner, and its frontend is told. No choice ends elsewhere. After a 500 its prefix is dropped."""
        assert self._core is not None
        self._core.planner.end(request, keep_prefix=status != 500)
        self._core.resources.leave(request)
        self._labels.leave(request)
        if not request.urgent:
            self._end_rate.record_end(self._now)
        if not notify:
            return
        retry_after_s = self._retry_after_s(self._core) if status == 503 else 0
        started_s = request.progress.started_s
        done = end_of(
            request,
            (reason, matched, status, message, retry_after_s),
            queue_s=-1.0 if started_s is None else started_s - request.arrived_s,
            weight_version=self._changes.weight_version,
        )
        self._clients[request.frontend].outbox.add_end(request, done)

    def _abort_live(self, requests: list[Request]) -> int:
        live = [request for request in requests if request.progress.status is not Status.ENDED]
        for request in live:
            self._abort(request, notify=True)
        return len(live)

    def _abort(self, request: Request, *, notify: bool) -> None:
        """Abort a request: no plan made after this contains it. A request that has ended stays as it ended."""
        if request.progress.status is Status.ENDED:
            return
        assert self._core is not None
        counters = self._core.counters
        counters.num_aborted += 1
        if request.progress.status is Status.WAITING:
            counters.num_aborted_waiting += 1
        elif request.progress.prompt_done:
            counters.num_aborted_decode += 1
        else:
            counters.num_aborted_prefill += 1
        self._end(request, "abort", notify=notify)

    # ---- Workers

    def _from_worker(self, rank: int, message: FromWorker, now: float) -> list[Effect]:
        if isinstance(message, WorkerHello):
            return self._handle_hello(message, now)
        if isinstance(message, WorkerFault):
            raise BrokenReplica(f"Worker {message.rank} failed at step {message.step}: {message.message}")
        core = self._core
        if core is None:
            raise BrokenReplica(f"Worker {rank} sent {type(message).__name__} before all workers were ready.")
        match message:
            case StepResult():
                self._handle_result(core, rank, message)
            case StepAck():
                core.stream.accept_ack(rank, message)
            case WorkDone():
                return self._handle_work(core, rank, message)
            case Prepared():
                self._settle(core, core.resources.answered(rank, message))
            case _:
                assert_never(message)
        return []

    def _handle_hello(self, hello: WorkerHello, now: float) -> list[Effect]:
        agreed = self._handshake.accept(hello)
        if agreed is None:
            return []
        core = self._core = SchedulerCore(self._args, agreed)
        self._capture_from_s = now + CAPTURE_AFTER_S
        effects: list[Effect] = [HandshakeDone(core.facts())]
        for number in self._clients:
            effects += core.greeting(number, self._changes.weight_version)
        early, self._early = self._early, []
        for number, message in early:
            effects += self._from_frontend(number, message, now)
        return effects

    def _handle_result(self, core: SchedulerCore, rank: int, result: StepResult) -> None:
        planned = core.stream.accept_result(rank, result)
        self._capture_from_s = self._now + CAPTURE_REST_S
        outcome = core.results.apply(planned, result)
        for request, logprobs in outcome.logged:
            self._clients[request.frontend].outbox.add_logs(request, logprobs)
        for end in outcome.ends:
            if end.reason == "error":
                core.counters.num_failed += 1
            else:
                core.counters.num_finished += 1
            self._end(end.request, end.reason, end.matched, end.status, end.message)
        for request in outcome.late:
            self._clients[request.frontend].outbox.add_waiting(request)
        core.planner.note_answered(planned, len(result.ids), result.step_us)

    def _settle(self, core: SchedulerCore, requests: list[Request]) -> None:
        """Let these wait in the queue from now on, or end them, if their resource is not there."""
        for request in requests:
            failure = core.resources.failure(request)
            if failure is None:
                core.planner.make_ready(request)
            else:
                core.counters.num_failed += 1
                self._end(request, "error", status=failure[0], message=failure[1])

    # ---- Parts of a tick

    def _end_overdue(self, core: SchedulerCore, now: float) -> None:
        for request, reason in list(self._deadlines.overdue(core.planner.started(), now)):
            core.counters.num_timed_out += 1
            self._end(request, "error", status=503 if request.progress.started_s is None else 504, message=reason)

    def _prepare(self, core: SchedulerCore, now: float) -> list[Effect]:
        """Say to the workers what they are to prepare and to release, and end requests that have waited for too long for that."""
        self._settle(core, core.resources.overdue(now))
        return [ToWorkers(message) for message in core.resources.pop_messages(now)]

    def _plan(self, core: SchedulerCore, now: float, watch: Callable[[StepPlan], None] | None) -> list[Effect]:
        effects: list[Effect] = []
        while core.stream.num_in_flight < core.window and not self._changes.keeps_steps_back:
            if core.planner.trials.are_some_left and not core.stream.is_empty:
                break
            planned = core.planner.plan(core.stream.next_step, now)
            if planned is None:
                break
            core.stream.submit(planned)
            effects.append(ToWorkers(planned.plan))
            if watch is not None:
                watch(planned.plan)
        for request in core.planner.preempted.pop_new():
            self._clients[request.frontend].outbox.add_waiting(request)
        if self._pauses.are_asked_for and (core.stream.num_in_flight == 0 or not self._pauses.is_on):
            effects += self._answer_pauses()
        effects += self._changes.next_work(core)
        for client, call in self._asked_deep:
            if not self._is_here(client):
                continue
            effects.append(ToWorkers(WorkPlan(core.stream.next_step, InspectTables())))
            core.stream.submit_inspection(Inspection(client, call, core.memory.tables_hash()))
        self._asked_deep.clear()
        if now >= self._compiling_until_s and self._may_capture(core, now):
            effects.append(ToWorkers(WorkPlan(core.stream.next_step, CaptureGraph())))
            core.stream.submit_capture()
        return effects

    def _may_capture(self, core: SchedulerCore, now: float) -> bool:
        """Return whether a capture pays, or would delay no request now but one that arrives during it."""
        is_good = core.stream.wants_capture or (now >= self._capture_from_s and self._has_nothing_to_do(core))
        return is_good and core.stream.can_capture and not self._changes.lends_memory

    def _has_nothing_to_do(self, core: SchedulerCore) -> bool:
        is_idle = core.is_idle or (self._pauses.is_on and not core.stream.num_in_flight)
        return is_idle and not self._changes.lends_memory

    def _answer_pauses(self) -> list[Effect]:
        """Answer the calls to pause: no step is in flight, or generation was continued before that."""
        answers = self._pauses.pop_answers(self._is_draining)
        return [ToFrontend(client.number, reply) for client, reply in answers if self._is_here(client)]

    def _send_batches(self, core: SchedulerCore, *, is_last: bool = False) -> list[Effect]:
        slots = core.slots
        rows = (slots.num_output > slots.sent).nonzero()[0]
        effects: list[Effect] = []
        for number, client in self._clients.items():
            outbox = client.outbox
            if not outbox.is_open and not is_last:
                continue
            own = rows if len(self._clients) == 1 else rows[slots.frontend[rows] == number]
            if len(own) or outbox.has_more_than_tokens:
                effects.append(ToFrontend(number, outbox.make_batch(slots, own)))
        return effects

    def _report_load(self, core: SchedulerCore, now: float) -> list[Effect]:
        load = core.load()
        if self._last_load is not None:
            reported_at, reported = self._last_load
            if load == reported or now - reported_at < LOAD_INTERVAL_S:
                return []
        self._last_load = (now, load)
        return [ToFrontend(number, load) for number in self._clients]

    # ---- Control

    def _is_here(self, client: Client) -> bool:
        """Return whether this client is still connected. A new one with its number does not count: it numbers its calls anew."""
        return self._clients.get(client.number) is client

    def _pause(self, core: SchedulerCore, client: Client, call: int, mode: str) -> list[Effect]:
        number = client.number
        if mode not in PAUSE_MODES:
            return [ToFrontend(number, ControlReply(call, False, f"mode must be one of {', '.join(PAUSE_MODES)}.", {}))]
        if not self._is_draining:  # while draining, all requests must finish, so nothing is paused
            self._pauses.begin(client)
        if mode == "abort":
            self.abort_all()
        elif mode == "retract":
            core.planner.preempt_all()
        self._pauses.ask(client, call)
        return []

    def _update_weights(self, core: SchedulerCore, client: Client, asked: UpdateWeights) -> list[Effect]:
        refused = self._changes.ask_for_update(client, asked, is_draining=self._is_draining)
        if not refused and asked.aborts:
            self.abort_all()
        elif not (refused or self._changes.keeps_rows):
            core.planner.preempt_all()
        return refused

    def _handle_work(self, core: SchedulerCore, rank: int, done: WorkDone) -> list[Effect]:
        num_graphs = core.stream.num_graphs_left
        answered = core.stream.accept_done(rank, done)
        if done.values.get("num_left") == num_graphs:  # the workers are still compiling
            self._capture_from_s = self._compiling_until_s = self._now + CAPTURE_REST_S
        if isinstance(answered, EngineChange):
            return self._changes.finish(core, self._clients)
        return [] if answered is None else self._answer_inspection(core, answered)

    def _answer_inspection(self, core: SchedulerCore, inspection: Inspection) -> list[Effect]:
        if not self._is_here(inspection.client):
            return []
        findings = list(inspection.findings)
        try:
            self.check()
        except AssertionError as error:
            findings.append(f"the scheduler's state contradicts itself: {error}")
        reply = self._state(core, inspection.call, findings)
        reply.values.update(inspection.values)
        return [ToFrontend(inspection.client.number, reply)]

    def _state(self, core: SchedulerCore, call: int, findings: list[str]) -> ControlReply:
        values = core.state() | {"is_draining": self._is_draining, "is_paused": self._pauses.is_on}
        for number, client in self._clients.items():
            values[f"live_requests_of_frontend_{number}"] = client.num_known
            values[f"unacknowledged_batches_of_frontend_{number}"] = client.outbox.num_unacknowledged
        message = "; ".join(findings)
        return ControlReply(call, not findings, message[:1].upper() + message[1:], values)
