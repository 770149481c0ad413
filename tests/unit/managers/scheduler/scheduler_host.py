"""Drives a Scheduler by hand, message for message, with a fake worker that answers when it is told to."""

from __future__ import annotations

from collections import deque
from typing import Any, TypeVar

from msgspec.structs import replace

from srt.managers.scheduler.effects import Effect, Fatal, Frontend, HandshakeDone, Record, ToFrontend, ToWorkers, Worker
from srt.managers.scheduler.scheduler import Scheduler
from srt.protocol import messages
from srt.protocol.codec import decode, encode
from srt.protocol.engine_work import EngineLedger
from srt.protocol.messages import (
    AckBatch,
    ContinueGeneration,
    ControlReply,
    FromFrontend,
    FromWorker,
    FrontendHello,
    GenerateRequest,
    GetState,
    LogprobSpec,
    PlanSection,
    RequestDone,
    SamplingSpec,
    Scalar,
    SchedulerHello,
    StepAck,
    StepPlan,
    TokenBatch,
    WorkerHello,
    WorkPlan,
    int32_array,
)
from srt.server_args import ServerArgs
from tests.support.simple_reference import answer
from tests.support.simple_worker import FakeWorker
from tests.support.wire import at_scheduler

PROTOCOL = "p1"
VOCAB = 100
M = TypeVar("M")


def worker_hello(rank: int = 0, **changes: Any) -> WorkerHello:
    hello = WorkerHello(rank, PROTOCOL, "c1", "float32", 4, 64, 4, 200, VOCAB)
    return replace(hello, **changes)


def request(rid: int, prompt: list[int], max_new: int = 4, **changes: Any) -> GenerateRequest:
    """A request with one choice and no stop ids, unless said otherwise."""
    choices = changes.pop("choices", [0])
    outputs = changes.pop("outputs", [[] for _ in choices])
    sampling = SamplingSpec(max_new, stop_ids=int32_array(changes.pop("stop_ids", [])))
    made = GenerateRequest(
        rid=rid,
        label=f"r{rid}",
        prompt_ids=int32_array(prompt),
        choices=int32_array(choices),
        output_ids=[int32_array(ids) for ids in outputs],
        sampling=sampling,
        logprobs=LogprobSpec(),
        seed=rid,
    )
    return replace(made, **changes)


def expected_ids(made: GenerateRequest) -> list[int]:
    """What choice 0 of this request is answered."""
    return answer(made.prompt_ids.tolist(), made.sampling, made.seed, VOCAB, breaks_down=False).ids


class Host:
    """Everything a frontend was sent is in `inbox[frontend]`; plans wait in `plans` until `answer` executes the first."""

    def __init__(
        self,
        tp_size: int = 1,
        hello: WorkerHello | None = None,
        greet: bool = True,
        ledger: EngineLedger | None = None,
        **options: Any,
    ) -> None:
        self.hello = hello or worker_hello()
        self.scheduler = Scheduler(ServerArgs(model_path="m", tp_size=tp_size, **options), PROTOCOL, ledger)
        self.worker = FakeWorker(
            self.hello.num_slots, self.hello.num_pages, self.hello.page_size, VOCAB, breaks_down=False
        )
        self.inbox: dict[int, list[messages.ToFrontend]] = {}
        self.plans: deque[StepPlan | WorkPlan] = deque()
        self.all_plans: list[PlanSection] = []
        self.fatal: str | None = None
        self.ledger = ledger
        self.facts: dict[str, Scalar] = {}
        self.now = 0.0
        self.tp_size = tp_size
        if greet:
            self.be_ready()
            self.say(FrontendHello(0, PROTOCOL))

    def be_ready(self) -> None:
        for rank in range(self.tp_size):
            self.from_worker(replace(self.hello, rank=rank), rank)

    def say(self, message: FromFrontend, frontend: int = 0) -> None:
        self._apply(self.scheduler.handle(Frontend(frontend), at_scheduler(message), self.now))

    def from_worker(self, message: FromWorker, rank: int = 0) -> None:
        self._apply(self.scheduler.handle(Worker(rank), message, self.now))

    def tick(self) -> None:
        self._apply(self.scheduler.tick(self.now))
        self.scheduler.check()

    def answer(self, wants_capture: bool = False) -> None:
        """Execute the oldest plan and deliver what every rank says of it."""
        work = self.plans.popleft()
        if isinstance(work, WorkPlan):
            done = self.worker.do(work)
            for rank in range(self.tp_size):
                self.from_worker(replace(done, rank=rank), rank)
            return
        result = replace(self.worker.execute(work), wants_capture=wants_capture)
        self.from_worker(result)
        for rank in range(1, self.tp_size):
            self.from_worker(StepAck(result.step, rank, result.ids_hash, 0), rank)

    def run(self, acknowledge: bool = True) -> None:
        """Until nothing is left to do."""
        self.tick()
        while self.plans:
            self.answer()
            self.tick()
            if acknowledge:
                self.acknowledge()
                self.tick()

    def end(self) -> None:
        """The scheduler says its last words."""
        self._apply(self.scheduler.last_words())

    def continue_generation(self, call: int) -> None:
        self.say(ContinueGeneration(call))

    def acknowledge(self, frontend: int = 0) -> None:
        batches = self.batches(frontend)
        if batches:
            self.say(AckBatch(batches[-1].number), frontend)

    def batches(self, frontend: int = 0) -> list[TokenBatch]:
        return self.of_type(TokenBatch, frontend)

    def of_type(self, kind: type[M], frontend: int = 0) -> list[M]:
        return [message for message in self.inbox.get(frontend, []) if isinstance(message, kind)]

    def ids(self, rid: int, choice: int = 0, frontend: int = 0) -> list[int]:
        """The tokens that have come, in the order of the batches."""
        found: list[int] = []
        for batch in self.batches(frontend):
            start = 0
            for i, count in enumerate(batch.counts.tolist()):
                if (batch.rids[i], batch.choices[i]) == (rid, choice):
                    found += batch.ids[start : start + count].tolist()
                start += count
        return found

    def ends(self, frontend: int = 0) -> dict[tuple[int, int], RequestDone]:
        ends = [done for batch in self.batches(frontend) for done in batch.done]
        assert len({(done.rid, done.choice) for done in ends}) == len(ends), "a choice ended twice"
        return {(done.rid, done.choice): done for done in ends}

    def state(self, deep: bool = False) -> ControlReply:
        self.say(GetState(999, deep))
        if deep:
            self.run()
        return self.of_type(ControlReply)[-1]

    def value(self, name: str) -> Scalar:
        return self.state().values[name]

    @property
    def greeting(self) -> SchedulerHello:
        return self.of_type(SchedulerHello)[0]

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case ToFrontend(frontend, message):
                    self.inbox.setdefault(frontend, []).append(message)
                case ToWorkers(sent):
                    work = decode(encode(sent, 0, 0)).message
                    assert isinstance(work, StepPlan | WorkPlan)
                    self.plans.append(work)
                    if isinstance(work, StepPlan):
                        self.all_plans.append(work.sections[0])
                case HandshakeDone(values):
                    self.facts = values
                case Record(ledger):
                    self.ledger = ledger
                case Fatal(reason):
                    self.fatal = reason
