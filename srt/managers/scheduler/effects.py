"""Effects, which the Scheduler asks its host process to carry out, and sources of messages. Plain data, read by the simulation too."""

from __future__ import annotations

from msgspec import Struct

from srt.protocol import messages
from srt.protocol.engine_work import EngineLedger
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
    """Report that all ranks are ready and agree, so the engine serves from now on. `values` are facts for the start-up report."""

    values: dict[str, Scalar]


class Record(Struct, frozen=True, gc=False):
    """Let the supervisor keep this ledger, before any later effect: the next generation begins with it."""

    ledger: EngineLedger


class Fatal(Struct, frozen=True, gc=False):
    """End the engine: it cannot continue. The sentence says why; later effects are void."""

    reason: str


Effect = ToFrontend | ToWorkers | HandshakeDone | Record | Fatal
