"""What the Scheduler asks its host process to do, and where a message came from. Plain data: the simulation reads the same."""

from __future__ import annotations

from msgspec import Struct

from srt.protocol import messages
from srt.protocol.messages import Scalar


class Frontend(Struct, frozen=True, gc=False):
    """Source of a message: the frontend (or Runtime) with this number."""

    number: int


class Worker(Struct, frozen=True, gc=False):
    """Source of a message: the worker of this rank."""

    rank: int


Source = Frontend | Worker


class ToFrontend(Struct, frozen=True, gc=False):
    """Send this message to the frontend with this number."""

    frontend: int
    message: messages.ToFrontend


class ToWorkers(Struct, frozen=True, gc=False):
    """Send this message to every rank, in the order of the effects."""

    message: messages.ToWorker


class HandshakeDone(Struct, frozen=True, gc=False):
    """All ranks are there and agree: the replica serves from now on. `values` are facts for the start-up report."""

    values: dict[str, Scalar]


class Fatal(Struct, frozen=True, gc=False):
    """The replica cannot go on. The sentence says why; no later effect means anything."""

    reason: str


Effect = ToFrontend | ToWorkers | HandshakeDone | Fatal
