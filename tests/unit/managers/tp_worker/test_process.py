"""Worker processes as a scheduler and a supervisor see them: real processes, real sockets."""

from __future__ import annotations

import re
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

import pytest
import zmq
from msgspec.structs import replace

from srt.constrained.compiler import Grammar
from srt.constrained.constraint import Constraint
from srt.constrained.grammar import grammar_text
from srt.constrained.resource import resource_of
from srt.constrained.vocabulary import Vocabulary
from srt.managers.process.child_process import MODULES, ChildKey, ChildProcess, environment_of, spawn
from srt.managers.tp_worker.process import TpWorker
from srt.mem_cache.tables_hash import tables_hash
from srt.model_executor.step.step_output import SampledRows
from srt.protocol.engine_work import CaptureGraph, InspectTables, ResetTables
from srt.protocol.links import Received, RouterLink, worker_path
from srt.protocol.messages import (
    Admission,
    ChildStart,
    Failed,
    FromWorker,
    Heartbeat,
    LogprobSpec,
    Message,
    PageDelta,
    PlanSection,
    Prepare,
    Prepared,
    Progress,
    Ready,
    Release,
    Resource,
    SamplingSpec,
    StepAck,
    StepPlan,
    StepResult,
    Stop,
    ToWorker,
    WorkDone,
    WorkerFault,
    WorkerHello,
    WorkPlan,
    int32_array,
)
from srt.protocol.stream import MessageStream
from srt.protocol.views import RequestView
from srt.server_args import ServerArgs
from srt.utils.tokenizer import load_tokenizer
from tests.support.checkpoints import CheckpointFactory
from tests.support.oracle import Oracle
from tests.support.plan_driver import greedy, idle_section
from tests.support.server_process import ROOT

M = TypeVar("M")
TINY = ROOT / "srt" / "assets" / "models" / "tiny"
PATIENCE_MS = 120_000
EMPTY = int32_array()
NO_PAGES = PageDelta(EMPTY, EMPTY, EMPTY)


class Workers:
    """The ranks of one replica, with the scheduler's and the supervisor's end of their links."""

    def __init__(self, folder: Path, run_dir: str, num_ranks: int, **options: Any) -> None:
        self.ranks = range(num_ranks)
        args = ServerArgs(
            model_path=str(folder),
            device="cpu",
            tp_size=num_ranks,
            max_total_tokens=512,
            max_running_requests=8,
            **options,
        )
        environment = environment_of("worker", num_ranks, 8, 2)
        self.children: list[ChildProcess] = [
            spawn(ChildKey("worker", rank), MODULES["worker"], environment, None) for rank in self.ranks
        ]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = RouterLink(self._context, worker_path(run_dir, 1), 1)
        self._inbox: list[deque[Message | RequestView]] = [deque() for _ in self.ranks]
        self.streams = [MessageStream(child.socket, 1) for child in self.children]
        for rank, stream in enumerate(self.streams):
            stream.send(ChildStart("worker", rank, 1, run_dir, str(folder), 1, args))

    def send(self, message: ToWorker) -> None:
        for rank in self.ranks:
            self._router.send(f"w{rank}".encode(), message)

    def receive(self, rank: int, kind: type[M]) -> M:
        """The rank's next message to the scheduler."""
        while not self._inbox[rank]:
            assert self._router.socket.poll(PATIENCE_MS), f"worker {rank} says nothing"
            received = self._router.receive()
            assert isinstance(received, Received), received
            self._inbox[int(received.peer[1:])].append(received.message)
        message = self._inbox[rank].popleft()
        assert isinstance(message, kind), message
        return message

    def hear(self, rank: int, kind: type[M]) -> tuple[M, list[str]]:
        """What the supervisor is told next, heartbeats and progress apart; and the phases that led there."""
        phases: list[str] = []
        while True:
            message = self.streams[rank].receive_blocking()
            if isinstance(message, Progress):
                phases += [message.phase] if phases[-1:] != [message.phase] else []
            elif not isinstance(message, Heartbeat):
                assert isinstance(message, kind), message
                return message, phases

    def close(self) -> None:
        for child in self.children:
            child.popen.kill()
            child.popen.wait()
            child.socket.close()
        self._router.close()
        self._context.term()


@contextmanager
def workers(folder: Path, num_ranks: int, **options: Any) -> Iterator[Workers]:
    with tempfile.TemporaryDirectory() as run_dir:
        world = Workers(folder, run_dir, num_ranks, **options)
        try:
            yield world
        finally:
            world.close()


def prompt_section(slot: int, prompt: list[int], pages: list[int], sampling: SamplingSpec) -> PlanSection:
    admission = Admission(slot, int32_array(prompt), len(prompt), 0, 7, sampling, LogprobSpec())
    delta = PageDelta(int32_array([slot]), int32_array([len(pages)]), int32_array(pages))
    counts = int32_array([len(prompt)])
    return PlanSection([admission], [delta], int32_array([slot]), int32_array([0]), counts, int32_array([1]), EMPTY)


def decode_section(slots: list[int]) -> PlanSection:
    return PlanSection([], [NO_PAGES], EMPTY, EMPTY, EMPTY, EMPTY, int32_array(slots))


def test_two_ranks_serve_plans_report_their_tables_and_say_why_they_fail(checkpoint: CheckpointFactory) -> None:
    folder = checkpoint("qwen3")
    prompt = list(range(20, 45))
    expected = Oracle(folder).expect(prompt, greedy(4))
    with workers(folder, 2) as world:
        hellos = [world.receive(rank, WorkerHello) for rank in world.ranks]
        assert [hello.rank for hello in hellos] == [0, 1]
        assert len({(h.config_hash, h.protocol_hash, h.num_pages, h.page_size) for h in hellos}) == 1
        assert (hellos[0].num_pages, hellos[0].num_slots, hellos[0].max_request_tokens) == (32, 8, 512)
        for rank in world.ranks:
            ready, phases = world.hear(rank, Ready)
            assert ready.values["max_total_num_tokens"] == 512
            assert phases == ["imports", "communicator", "weights", "memory", "warm-up"]

        # All at once: the worker takes them in their order.
        sections = [idle_section(), prompt_section(3, prompt, [9, 4], greedy(9)), *[decode_section([3])] * 3]
        for step, section in enumerate(sections, 1):
            world.send(StepPlan(step, [section]))
        results = [world.receive(0, StepResult) for _ in sections]
        acks = [world.receive(1, StepAck) for _ in sections]
        assert [result.ids.tolist() for result in results] == [[], *[[token] for token in expected.ids]]
        assert [result.counts.tolist() for result in results] == [[], [1], [1], [1], [1]]
        assert [(r.step, r.ids_hash) for r in results] == [(a.step, a.ids_hash) for a in acks]
        assert len({result.ids_hash for result in results}) > 2

        world.send(WorkPlan(6, InspectTables()))
        world.send(WorkPlan(7, ResetTables()))
        world.send(WorkPlan(8, InspectTables()))
        for rank in world.ranks:
            found = [world.receive(rank, WorkDone).values for _ in range(3)]
            assert found[0].items() >= {"tables_hash": tables_hash({3: [9, 4]}), "num_slots_seen": 1}.items()
            assert found[2].items() >= {"tables_hash": tables_hash({}), "num_slots_seen": 0}.items()
            assert {"launch_us_p50", "launch_us_p99", "answer_us_p50", "answer_us_p99"} <= found[0].keys()

        world.send(StepPlan(9, [decode_section([3])]))  # the slot has no page any more
        for rank in world.ranks:
            fault = world.receive(rank, WorkerFault)
            assert (fault.rank, fault.step) == (rank, 9)
            assert fault.message.startswith(f"Worker {rank} failed in step 9: AssertionError: rows of")
            assert world.hear(rank, Failed)
            assert world.children[rank].popen.wait(60) == 1


def test_two_ranks_prepare_a_grammar_and_draw_what_it_allows() -> None:
    """A row that follows it draws beside one that draws as it would alone, while two steps are in flight."""
    tokenizer = load_tokenizer(TINY)
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size, [2])
    constraint = Constraint("regex", "[0-7]{12}")
    resource = resource_of(Grammar(constraint.key, grammar_text(constraint, vocabulary.special_ids)[0]))
    drawn: dict[bool, list[tuple[int, ...]]] = {}
    with workers(TINY, 2) as world:
        for rank in world.ranks:
            world.receive(rank, WorkerHello)
            world.hear(rank, Ready)
        world.send(Prepare(resource))
        world.send(Prepare(Resource("cellar", "other", b"")))
        for rank in world.ranks:
            answers = sorted((world.receive(rank, Prepared) for _ in range(2)), key=lambda answer: answer.reason)
            assert answers[0] == Prepared(resource.key)
            assert answers[1] == Prepared("other", "This server's workers cannot prepare a cellar.")
        step = 0
        for is_constrained in (False, True):
            free = prompt_section(1, [5, 6, 7], [1], SamplingSpec(20, temperature=1.0))
            ruled = prompt_section(3, [8, 9], [3], SamplingSpec(20, temperature=1.0, stop_ids=int32_array([2])))
            if is_constrained:
                ruled = replace(ruled, admissions=[replace(ruled.admissions[0], resource=resource.key)])
            sections = [free, ruled, *[decode_section([1, 3])] * 13]
            for section in sections:
                step += 1
                world.send(StepPlan(step, [section]))
            results = [world.receive(0, StepResult) for _ in sections]
            assert [world.receive(1, StepAck).ids_hash for _ in sections] == [result.ids_hash for result in results]
            drawn[is_constrained] = [tuple(result.ids.tolist()) for result in results]
            step += 1
            world.send(WorkPlan(step, ResetTables()))
            for rank in world.ranks:
                world.receive(rank, WorkDone)
        world.send(Release(resource.key))
    assert [ids[0] for ids in drawn[True][2:]] == [ids[0] for ids in drawn[False][2:]], "a neighbour draws otherwise"
    ids = [drawn[True][1][0], *[ids[1] for ids in drawn[True][2:]]]
    text = tokenizer.decode(ids[: ids.index(2)])
    assert re.fullmatch("[0-7]{12}", text), text
    assert not re.fullmatch("[0-7]+.*", tokenizer.decode([drawn[False][1][0], *[i[1] for i in drawn[False][2:]]]))


def test_a_worker_answers_what_it_was_sent_and_ends_when_it_is_told_to(checkpoint: CheckpointFactory) -> None:
    with workers(checkpoint("qwen3"), 1) as world:
        world.receive(0, WorkerHello)
        world.hear(0, Ready)
        world.send(StepPlan(1, [prompt_section(0, [1, 2, 3], [0], greedy(3))]))
        assert len(world.receive(0, StepResult).ids) == 1
        world.streams[0].send(Stop(1.0))
        assert world.children[0].popen.wait(60) == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"attention_backend": "triton"}, "--attention-backend triton needs"),
        ({"page_size": 1024}, "--max-total-tokens 512 is less than one KV page of 1024 tokens"),
    ],
)
def test_a_start_that_cannot_succeed_ends_with_one_sentence(
    checkpoint: CheckpointFactory, options: dict[str, Any], sentence: str
) -> None:
    with workers(checkpoint("qwen3"), 1, **options) as world:
        failed, _ = world.hear(0, Failed)
        assert failed.message.startswith(sentence)
        assert world.children[0].popen.wait(60) == 1


# ---- Order of work, without a process: a device that completes steps when the test says so


class LateOutput:
    must_be_awaited = False

    def __init__(self, log: list[str], name: str, ready: bool) -> None:
        self._log, self._name, self._ready = log, name, ready

    def is_ready(self) -> bool:
        return self._ready

    def wait(self) -> None:
        pass

    def result(self) -> SampledRows:
        self._log.append(f"answer {self._name}")
        return SampledRows(int32_array([1]), int32_array([5]), [])


class OneGraph:
    """There is one graph to capture."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self.num_left = 1
        self.is_missing_one = False

    def capture_next(self) -> int:
        self._log.append("capture")
        self.num_left, self.is_missing_one = 0, False
        return 1


class LateRunner:
    """A device whose steps take until somebody waits for them, and miss the one graph."""

    is_called = False

    def __init__(self, log: list[str], ready: bool) -> None:
        self._log, self._ready, self._count = log, ready, 0
        self.graphs = OneGraph(log)
        self.expert_loads = SimpleNamespace(poll=lambda now_s: [])

    def launch(self, section: PlanSection) -> LateOutput:
        self._count += 1
        self.graphs.is_missing_one = self.graphs.num_left > 0
        self._log.append(f"launch {self._count}")
        return LateOutput(self._log, str(self._count), self._ready)

    def reset(self) -> None:
        self._log.append("reset")


class ScriptedLink:
    def __init__(self, plans: list[ToWorker]) -> None:
        self._plans, self.sent = plans, list[FromWorker]()

    def next_plan(self, block: bool = True) -> ToWorker | None:
        return self._plans.pop(0) if self._plans else None

    def send(self, message: FromWorker) -> None:
        self.sent.append(message)

    def wake(self) -> None:
        raise AssertionError("nothing was to be prepared")


@pytest.mark.parametrize(
    ("ready", "expected"),
    [
        (True, ["launch 1", "answer 1", "launch 2", "answer 2", "reset", "launch 3", "answer 3"]),
        (False, ["launch 1", "launch 2", "answer 1", "answer 2", "reset", "launch 3", "answer 3"]),
    ],
)
def test_the_next_step_is_launched_while_the_device_works_on_the_last(ready: bool, expected: list[str]) -> None:
    log: list[str] = []
    idle = [idle_section()]
    link = ScriptedLink([StepPlan(1, idle), StepPlan(2, idle), WorkPlan(3, ResetTables()), StepPlan(4, idle)])
    worker = TpWorker(0, LateRunner(log, ready), link)  # type: ignore[arg-type]  # fakes
    worker.serve()
    assert log == expected
    assert [message.step for message in link.sent if hasattr(message, "step")] == [1, 2, 3, 4]
    assert worker.step == 4


class Clock(list[str]):
    """A log in which what is noted takes seconds."""

    SECONDS: ClassVar = {"launch": 1.0, "answer": 2.0, "wait": 10.0}
    now_s = 0.0

    def append(self, what: str) -> None:
        self.now_s += self.SECONDS[what.split()[0]]

    def monotonic(self) -> float:
        return self.now_s


def test_the_device_has_a_step_until_its_ids_are_there_and_the_answer_is_made_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr("srt.managers.tp_worker.process.time", clock)
    monkeypatch.setattr(LateOutput, "wait", lambda output: clock.append("wait"))
    link = ScriptedLink([StepPlan(1, [decode_section([3])])])
    worker = TpWorker(0, LateRunner(clock, ready=True), link)  # type: ignore[arg-type]  # fakes
    worker.serve()
    times = worker._times.pop()
    assert [times[f"{name}_us_p50"] for name in ("launch", "answer")] == [1_000_000, 2_000_000]
    (result,) = link.sent
    assert isinstance(result, StepResult)
    assert result.step_us == 11_000_000


@pytest.mark.parametrize("ready", [True, False])
def test_results_say_whether_a_graph_is_missed_until_it_is_captured(
    ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gc.freeze", lambda: None)
    log: list[str] = []
    idle = [idle_section()]
    link = ScriptedLink([StepPlan(1, idle), StepPlan(2, idle), WorkPlan(3, CaptureGraph()), StepPlan(4, idle)])
    TpWorker(0, LateRunner(log, ready), link).serve()  # type: ignore[arg-type]  # fakes
    assert log[-4:] == ["answer 2", "capture", "launch 3", "answer 3"]
    results = [message for message in link.sent if isinstance(message, StepResult)]
    assert [(result.step, result.wants_capture) for result in results] == [(1, True), (2, True), (4, False)]
    assert {result.ids_hash for result in results} == {0}, "a rank that is alone has nobody to agree with"


def test_a_draw_that_is_lost_changes_the_hash() -> None:
    rows = SampledRows(int32_array([1, 0, 1]), int32_array([4, 5]), [])
    others = [
        SampledRows(int32_array([1, 1, 0]), int32_array([4, 5]), []),
        SampledRows(int32_array([1, 0, 1]), int32_array([4, 6]), []),
    ]
    assert len({rows.ids_hash(), *(other.ids_hash() for other in others)}) == 3
    assert 0 <= rows.ids_hash() < 1 << 64
