"""The messages that processes exchange, and the one table that numbers them.

Pairs: a frontend (or a Runtime) and the scheduler; the scheduler and its workers; the supervisor and its children. Messages are
immutable and stay as sent. Arrays are little-endian int32, int64 or float32 and travel as raw bytes. `codec.py` turns messages into
MessagePack and checks every field on decoding; `links.py` adds generation and sequence number.
"""

from __future__ import annotations

from typing import Any, Final, get_args

import numpy as np
from msgspec import field

from srt.protocol.engine_work import EngineLedger, SetWeightVersion, UpdateWeights, WeightVersion, Work
from srt.protocol.host_messages import HostMessage, MeetingPoints
from srt.protocol.resource import PinResources as PinResources
from srt.protocol.resource import Resource as Resource
from srt.protocol.wire import Wire as Wire
from srt.server_args import ServerArgs

# Written out: the codec compares these types, and newer versions of numpy make NDArray an alias that equals nothing.
Int32Array = np.ndarray[tuple[Any, ...], np.dtype[np.int32]]
Int64Array = np.ndarray[tuple[Any, ...], np.dtype[np.int64]]
Float32Array = np.ndarray[tuple[Any, ...], np.dtype[np.float32]]
Scalar = str | int | float | bool | None

# Output tokens past the workers' death that show that a suspected request does no harm: its trial ends, and once it is further still,
# that death no longer counts against it. Its position is known except for the steps in flight, so fewer tokens would prove nothing.
TRIAL_TOKENS: Final = 4


def int32_array(values: object = ()) -> Int32Array:
    return np.asarray(values, dtype=np.int32)


def float32_array(values: object = ()) -> Float32Array:
    return np.asarray(values, dtype=np.float32)


# ---- Parts that several messages share


class SamplingSpec(Wire, frozen=True):
    """Sampling parameters of one request, checked and completed by the frontend."""

    max_new_tokens: int
    temperature: float = 1.0  # 0 means greedy
    top_k: int = -1  # -1: all
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop_ids: Int32Array = field(default_factory=int32_array)  # EOS (unless ignored) and stop_token_ids, ascending
    bias_ids: Int32Array = field(default_factory=int32_array)
    bias_values: Float32Array = field(default_factory=lambda: np.zeros(0, np.float32))


class LogprobSpec(Wire, frozen=True):
    """The logprobs that a request asked for. They are the model's own: before temperature, bias and filters."""

    output: bool = False  # of each sampled token
    prompt_start: int = -1  # of prompt tokens from this index on; -1: none
    top: int = 0  # number of best tokens to add at each position
    ids: Int32Array = field(default_factory=int32_array)  # token ids to add at each position


class TokenLogprobs(Wire, frozen=True):
    """Logprobs of consecutive tokens of one choice.

    `first` is an index into the prompt (`is_prompt`) or the output. The prompt's token 0 has no logprob: NaN. `top_*` hold
    `len(chosen) * top` values, best first; `of_ids` holds `len(chosen) * len(ids asked for)`.
    """

    rid: int
    choice: int
    is_prompt: bool
    first: int
    chosen: Float32Array
    top_ids: Int32Array
    top: Float32Array
    of_ids: Float32Array
    vector: Float32Array = field(default_factory=float32_array)  # from a model that pools: the embedding, or scores


# ---- Frontend (or Runtime) -> scheduler


class FrontendHello(Wire, frozen=True, tag=1):
    """A frontend's first message on the link. A frontend that comes again under the same number replaces the old one.

    `process` is a random text that the frontend keeps for life. It tells the next scheduler whether a pause is still this frontend's.
    """

    frontend: int
    protocol_hash: str
    process: str = ""


class GenerateRequest(Wire, frozen=True, tag=2):
    """Begin a request, or resume it: `output_ids[i]` are the tokens that choice `choices[i]` already has (normally none)."""

    rid: int  # the frontend's own counter; (frontend, rid) is the internal id
    label: str  # the client's name for it, unique among live requests
    prompt_ids: Int32Array
    choices: Int32Array  # normally 0 … n-1
    output_ids: list[Int32Array]
    sampling: SamplingSpec
    logprobs: LogprobSpec
    seed: int  # 64 bits; choice i > 0 draws with choice_seed(seed, i)
    priority: int = 0
    cache_salt: str = ""
    resumed: bool = False  # a scheduler that died had accepted it, so a full queue does not refuse it
    urgent: bool = False  # a health check: goes before all others, and preempts a running request if need be
    stream: bool = False  # the client reads tokens as they come, so its steps are kept short
    suspect: bool = False  # workers died, perhaps of this request: it must first run alone without harm
    resource: Resource | None = None  # it is admitted when all workers have prepared this
    adapter: Resource | None = None  # likewise; this comes first


class Abort(Wire, frozen=True, tag=3):
    """The client left, or a stop string was found. `choice` -1 means all choices. May cross the last token on the wire."""

    rid: int
    choice: int


class AbortLabel(Wire, frozen=True, tag=4):
    """Abort the live requests with this label (`labels.is_named`), whichever frontend sent them; the empty label aborts all.

    The scheduler answers with ControlReply and passes the message on to the other frontends, for requests that they are about to send.
    """

    call: int
    label: str


class AckBatch(Wire, frozen=True, tag=5):
    """Confirm that every TokenBatch up to and including `number` was processed."""

    number: int


class AskRange(Wire, frozen=True, tag=6):
    """Ask again for the tokens of this choice from this output index on, after a gap."""

    rid: int
    choice: int
    first: int


class FlushCache(Wire, frozen=True, tag=7):
    """Drop the prefix cache. Answered by ControlReply: not ok while requests are running."""

    call: int


class GetState(Wire, frozen=True, tag=8):
    """Ask for the scheduler's counters. With `deep` every worker is asked for its tables too and all are compared."""

    call: int
    deep: bool


class PauseGeneration(Wire, frozen=True, tag=9):
    """Plan no step until ContinueGeneration. Answered by ControlReply once no step is in flight; not ok if ContinueGeneration came first.

    `mode`: `abort` ends all requests, `retract` preempts the running ones, so that the cache can be flushed, `in_place` keeps them.
    """

    call: int
    mode: str


class ContinueGeneration(Wire, frozen=True, tag=10):
    """Resume after PauseGeneration. Answered by ControlReply, even if nothing was paused."""

    call: int


# ---- Scheduler -> frontend


class SchedulerHello(Wire, frozen=True, tag=20):
    """Answer to FrontendHello, sent once the workers are ready: the limits that requests are checked against."""

    max_total_num_tokens: int
    max_request_tokens: int  # prompt + output of one request
    page_size: int
    weight_version: str = "default"


class RequestDone(Wire, frozen=True):
    """The end of one choice, sent after its last tokens. `reason` is stop, length, abort or error; `matched` the stop id or -1."""

    rid: int
    choice: int
    reason: str
    matched: int
    num_output: int  # output tokens of the choice in all
    cached_tokens: int
    status: int = 0  # HTTP status of an error
    message: str = ""
    num_preempted: int = 0  # times that it lost its slot to another request
    retry_after_s: int = 0  # for a 503: when to try again
    queue_s: float = -1.0  # from its arrival to its slot; negative if it never had one
    num_verified: int = 0  # steps that verified drafts of it, if the engine drafts
    num_verified_ids: int = 0  # output tokens that these steps brought
    weight_version: str = ""  # of the weights at its end


class TokenBatch(Wire, frozen=True, tag=21):
    """New tokens of a frontend's requests, as ranges.

    Row i carries `counts[i]` ids of choice `choices[i]` of request `rids[i]`, from output index `first[i]` on; `ids` holds all rows
    end to end. `cached[i]` of that choice's prompt tokens came from the prefix cache.
    """

    number: int
    rids: Int64Array
    choices: Int32Array
    first: Int32Array
    counts: Int32Array
    cached: Int32Array
    ids: Int32Array
    logprobs: list[TokenLogprobs]
    done: list[RequestDone]


class Refused(Wire, frozen=True, tag=22):
    """Refusal of a request: nothing else will come for it."""

    rid: int
    status: int
    message: str
    retry_after_s: int = 0  # for a 429 or 503: when to try again


class Rejected(Wire, frozen=True, tag=23):
    """Notice that a message from this frontend was broken or unknown, and was dropped."""

    reason: str


class ControlReply(Wire, frozen=True, tag=24):
    """Answer to the message with the same call number."""

    call: int
    ok: bool
    message: str
    values: dict[str, Scalar]


class Load(Wire, frozen=True, tag=25):
    """The scheduler's load, sent when it changes, at most a few times a second."""

    num_running: int
    num_waiting: int
    num_free_pages: int
    num_steps: int


class LastWord(Wire, frozen=True, tag=26):
    """Last message of a scheduler that ends early: choices `choices[i]` of requests `rids[i]` were in steps that the workers have not
    answered. `is_alone`: no other choice was."""

    rids: Int64Array
    choices: Int32Array
    is_alone: bool


# ---- Scheduler -> worker: one numbered stream, the same for every rank


class Admission(Wire, frozen=True):
    """A choice that gets a slot: its known ids, of which the first `cached` are in the prefix cache and need no computing."""

    slot: int
    ids: Int32Array
    prompt_len: int
    cached: int
    seed: int
    sampling: SamplingSpec
    logprobs: LogprobSpec
    resource: str = ""  # the key of what it needs; the worker has prepared it
    adapter: str = ""  # likewise


class PageDelta(Wire, frozen=True):
    """Pages to append to rows of one page group's table: `counts[i]` pages for `slots[i]`; `pages` holds all of them end to end.

    A group with a window has the same slots, in the same order, and new pages for the same columns. The first pages of a request begin
    at the column of the first position that the first computed one sees. Pages behind the window are given to others without a word.
    """

    slots: Int32Array
    counts: Int32Array
    pages: Int32Array


class PlanSection(Wire, frozen=True):
    """The part of a step that one attention group runs: rows that extend, then rows that decode. All empty: idle."""

    admissions: list[Admission]
    pages: list[PageDelta]  # one per page group
    extend_slots: Int32Array
    extend_starts: Int32Array
    extend_counts: Int32Array
    extend_samples: Int32Array  # 1: the chunk ends at the last known token, so it samples
    decode_slots: Int32Array  # every decode row samples
    row_tokens: int = 1  # most ids that each of these gets: one, and one more for each draft that it may bring


class StepPlan(Wire, frozen=True, tag=40):
    """Plan of one step of the model, as a delta to the worker's tables."""

    step: int
    sections: list[PlanSection]  # one per attention group


class WorkPlan(Wire, frozen=True, tag=41):
    """Work other than a step that all ranks do together, in order with the steps."""

    step: int
    work: Work


class Prepare(Wire, frozen=True, tag=42):
    """Prepare this resource, off the thread that executes steps, and answer with Prepared. Steps go on meanwhile."""

    resource: Resource


class Release(Wire, frozen=True, tag=43):
    """Forget the resource with this key: no later plan admits a request that needs it."""

    key: str


# ---- Worker -> scheduler


class WorkerHello(Wire, frozen=True, tag=60):
    """A rank's first message: its configuration and capacity. All ranks must agree before the engine is ready."""

    rank: int
    protocol_hash: str
    config_hash: str
    dtype: str
    page_size: int
    num_pages: int
    num_slots: int
    max_request_tokens: int
    vocab_size: int
    max_row_tokens: int = 1  # most ids that a decode row gets in one step
    num_stages: int = 1  # pipeline stages: a row is in at most one of `num_stages` consecutive steps
    num_graphs: int = 0  # CUDA graphs that `capture` can still add to make steps quicker
    most_resources: int = 256  # that the worker holds at a time, prepared or being prepared
    # The page groups beside the first, whose layers see only the last tokens. `num_pages` is that of the first group.
    windows: list[int] = field(default_factory=list)  # tokens that a token sees, its own included, by group
    window_pages: list[int] = field(default_factory=list)  # pages by group


class RowLogprobs(Wire, frozen=True):
    """Logprobs of a row of the step: of its sampled ids, or of prompt tokens from index `first` on (`is_prompt`)."""

    slot: int
    is_prompt: bool
    first: int
    chosen: Float32Array
    top_ids: Int32Array
    top: Float32Array
    of_ids: Float32Array
    vector: Float32Array = field(default_factory=float32_array)


class StepResult(Wire, frozen=True, tag=61):
    """The sampled ids of a step, from rank 0 of the last stage: `counts[i]` ids for the i-th row that samples.

    The count is 1 for the end of a prompt, 0 to the plan's `row_tokens` for a decode, and -1 (no ids) if the model gave no finite logits.
    `ids_hash` is compared with the other ranks'; a single rank sends 0. `wants_capture`: the steps launched so far lack a graph that
    is worth capturing even while requests run. `distinct_experts` and `peak_loads`, of each layer with experts, come about once a second:
    how many of them a step took, and the load of the busiest, as a multiple of the mean.
    """

    step: int
    counts: Int32Array
    ids: Int32Array
    ids_hash: int
    logprobs: list[RowLogprobs]
    step_us: int
    wants_capture: bool = False
    distinct_experts: tuple[float, ...] = ()
    peak_loads: tuple[float, ...] = ()


class StepAck(Wire, frozen=True, tag=62):
    """Another rank's notice that a step is done, with the hash of the ids that it drew: a difference is a worker fault."""

    step: int
    rank: int
    ids_hash: int
    step_us: int


class WorkDone(Wire, frozen=True, tag=63):
    """A rank's notice that a WorkPlan is done.

    InspectTables reports `tables_hash`, the hex of an 8-byte blake2b. It covers every slot admitted since the last reset, in ascending
    order: slot, page count and the pages of its latest admission, group after group, as little-endian int32, read back from the
    device's tables. The scheduler computes the same from what it sent. `num_slots_seen` counts those slots. Models with experts
    add how many of them steps took since the last inspection. CaptureGraph reports `num_left`, unchanged while code for the next graph
    is still being compiled.
    """

    step: int
    rank: int
    values: dict[str, Scalar]
    error: str = ""  # a sentence that says why it was not done, and nothing was changed


class Prepared(Wire, frozen=True, tag=65):
    """A rank's answer to Prepare. `reason` is empty if the resource is ready; otherwise it says why it cannot be, for the client."""

    key: str
    reason: str = ""


class WorkerFault(Wire, frozen=True, tag=64):
    """Last message of a rank that cannot continue, with a sentence that explains it."""

    rank: int
    step: int
    message: str


# ---- Supervisor -> child, on the inherited socketpair


class ChildStart(Wire, frozen=True, tag=80):
    """A child's first message: its role and where its links are."""

    role: str  # frontend, scheduler or worker
    index: int  # its number among the processes of this role
    generation: int
    run_dir: str  # private folder of this server: sockets and rendezvous files
    model_folder: str  # the resolved checkpoint
    num_frontends: int
    args: ServerArgs
    num_tokens: int = 0  # KV tokens that a replaced worker must hold, as its predecessor did; 0: as the options say
    checkpoint_version: str = ""  # the version that the server's first processes read: a changed checkpoint is refused
    replica: int = 0  # that it is a part of; 0 for a frontend
    engines: list[int] = field(default_factory=list)  # for a frontend: the generation of each replica's present engine
    ledger: EngineLedger = field(default_factory=EngineLedger)  # what its engine, or the first one, was told
    meeting: MeetingPoints | None = None  # None: all processes are on this host


class ServerReady(Wire, frozen=True, tag=81):
    """The whole server is ready: answer requests. `startup_s` is the time since the supervisor's start."""

    startup_s: float


class Stop(Wire, frozen=True, tag=82):
    """Finish running requests within `grace_s` seconds, then end with exit code 0.

    `reason` is for the clients, if the stop was not asked for.
    """

    grace_s: float
    reason: str = ""


class EngineReplaced(Wire, frozen=True, tag=83):
    """Notice to frontends and a Runtime that a replica's scheduler ended and a new one is starting, on the links of `generation`.

    The new one knows nothing, so unfinished requests are sent to it again. `by_request`: a request may have caused the death, rather
    than a signal from outside the server.
    """

    generation: int
    by_request: bool
    replica: int = 0
    address: str = ""  # where frontends meet its scheduler; empty: in the run folder


class EngineLost(Wire, frozen=True, tag=84):
    """Notice to frontends and a Runtime that a replica has died while others serve: these take its requests over at once.

    It comes as soon as the cause is certain, and EngineReplaced follows when all processes of the replica have ended. `by_request` is
    as in EngineReplaced. `is_final`: the server is shutting down, so no new engine will come. `is_cut_off`: its host is lost, so nothing
    that it may still say is waited for.
    """

    replica: int
    by_request: bool
    is_final: bool = False
    is_cut_off: bool = False


# ---- Child -> supervisor


class Progress(Wire, frozen=True, tag=90):
    """Progress of a child's start. `phase` is a word for the display (imports, weights, memory, …); `total` is 0 when unknown.

    `at_s` is CLOCK_MONOTONIC when the phase began, so that phases of all processes lie on one time line.
    """

    phase: str
    done: int
    total: int
    at_s: float


class Ready(Wire, frozen=True, tag=91):
    """Notice that a child is ready for work. `values` are facts for the start-up report and /server_info."""

    values: dict[str, Scalar]


class Heartbeat(Wire, frozen=True, tag=92):
    """Sign of life. `progress_age_s`: seconds since this process last completed a piece of its work."""

    progress_age_s: float


class Failed(Wire, frozen=True, tag=93):
    """The sentence that says why a child ends."""

    message: str
    is_final: bool = False  # a replacement would end for the same reason


class RecordLedger(Wire, frozen=True, tag=94):
    """Order of a scheduler to keep this ledger for the next generation of its engine. It is sent before the call is answered."""

    ledger: EngineLedger


# ---- Runtime <-> supervisor, on the lifeline, whose end-of-file ends the engine. ToRuntime has the other messages that use it


class EngineStart(Wire, frozen=True, tag=100):
    """A Runtime's first message: the options, and whether to serve HTTP as well. With `secret`, the supervisor joins host 0 by it."""

    args: ServerArgs
    http: bool
    secret: bytes | None = None


class EngineStarted(Wire, frozen=True, tag=101):
    """Notice that the processes are starting: where the Runtime's frontend finds the scheduler, and its frontend number."""

    run_dir: str
    engines: list[int]  # the generation of each replica's engine
    model_folder: str
    frontend: int
    url: str | None


FromFrontend = (
    FrontendHello
    | GenerateRequest
    | Abort
    | AbortLabel
    | AckBatch
    | AskRange
    | FlushCache
    | GetState
    | PauseGeneration
    | ContinueGeneration
    | UpdateWeights
    | SetWeightVersion
    | PinResources
)
ToFrontend = (
    SchedulerHello | TokenBatch | Refused | Rejected | ControlReply | Load | LastWord | AbortLabel | WeightVersion
)
ToWorker = StepPlan | WorkPlan | Prepare | Release
FromWorker = WorkerHello | StepResult | StepAck | WorkDone | Prepared | WorkerFault
ToChild = ChildStart | ServerReady | EngineReplaced | EngineLost | Stop
FromChild = Progress | Ready | Heartbeat | Failed | RecordLedger
FromRuntime = EngineStart | Stop
ToRuntime = EngineStarted | ServerReady | EngineReplaced | EngineLost | Failed
Message = (
    FromFrontend | ToFrontend | ToWorker | FromWorker | ToChild | FromChild | FromRuntime | ToRuntime | HostMessage
)

MESSAGE_TYPES: dict[int, type[Message]] = {cls.__struct_config__.tag: cls for cls in get_args(Message)}
