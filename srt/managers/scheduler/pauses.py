"""Pauses of generation: who asked for them, and which of these calls wait for an answer."""

from __future__ import annotations

from srt.managers.scheduler.clients import Client
from srt.protocol.engine_work import Pause
from srt.protocol.messages import ControlReply


class Pauses:
    """Owner of the pauses. One ends when generation is continued, or at the latest with the frontend that asked for it."""

    def __init__(self, kept: list[Pause]) -> None:
        """`kept` are the pauses that the scheduler before this one had: each lasts until its frontend is known to be gone."""
        self._processes = {pause.frontend: pause.process for pause in kept}  # by frontend
        self._asked: list[tuple[Client, int]] = []  # clients and calls; answered when no step is in flight

    @property
    def is_on(self) -> bool:
        return bool(self._processes)

    @property
    def are_asked_for(self) -> bool:
        """True if calls to pause wait for an answer."""
        return bool(self._asked)

    def begin(self, client: Client) -> None:
        self._processes[client.number] = client.process

    def ask(self, client: Client, call: int) -> None:
        """Let a call to pause wait for its answer."""
        self._asked.append((client, call))

    def end_all(self) -> None:
        self._processes.clear()

    def end_of(self, frontend: int) -> None:
        """End the pause of a frontend that is gone."""
        self._processes.pop(frontend, None)

    def meet(self, client: Client) -> None:
        """End the pause that another process asked for under this frontend's number: that process is gone."""
        if self._processes.get(client.number, client.process) != client.process:
            self.end_of(client.number)

    def pop_answers(self, is_draining: bool) -> list[tuple[Client, ControlReply]]:
        """Return the answers to all calls that wait for one: no step is in flight, or generation was continued before that."""
        refusal = "" if self.is_on else "Generation did not pause: it was continued before its last step ended."
        if is_draining and not self.is_on:
            refusal = "Generation cannot be paused: the server is shutting down and finishes its requests."
        asked, self._asked = self._asked, []
        return [(client, ControlReply(call, not refusal, refusal, {})) for client, call in asked]

    def entries(self) -> list[Pause]:
        """Return the pauses for the ledger."""
        return [Pause(frontend, process) for frontend, process in sorted(self._processes.items())]
