"""What the supervisors of several hosts tell each other, and where the processes of several hosts meet."""

from __future__ import annotations

from msgspec import field

from srt.protocol.engine_work import EngineLedger
from srt.protocol.wire import Wire


class MeetingPoints(Wire, frozen=True):
    """Where a process meets those of other hosts. An empty address means a socket or file in the run folder of its own host."""

    secret: bytes  # of this run of the server, made of that which all hosts have
    address: str  # of this host, which others can reach
    frontends: list[str]  # by replica: where its scheduler meets the frontends
    workers: str = ""  # where the scheduler of this process' replica meets its workers
    ranks: str = ""  # where the ranks of the replica find each other


# ---- Another host -> host 0


class HostHello(Wire, frozen=True, tag=110):
    """A host's first message: everything that must be the same on all hosts."""

    rank: int
    code: str  # hash of the sources
    weights: str  # hash of the checkpoint
    options: dict[str, str]
    drafts: str = ""  # hash of the checkpoint of the model that drafts, if there is one
    scales: str = ""  # hash of the file of --quantization-param-path, if there is one


class HostBeat(Wire, frozen=True, tag=111):
    """Sign of life, in both directions. `engines` are the counters of the host's schedulers, by replica."""

    engines: dict[str, dict[str, float]] = field(default_factory=dict)


class HostHeard(Wire, frozen=True, tag=112):
    """A message of a child of this host to the supervisor, as it was encoded."""

    role: str
    index: int
    message: bytes


class HostExited(Wire, frozen=True, tag=113):
    """A child of this host has ended."""

    role: str
    index: int
    returncode: int


class HostLinkLost(Wire, frozen=True, tag=114):
    """A child of this host has closed its link, or sent what cannot be read, which `reason` says."""

    role: str
    index: int
    reason: str | None


# ---- Host 0 -> another host


class HostAccepted(Wire, frozen=True, tag=115):
    """The host belongs to the server now: orders follow."""


class HostRefused(Wire, frozen=True, tag=116):
    """The host cannot join, for the reason of this sentence."""

    sentence: str


class HostSpawn(Wire, frozen=True, tag=117):
    """Start a child. `frontends`, `workers` and `ranks` are those of MeetingPoints, and its secret is derived for `run`."""

    role: str
    index: int
    replica: int
    generation: int
    num_frontends: int
    num_tokens: int
    ledger: EngineLedger
    frontends: list[str]
    workers: str
    ranks: str
    run: str


class HostTell(Wire, frozen=True, tag=118):
    """Pass this message, as it is encoded here, on to a child."""

    role: str
    index: int
    message: bytes


class HostKill(Wire, frozen=True, tag=119):
    """Kill a child with all processes that it has started."""

    role: str
    index: int


class HostEnd(Wire, frozen=True, tag=120):
    """The server has ended. `reason` says why, unless it was asked to."""

    reason: str


# ---- The process that talks to Ray -> host 0


class RayReached(Wire, frozen=True, tag=121):
    """Notice that a Ray cluster was reached: the address of this machine in it."""

    address: str


FromHost = HostHello | HostBeat | HostHeard | HostExited | HostLinkLost
ToHost = HostAccepted | HostRefused | HostBeat | HostSpawn | HostTell | HostKill | HostEnd
HostMessage = FromHost | ToHost | RayReached
