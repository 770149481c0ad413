"""What the whole engine was told: pauses, weights, released memory, and the change under way. The ledger says it to the next generation."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from srt.managers.scheduler.clients import Client
from srt.managers.scheduler.core import SchedulerCore
from srt.managers.scheduler.effects import Effect, Record, ToFrontend, ToWorkers
from srt.managers.scheduler.pauses import Pauses
from srt.managers.scheduler.worker_stream import EngineChange
from srt.protocol.engine_work import (
    EngineLedger,
    EngineWork,
    JoinUpdateGroup,
    LeaveUpdateGroup,
    LoadWeights,
    ReleaseMemory,
    ResumeMemory,
    SameWeights,
    UpdateWeights,
    WeightsSource,
    WeightVersion,
)
from srt.protocol.messages import ControlReply, WorkPlan

_WITHOUT_WEIGHTS = (ReleaseMemory, ResumeMemory, JoinUpdateGroup, LeaveUpdateGroup)  # what needs none


class EngineChanges:
    """Owner of the ledger and of the one change that may be under way.

    A change waits until no step is in flight, and no step is planned until all ranks have made it.
    """

    def __init__(self, ledger: EngineLedger) -> None:
        """`ledger` is what the schedulers before this one were told."""
        self._ledger = ledger  # as the supervisor knows it
        self.pauses = Pauses(ledger.pauses)
        self._change: EngineChange | None = None

    @property
    def weight_version(self) -> str:
        return self._ledger.weight_version

    @property
    def keeps_steps_back(self) -> bool:
        """True if no step may be planned."""
        return self._change is not None or self.pauses.is_on or bool(self._ledger.released)

    @property
    def lends_memory(self) -> bool:
        """True if memory is released, or on its way out or back."""
        is_changing = self._change is not None and isinstance(self._change.work, ReleaseMemory | ResumeMemory)
        return is_changing or bool(self._ledger.released)

    @property
    def keeps_rows(self) -> bool:
        """True if the change under way leaves running requests where they are."""
        work = None if self._change is None else self._change.work
        if isinstance(work, ReleaseMemory):
            return "kv_cache" not in work.tags
        return self.pauses.is_on or isinstance(work, SameWeights | ResumeMemory)

    def why_refused(self, *, is_draining: bool) -> str:
        """Return why a new request must be refused for now; empty if it need not."""
        if is_draining:
            return "The server is shutting down."
        if self._ledger.released and self._ledger.refuses_requests:
            return "The server's memory is released: try again when it was resumed."
        return ""

    def record(self, frontends: Iterable[int]) -> list[Effect]:
        """Let the supervisor keep the ledger, if it has changed. This goes before the answer to the call that changed it."""
        return self._become(self._ledger, frontends)

    def rename_weights(self, client: Client, call: int, version: str, frontends: Iterable[int]) -> list[Effect]:
        """Give the present weights another name, and answer the call that asks for it."""
        effects = self._become(replace(self._ledger, weight_version=version), frontends)
        return [*effects, ToFrontend(client.number, ControlReply(call, True, "", {}))]

    def _become(self, ledger: EngineLedger, frontends: Iterable[int]) -> list[Effect]:
        ledger = replace(ledger, pauses=self.pauses.entries())
        before, self._ledger = self._ledger, ledger
        effects: list[Effect] = []
        if ledger != before:
            effects.append(Record(ledger))
        if ledger.weight_version != before.weight_version:
            effects += [ToFrontend(number, WeightVersion(ledger.weight_version)) for number in frontends]
        return effects

    def ask_for_update(self, client: Client, asked: UpdateWeights, *, is_draining: bool) -> list[Effect]:
        """Begin an update of the weights. Return its refusal; nothing if it is under way."""
        if is_draining:
            refusal = "Weights and memory stay as they are: the server is shutting down and finishes its requests."
        elif self._change is not None:
            refusal = "Weights cannot be updated now: another update is under way. Try again when it is done."
        elif "weights" in self._ledger.released and not (
            isinstance(asked.work, _WITHOUT_WEIGHTS) or _is_whole(asked.work)
        ):
            refusal = "The memory of the weights is released: call /resume_memory_occupation or /update_weights_from_disk first."
        else:
            self._change = EngineChange(client, asked.call, self._completed(asked.work), asked.version)
            return []
        return [ToFrontend(client.number, ControlReply(asked.call, False, refusal, {}))]

    def _completed(self, work: EngineWork) -> EngineWork:
        """Leave out of a loan what has happened already, and add where the weights are kept."""
        released = self._ledger.released
        if isinstance(work, ReleaseMemory):
            tags = [tag for tag in work.tags if tag not in released]
            return replace(work, tags=tags, weights=self._ledger.weights)
        if isinstance(work, ResumeMemory):
            return ResumeMemory([tag for tag in released if tag in work.tags], self._ledger.weights)
        return work

    def next_work(self, core: SchedulerCore) -> list[Effect]:
        """Return the work for the workers, if a change waits for it and no step is in flight."""
        change = self._change
        if change is None or change.is_sent or core.stream.num_in_flight:
            return []
        plan = WorkPlan(core.stream.next_step, change.work)
        core.stream.submit_change(change)
        return [ToWorkers(plan)]

    def finish(self, core: SchedulerCore, clients: dict[int, Client]) -> list[Effect]:
        """End the change that all ranks have answered, and answer the call that asked for it, if its frontend is still there."""
        change, self._change = self._change, None
        assert change is not None, "no change is under way"
        if change.errors:
            return _answer(change, ControlReply(change.call, False, change.errors[0], {}), clients)
        work = change.work
        if isinstance(work, SameWeights):
            return _answer(change, ControlReply(change.call, True, "", change.values), clients)
        if isinstance(work, ReleaseMemory | ResumeMemory):
            return self._finish_loan(work, change, core, clients)
        core.memory.retire(core.planner.running())
        # What came as tensors is kept in no folder, and an update of some tensors makes a whole that is in none.
        source = WeightsSource("", "")
        if isinstance(work, LoadWeights) and not work.is_partial:
            source = WeightsSource(work.folder, str(change.values["files"]))
        version = change.version or self._ledger.weight_version
        ledger = replace(self._resumed(["weights"]), weights=source, weight_version=version)
        effects = self._become(ledger, clients)
        num_paused = core.planner.num_waiting + core.slots.num_used
        reply = ControlReply(change.call, True, "", {"num_paused_requests": num_paused})
        return [*effects, *_answer(change, reply, clients)]

    def _finish_loan(
        self, work: ReleaseMemory | ResumeMemory, change: EngineChange, core: SchedulerCore, clients: dict[int, Client]
    ) -> list[Effect]:
        if isinstance(work, ResumeMemory):
            ledger = self._resumed(work.tags)
        else:
            released = [*self._ledger.released, *work.tags]
            refuses = work.refuses_requests or self._ledger.refuses_requests  # until all is back, whoever asked for it
            if "kv_cache" in work.tags:
                core.memory.retire(core.planner.running())
            ledger = replace(self._ledger, released=released, refuses_requests=refuses)
        effects = self._become(ledger, clients)
        return [*effects, *_answer(change, ControlReply(change.call, True, "", change.values), clients)]

    def _resumed(self, tags: list[str]) -> EngineLedger:
        """Return the ledger with the memory of these parts taken back."""
        released = [tag for tag in self._ledger.released if tag not in tags]
        return replace(
            self._ledger, released=released, refuses_requests=bool(released) and self._ledger.refuses_requests
        )


def _is_whole(work: EngineWork) -> bool:
    """Return whether this work writes all weights, so that it needs none of the old ones."""
    return isinstance(work, LoadWeights) and not work.is_partial


def _answer(change: EngineChange, reply: ControlReply, clients: dict[int, Client]) -> list[Effect]:
    number = change.client.number
    return [ToFrontend(number, reply)] if clients.get(number) is change.client else []
