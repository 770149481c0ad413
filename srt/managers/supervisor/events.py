"""What happens to a server's processes, and what the Replacer has the supervisor do about it."""

from __future__ import annotations

from dataclasses import dataclass

from srt.managers.process.child_process import ChildKey
from srt.protocol.messages import EngineLost, EngineReplaced, Failed, Heartbeat, Progress, Ready, ServerReady, Stop

Report = Progress | Ready | Heartbeat | Failed
"""What a child says of itself."""


# ---- Events


@dataclass(frozen=True, slots=True)
class ChildSpoke:
    child: ChildKey
    message: Report


@dataclass(frozen=True, slots=True)
class ChildExited:
    child: ChildKey
    returncode: int  # negative: the signal that killed it


@dataclass(frozen=True, slots=True)
class LinkLost:
    """A child's link ended. `reason` says why bytes from the child cannot be read; None: the child closed the link and should exit."""

    child: ChildKey
    reason: str | None


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Request to stop, from a signal or the Runtime. A second request, or one without grace, stops at once."""

    grace_s: float


@dataclass(frozen=True, slots=True)
class HostLost:
    """Another host is gone, and all of its processes with it."""

    children: tuple[ChildKey, ...]
    sentence: str


@dataclass(frozen=True, slots=True)
class HostBack:
    """A host that was lost has registered again: its processes can be started."""

    children: tuple[ChildKey, ...]


Event = ChildSpoke | ChildExited | LinkLost | StopAsked | HostLost | HostBack


# ---- Effects


@dataclass(frozen=True, slots=True)
class Tell:
    child: ChildKey
    message: ServerReady | EngineReplaced | EngineLost | Stop


@dataclass(frozen=True, slots=True)
class TellRuntime:
    """Tell the Runtime, if one started the server."""

    message: EngineReplaced | EngineLost


@dataclass(frozen=True, slots=True)
class Kill:
    child: ChildKey


@dataclass(frozen=True, slots=True)
class SaveReport:
    """Save the start-up report: all processes are ready. Frontends read it when they are told ServerReady."""


@dataclass(frozen=True, slots=True)
class BecameReady:
    """Announce to the user that the server is ready; all processes were told already."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start replacements for processes that are gone; `reason` says why they ended.

    `generation` is the number of the engine that the replacements belong to or, if they are frontends, will serve.
    """

    children: tuple[ChildKey, ...]
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class ServesAgain:
    """Report that replaced processes are ready."""

    children: tuple[ChildKey, ...]
    after_s: float  # since the loss was first known


@dataclass(frozen=True, slots=True)
class Stopping:
    """Report that the orderly end begins; running requests have at most `grace_s` seconds left."""

    grace_s: float


@dataclass(frozen=True, slots=True)
class Finish:
    """End the supervisor: all processes have ended. `reason` is the sentence for the user, if the end was not asked for."""

    exit_code: int
    reason: str | None


Effect = Tell | TellRuntime | Kill | SaveReport | BecameReady | Start | ServesAgain | Stopping | Finish
