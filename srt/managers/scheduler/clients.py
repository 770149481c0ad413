"""The frontends and their requests, found by request number or by the client's label."""

from __future__ import annotations

from srt.managers.scheduler.outbox import Outbox
from srt.managers.scheduler.request import Request
from srt.protocol.labels import is_named


class Client:
    """A frontend (or Runtime) and its requests, including ended ones until it has acknowledged their end."""

    def __init__(self, number: int, process: str = "") -> None:
        self.number = number
        self.process = process  # as in its FrontendHello
        self.outbox = Outbox()
        self._requests: dict[int, list[Request]] = {}  # by rid: the choices

    def knows(self, rid: int) -> bool:
        return rid in self._requests

    def enter(self, requests: list[Request]) -> None:
        self._requests[requests[0].rid] = list(requests)

    def find(self, rid: int, choice: int) -> Request | None:
        return next((request for request in self._requests.get(rid, ()) if request.choice == choice), None)

    def choices(self, rid: int) -> list[Request]:
        return list(self._requests.get(rid, ()))

    def forget(self, request: Request) -> None:
        choices = self._requests[request.rid]
        if len(choices) == 1:
            del self._requests[request.rid]
        else:
            choices.remove(request)

    def all_requests(self) -> list[Request]:
        return [request for choices in self._requests.values() for request in choices]

    @property
    def num_known(self) -> int:
        """Number of choices whose end the frontend has not acknowledged."""
        return sum(len(choices) for choices in self._requests.values())


class Labels:
    """The clients' labels of live requests.

    A label belongs to one request, or to two if one of them was resumed after a scheduler died. It is free again when the last choice
    has ended.
    """

    def __init__(self) -> None:
        self._live: dict[str, list[Request]] = {}

    def is_taken(self, label: str) -> bool:
        return label in self._live

    def enter(self, requests: list[Request]) -> None:
        label = requests[0].label
        if label:
            self._live.setdefault(label, []).extend(requests)

    def named(self, name: str) -> list[Request]:
        """Return the live requests that this name means: of one prompt, or of all prompts of a batch."""
        return [request for label, live in self._live.items() if is_named(label, name) for request in live]

    def leave(self, request: Request) -> None:
        """Remove a choice that has ended."""
        others = [other for other in self._live.get(request.label, ()) if other is not request]
        if others:
            self._live[request.label] = others
        else:
            self._live.pop(request.label, None)
