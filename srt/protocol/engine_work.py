"""Work other than steps that all ranks do in order, and the ledger of what an engine was told.

A request carries everything that it needs, so a new engine can go on with it. What holds for the whole engine is in no request: the
ledger has it. The scheduler writes a new ledger to the supervisor before it answers the call that changed it, and the supervisor gives
the latest one to every process of the engine's next generation.
"""

from __future__ import annotations

from msgspec import field

from srt.protocol.wire import Wire

# ---- Work


class ResetTables(Wire, frozen=True, tag=1):
    """Empty all tables."""


class InspectTables(Wire, frozen=True, tag=2):
    """Report the tables (see WorkDone)."""


class CaptureGraph(Wire, frozen=True, tag=3):
    """Capture one more of the graphs that WorkerHello counts."""


Work = ResetTables | InspectTables | CaptureGraph


# ---- The ledger


class Pause(Wire, frozen=True):
    """A pause of generation, and the frontend that asked for it: its number, and the `process` of its FrontendHello."""

    frontend: int
    process: str


class EngineLedger(Wire, frozen=True):
    """What an engine was told that no request carries. A new ledger replaces the one before as a whole."""

    pauses: list[Pause] = field(default_factory=list)
