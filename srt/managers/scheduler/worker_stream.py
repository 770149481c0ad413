"""The numbered stream of work to an engine's ranks, and their answers: each rank answers every item once, in order."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from srt.managers.scheduler.clients import Client
from srt.managers.scheduler.plan_draft import Planned
from srt.protocol.engine_work import EngineWork, InspectWeights
from srt.protocol.messages import Scalar, StepAck, StepResult, WorkDone, WorkerHello


class BrokenReplica(Exception):
    """Raised when the workers cannot be trusted any more; the sentence says why."""


@dataclass(slots=True)
class Inspection:
    """A comparison of the workers' tables with the scheduler's, on its way through the stream."""

    client: Client
    call: int
    tables_hash: str  # of the tables as the scheduler has sent them so far
    findings: list[str] = field(default_factory=list)
    values: dict[str, Scalar] = field(default_factory=dict)  # reported by worker 0


@dataclass(slots=True)
class EngineChange:
    """A change of the whole engine that a client asked for: it is carried out by all ranks, while no step is in flight."""

    client: Client
    call: int
    work: EngineWork
    version: str  # name of the weights afterwards
    is_sent: bool = False
    errors: list[str] = field(default_factory=list)  # of ranks that did not do it
    values: dict[str, Scalar] = field(
        default_factory=dict
    )  # reported by worker 0, or by all: each name behind its rank


@dataclass(slots=True)
class _Item:
    planned: Planned | None = None
    inspection: Inspection | None = None
    change: EngineChange | None = None  # if all are None: a capture
    num_answers: int = 0
    num_graphs_left: int | None = None  # reported by the first rank that answered
    ids_hash: tuple[int, int] | None = None  # the rank that answered first, and its hash


class WorkerStream:
    """The items that were sent and not yet answered by all ranks."""

    def __init__(self, num_ranks: int, num_graphs: int = 0) -> None:
        self._num_ranks = num_ranks
        self._num_graphs = num_graphs  # graphs that the workers can still capture
        self._is_capturing = False
        self._is_missing_graph = False  # according to the last result
        self._items: deque[_Item] = deque()
        self._first_step = 1  # number of the first item
        self._next_answer = [1] * num_ranks
        self.num_in_flight = 0  # plans without a result

    @property
    def next_step(self) -> int:
        return self._first_step + len(self._items)

    def submit(self, planned: Planned) -> None:
        assert planned.plan.step == self.next_step
        self._items.append(_Item(planned=planned))
        self.num_in_flight += 1

    def submit_inspection(self, inspection: Inspection) -> None:
        self._items.append(_Item(inspection=inspection))

    def submit_change(self, change: EngineChange) -> None:
        change.is_sent = True
        self._items.append(_Item(change=change))

    def incarnations_in_flight(self) -> set[int]:
        """Return the incarnations of all rows in steps that not every rank has answered."""
        planned = [
            item.planned for item in self._items if item.planned is not None and item.num_answers < self._num_ranks
        ]
        rows = [rows for one in planned for rows in (one.sampling_incarnations.tolist(), one.extends.values())]
        return {incarnation for incarnations in rows for incarnation in incarnations}

    @property
    def is_empty(self) -> bool:
        """True if all ranks have answered everything."""
        return not self._items

    @property
    def num_graphs_left(self) -> int:
        """Number of graphs that are still to be captured."""
        return self._num_graphs

    @property
    def can_capture(self) -> bool:
        """True if there are graphs to capture and none is being captured: captures come one by one, with steps in between."""
        return self._num_graphs > 0 and not self._is_capturing

    @property
    def wants_capture(self) -> bool:
        """True if a capture pays even while requests run."""
        return self._is_missing_graph and self.can_capture

    def submit_capture(self) -> None:
        self._items.append(_Item())
        self._is_capturing = True

    def accept_result(self, rank: int, result: StepResult) -> Planned:
        """Return the plan that this result belongs to. BrokenReplica if that is not the next one."""
        if rank != 0:
            raise BrokenReplica(f"Worker {rank} sent the result of step {result.step}, which only worker 0 may.")
        planned = self._answer(rank, result.step, result.ids_hash).planned
        if planned is None:
            raise BrokenReplica(f"Worker {rank} sent a result for item {result.step}, which is not a step.")
        self.num_in_flight -= 1
        self._is_missing_graph = result.wants_capture
        return planned

    def accept_ack(self, rank: int, ack: StepAck) -> None:
        if rank == 0:
            raise BrokenReplica(f"Worker 0 acknowledged step {ack.step} instead of sending its result.")
        if self._answer(rank, ack.step, ack.ids_hash).planned is None:
            raise BrokenReplica(f"Worker {rank} acknowledged item {ack.step} as a step, which it is not.")

    def accept_done(self, rank: int, done: WorkDone) -> Inspection | EngineChange | None:
        """Return the inspection or the change once every rank has answered it; None until then, and for other work."""
        item = self._answer(rank, done.step, None)
        if item.planned is not None:
            raise BrokenReplica(f"Worker {rank} reported step {done.step} as other work.")
        if item.change is not None:
            return self._accept_change(rank, item, item.change, done)
        if item.inspection is None:
            self._accept_capture(rank, item, done)
            return None
        found: Scalar = done.values.get("tables_hash")
        if found != item.inspection.tables_hash:
            item.inspection.findings.append(
                f"worker {rank} has page tables with hash {found}, the scheduler sent {item.inspection.tables_hash}"
            )
        if rank == 0:
            item.inspection.values = {f"worker_{n}": v for n, v in done.values.items() if n != "tables_hash"}
        return item.inspection if item.num_answers == self._num_ranks else None

    def _accept_change(self, rank: int, item: _Item, change: EngineChange, done: WorkDone) -> EngineChange | None:
        if done.error:
            change.errors.append(done.error)
        if isinstance(change.work, InspectWeights):
            change.values |= {f"{rank} {name}": value for name, value in done.values.items()}
        elif rank == 0:
            change.values = done.values
        if item.num_answers < self._num_ranks:
            return None
        changes_all = not isinstance(change.work, InspectWeights)  # what is looked at, some ranks may lack
        if changes_all and change.errors and len(change.errors) < self._num_ranks:
            raise BrokenReplica(f"Some workers did what others could not do: {change.errors[0]}")
        return change

    def _accept_capture(self, rank: int, item: _Item, done: WorkDone) -> None:
        left = done.values.get("num_left")
        if item.num_graphs_left is None:  # 0: a capture failed; unchanged: it lacked kernels
            item.num_graphs_left = 0 if left == 0 else self._num_graphs - int(left != self._num_graphs)
        if left != item.num_graphs_left:
            raise BrokenReplica(f"Worker {rank} has {left} graphs left to capture, not {item.num_graphs_left}.")
        if rank == 0:  # its results so far were of steps before this capture
            self._is_missing_graph = False
        if item.num_answers == self._num_ranks:
            self._num_graphs = item.num_graphs_left
            self._is_capturing = False

    def _answer(self, rank: int, step: int, ids_hash: int | None) -> _Item:
        expected = self._next_answer[rank]
        if step != expected:
            raise BrokenReplica(f"Worker {rank} answered step {step} where step {expected} was expected.")
        if step >= self.next_step:
            raise BrokenReplica(f"Worker {rank} answered step {step}, which was never sent.")
        self._next_answer[rank] = expected + 1
        item = self._items[step - self._first_step]
        self._compare(rank, step, item, ids_hash)
        item.num_answers += 1
        while self._items and self._items[0].num_answers == self._num_ranks:
            self._items.popleft()
            self._first_step += 1
        return item

    @staticmethod
    def _compare(rank: int, step: int, item: _Item, ids_hash: int | None) -> None:
        if ids_hash is None:
            return
        if item.ids_hash is None:
            item.ids_hash = (rank, ids_hash)
        elif item.ids_hash[1] != ids_hash:
            other, others_hash = item.ids_hash
            raise BrokenReplica(
                f"Workers disagree about the tokens of step {step}: hash {others_hash:#x} on worker {other},"
                f" {ids_hash:#x} on worker {rank}."
            )


class Handshake:
    """Collects the ranks' first messages, and checks that the ranks fit together."""

    def __init__(self, num_ranks: int, protocol_hash: str) -> None:
        self._num_ranks = num_ranks
        self._protocol_hash = protocol_hash
        self._hellos: dict[int, WorkerHello] = {}

    def accept(self, hello: WorkerHello) -> WorkerHello | None:
        """Return the values that all ranks agree on; None until all ranks have reported. BrokenReplica if they disagree."""
        if not 0 <= hello.rank < self._num_ranks:
            raise BrokenReplica(f"A worker reports rank {hello.rank}, but there are {self._num_ranks} ranks.")
        if hello.rank in self._hellos:
            raise BrokenReplica(f"Worker {hello.rank} sent WorkerHello twice.")
        if hello.protocol_hash != self._protocol_hash:
            raise BrokenReplica(
                f"Worker {hello.rank} speaks protocol {hello.protocol_hash}, the scheduler {self._protocol_hash}:"
                " both must come from the same installation."
            )
        self._hellos[hello.rank] = hello
        first = min(self._hellos)
        for field_name in (
            "config_hash",
            "dtype",
            "page_size",
            "num_pages",
            "num_slots",
            "max_request_tokens",
            "vocab_size",
            "max_row_tokens",
            "num_stages",
            "num_graphs",
            "most_resources",
            "windows",
            "window_pages",
        ):
            ours, theirs = getattr(self._hellos[first], field_name), getattr(hello, field_name)
            if ours != theirs:
                raise BrokenReplica(
                    f"Workers disagree about {field_name}: {ours} on worker {first}, {theirs} on worker {hello.rank}."
                )
        return self._hellos[0] if len(self._hellos) == self._num_ranks else None
