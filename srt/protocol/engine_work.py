"""Work other than steps that all ranks do in order, and the ledger of what an engine was told.

A request carries everything that it needs, so a new engine can go on with it. What holds for the whole engine is in no request: the
ledger has it. The scheduler writes a new ledger to the supervisor before it answers the call that changed it, and the supervisor gives
the latest one to every process of the engine's next generation.
"""

from __future__ import annotations

from msgspec import field

from srt.protocol.wire import Wire

# ---- Work


class WeightsSource(Wire, frozen=True):
    """The folder that the present weights were read from, and the version of its files then; both empty if they are kept in no folder."""

    folder: str
    files: str


class ResetTables(Wire, frozen=True, tag=1):
    """Empty all tables."""


class InspectTables(Wire, frozen=True, tag=2):
    """Report the tables (see WorkDone)."""


class CaptureGraph(Wire, frozen=True, tag=3):
    """Capture one more of the graphs that WorkerHello counts."""


class LoadWeights(Wire, frozen=True, tag=4):
    """Replace the weights by those of the files in this folder, which may lack some of them if they are `is_partial`.

    WorkDone reports the version of the `files` that were read (`version_of` in srt/utils/checkpoint.py).
    """

    folder: str
    is_partial: bool = False


class InspectWeights(Wire, frozen=True, tag=5):
    """Look at the weights. Without a name WorkDone reports a hash of each of the rank's parameters.

    With the name of a tensor of the checkpoint it reports the JSON of the first `num_rows` rows of the rank's part, and where the part
    begins: at `start`, along the dimension `dim`.
    """

    name: str = ""
    num_rows: int = 0


class JoinUpdateGroup(Wire, frozen=True, tag=6):
    """Meet a trainer, which is rank 0, at a port of its host. This replica's ranks are those from `rank_offset` on."""

    name: str
    address: str
    port: int
    rank_offset: int
    world_size: int
    backend: str  # gloo or nccl; empty: what the device takes


class ReceiveWeights(Wire, frozen=True, tag=7):
    """Replace weights by tensors that the trainer sends over a group: one after the other, or if they `are_joined` as the bytes of all."""

    group: str
    names: list[str]
    dtypes: list[str]  # as in safetensors files
    shapes: list[list[int]]
    are_joined: bool


class LeaveUpdateGroup(Wire, frozen=True, tag=8):
    """Close a group."""

    name: str


class SaveWeights(Wire, frozen=True, tag=11):
    """Write the rank's weights to this folder, which exists, as they are held (srt/utils/sharded_state.py).

    A file has at most `most_bytes` of them, if that is not 0. WorkDone reports which CPUs they are `packed_for`.
    """

    folder: str
    most_bytes: int


SameWeights = InspectWeights | JoinUpdateGroup | LeaveUpdateGroup | SaveWeights
"""Work that leaves the weights as they are."""
NewWeights = LoadWeights | ReceiveWeights
WeightsWork = NewWeights | SameWeights


class ReleaseMemory(Wire, frozen=True, tag=9):
    """Give the memory of these parts back to the host or the device; their addresses stay reserved. WorkDone reports `num_bytes`."""

    tags: list[str]  # some of MEMORY_TAGS
    weights: WeightsSource | None = None  # where the weights can be read again; None: where those of the start are
    refuses_requests: bool = False  # those that come meanwhile; otherwise they wait


class ResumeMemory(Wire, frozen=True, tag=10):
    """Take memory for these parts again, and read the weights if they are among them."""

    tags: list[str]
    weights: WeightsSource | None = None


MEMORY_TAGS = ("weights", "kv_cache", "cuda_graph")
MemoryWork = ReleaseMemory | ResumeMemory
EngineWork = WeightsWork | MemoryWork
"""Work that clients ask for, one at a time."""
Work = ResetTables | InspectTables | CaptureGraph | EngineWork


# ---- The ledger


class Pause(Wire, frozen=True):
    """A pause of generation, and the frontend that asked for it: its number, and the `process` of its FrontendHello."""

    frontend: int
    process: str


class EngineLedger(Wire, frozen=True):
    """What an engine was told that no request carries. A new ledger replaces the one before as a whole."""

    pauses: list[Pause] = field(default_factory=list)
    weights: WeightsSource | None = None  # None: those of the server's start
    weight_version: str = "default"
    released: list[str] = field(default_factory=list)  # the parts whose memory is released
    refuses_requests: bool = False  # while memory is released


# ---- Frontend -> scheduler, and back


class UpdateWeights(Wire, frozen=True, tag=12):
    """Replace the weights, and forget all cached prefixes. Answered by ControlReply when all ranks have done it, or none.

    Meanwhile no step is planned. Running requests are ended if `aborts`. Otherwise, unless a pause keeps them where they are, they are
    preempted, so that all of their keys and values are computed again. SameWeights leave requests and cache as they are. MemoryWork
    is asked for in the same way: after a ReleaseMemory no step is planned until all memory is back.
    """

    call: int
    work: EngineWork
    version: str  # the name of the weights from then on; empty: unchanged
    aborts: bool


class SetWeightVersion(Wire, frozen=True, tag=13):
    """Give the present weights another name. Answered by ControlReply."""

    call: int
    version: str


class WeightVersion(Wire, frozen=True, tag=27):
    """Notice that the weights have another name from now on; those of the start are named in SchedulerHello."""

    version: str
