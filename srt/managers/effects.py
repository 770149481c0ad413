"""What the Scheduler asks its host process to do, and where a message came from. Plain data: the simulation reads the same."""

from __future__ import annotations

from dataclasses import dataclass

from srt.protocol import messages
from srt.protocol.messages import Scalar


@dataclass(frozen=True, slots=True)
class Frontend:
    """Source of a message: the frontend (or Runtime) with this number."""

    number: int


@dataclass(frozen=True, slots=True)
class Worker:
    """Source of a message: the worker of this rank."""

    rank: int


Source = Frontend | Worker


@dataclass(frozen=True, slots=True)
class ToFrontend:
    """Send this message to the frontend with this number."""

    frontend: int
    message: messages.ToFrontend


@dataclass(frozen=True, slots=True)
class ToWorkers:
    """Send this message to every rank, in the order of the effects."""

    message: messages.ToWorker


@dataclass(frozen=True, slots=True)
class HandshakeDone:
    """All ranks are there and agree: the replica serves from now on. `values` are facts for the start-up report."""

    values: dict[str, Scalar]


@dataclass(frozen=True, slots=True)
class Fatal:
    """The replica cannot go on. The sentence says why; no later effect means anything."""

    reason: str


Effect = ToFrontend | ToWorkers | HandshakeDone | Fatal
