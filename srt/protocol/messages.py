"""Every message that travels between processes, and the one table that numbers them.

Directions: a frontend (or a Runtime) and a scheduler; a scheduler and its workers; a supervisor and its children. Messages are
immutable and stay as sent. Arrays are little-endian int32, int64 or float32 and travel as raw bytes. `codec.py` turns them into
MessagePack and checks every field on the way back; `links.py` adds generation and sequence number.
"""

from __future__ import annotations

from typing import Any, Final, get_args

import numpy as np
from msgspec import Struct, field

from srt.server_args import ServerArgs

# Written out, since the codec compares them and newer versions of numpy make NDArray an alias that equals nothing.
Int32Array = np.ndarray[tuple[Any, ...], np.dtype[np.int32]]
Int64Array = np.ndarray[tuple[Any, ...], np.dtype[np.int64]]
Float32Array = np.ndarray[tuple[Any, ...], np.dtype[np.float32]]
Scalar = str | int | float | bool | None

# A request that is so many tokens further than it was when workers died has done no harm: its trial is over, and who is further still
# had nothing to do with that death. Where it was is known but for steps that were in flight, so fewer would prove nothing.
TRIAL_TOKENS: Final = 4


def int32_array(values: object = ()) -> Int32Array:
    return np.asarray(values, dtype=np.int32)


class Wire(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A message, which `tag` numbers, or a part of one. Its fields travel as a list in this order, and all of them must be there."""


# ---- Parts that several messages share


class SamplingSpec(Wire, frozen=True):
    """What the engine must know to draw the tokens of one request. Checked and completed by the frontend."""

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
    """Which logprobs a request asked for. They are the model's own: before temperature, bias and filters."""

    output: bool = False  # of each sampled token
    prompt_start: int = -1  # of prompt tokens from this index on; -1: none
    top: int = 0  # so many best tokens beside each of them
    ids: Int32Array = field(default_factory=int32_array)  # and these tokens


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


# ---- Frontend (or Runtime) -> scheduler


class FrontendHello(Wire, frozen=True, tag=1):
    """The first message on the link: who I am. A frontend that comes again under the same number replaces the old one."""

    frontend: int
    protocol_hash: str


class GenerateRequest(Wire, frozen=True, tag=2):
    """Begin a request, or resume it: `output_ids[i]` are the tokens that choice `choices[i]` was already given (normally none)."""

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
    resumed: bool = False  # a scheduler that has died had taken it: it is not turned away for want of room
    urgent: bool = (
        False  # a question about the engine's health: goes before all others, in the place of one that runs if need be
    )
    stream: bool = False  # somebody watches its tokens come: steps that have it are short
    suspect: bool = (
        False  # workers have died of what may have been this request: it has to show, alone, that it does no harm
    )


class Abort(Wire, frozen=True, tag=3):
    """The client left, or a stop string was found. `choice` -1 means all choices. May cross the last token on the wire."""

    rid: int
    choice: int


class AbortLabel(Wire, frozen=True, tag=4):
    """Abort the live requests that are named so (`labels.is_named`), whichever frontend sent them; the empty label aborts all.

    Answered by ControlReply, and passed on to the other frontends, for what they are about to send.
    """

    call: int
    label: str


class AckBatch(Wire, frozen=True, tag=5):
    """All batches up to and including `number` were taken over."""

    number: int


class AskRange(Wire, frozen=True, tag=6):
    """Send again the tokens of this choice from this output index on: a gap was seen."""

    rid: int
    choice: int
    first: int


class FlushCache(Wire, frozen=True, tag=7):
    """Forget the prefix cache. Answered by ControlReply: not ok when requests are running."""

    call: int


class GetState(Wire, frozen=True, tag=8):
    """Ask for the scheduler's counters. With `deep` every worker is asked for its tables too and all are compared."""

    call: int
    deep: bool


class PauseGeneration(Wire, frozen=True, tag=9):
    """Make no more plans until ContinueGeneration. Answered by ControlReply once no step is in flight; not ok if that came earlier.

    What runs: `abort` ends it, as well as all that waits; `retract` preempts it, so that the cache can be flushed; `in_place`
    leaves it where it is.
    """

    call: int
    mode: str


class ContinueGeneration(Wire, frozen=True, tag=10):
    """Go on after PauseGeneration. Answered by ControlReply, also where nothing was paused."""

    call: int


# ---- Scheduler -> frontend


class SchedulerHello(Wire, frozen=True, tag=20):
    """Answer to FrontendHello, sent once the workers are ready: the limits that requests are checked against."""

    max_total_num_tokens: int
    max_request_tokens: int  # prompt + output of one request
    page_size: int


class RequestDone(Wire, frozen=True):
    """One choice ended. `reason` is stop, length, abort or error; `matched` the stop id or -1. Behind its last tokens."""

    rid: int
    choice: int
    reason: str
    matched: int
    num_output: int  # how many output tokens the choice had in all
    cached_tokens: int
    status: int = 0  # HTTP status of an error
    message: str = ""
    num_preempted: int = 0  # so often it lost its slot to others
    retry_after_s: int = 0  # of a 503: when another try may have better luck
    queue_s: float = -1.0  # from its arrival to its slot; negative if it never had one


class TokenBatch(Wire, frozen=True, tag=21):
    """New tokens of a frontend's requests, as ranges: row i carries `counts[i]` ids of choice `choices[i]` of request `rids[i]`
    from output index `first[i]` on; `ids` holds all rows end to end. `cached[i]` of that choice's prompt tokens came from the cache."""

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
    """The request was not taken: nothing else will come for it."""

    rid: int
    status: int
    message: str
    retry_after_s: int = 0  # of a 429 or 503: when another try may have better luck


class Rejected(Wire, frozen=True, tag=23):
    """A message from you was broken or unknown, and was dropped."""

    reason: str


class ControlReply(Wire, frozen=True, tag=24):
    """Answer to FlushCache, GetState, AbortLabel, PauseGeneration or ContinueGeneration with the same call number."""

    call: int
    ok: bool
    message: str
    values: dict[str, Scalar]


class Load(Wire, frozen=True, tag=25):
    """The scheduler's load, with every change worth telling (at most a few times a second)."""

    num_running: int
    num_waiting: int
    num_free_pages: int
    num_steps: int


class LastWord(Wire, frozen=True, tag=26):
    """This scheduler ends before its time. Choices `choices[i]` of requests `rids[i]` were in steps that the workers have not answered;
    `is_alone`: there was no other."""

    rids: Int64Array
    choices: Int32Array
    is_alone: bool


# ---- Scheduler -> worker: one numbered stream, the same for every rank


class Admission(Wire, frozen=True):
    """A request gets a slot: all ids that are known, and where its cached prefix ends (`cached` positions need no computing)."""

    slot: int
    ids: Int32Array
    prompt_len: int
    cached: int
    seed: int
    sampling: SamplingSpec
    logprobs: LogprobSpec


class PageDelta(Wire, frozen=True):
    """Pages to append to rows of one page group's table: `counts[i]` pages for `slots[i]`; `pages` holds all of them end to end."""

    slots: Int32Array
    counts: Int32Array
    pages: Int32Array


class PlanSection(Wire, frozen=True):
    """What one attention group does in a step. Rows are the extends, then the decodes, in this order. All empty: idle."""

    admissions: list[Admission]
    pages: list[PageDelta]  # one per page group
    extend_slots: Int32Array
    extend_starts: Int32Array
    extend_counts: Int32Array
    extend_samples: Int32Array  # 1: the chunk ends at the last known token, so it samples
    decode_slots: Int32Array  # every decode row samples


class StepPlan(Wire, frozen=True, tag=40):
    """One step of the model, as a delta to what the worker's tables hold."""

    step: int
    sections: list[PlanSection]  # one per attention group


class WorkPlan(Wire, frozen=True, tag=41):
    """Work that all ranks do together, in the stream of steps.

    `kind` is `reset` (empty all tables), `inspect` (report them) or `capture` (make one more of the graphs that WorkerHello counts).
    """

    step: int
    kind: str


# ---- Worker -> scheduler


class WorkerHello(Wire, frozen=True, tag=60):
    """The first message of a rank: what it is and holds. All ranks must agree before the replica is ready."""

    rank: int
    protocol_hash: str
    config_hash: str
    dtype: str
    page_size: int
    num_pages: int
    num_slots: int
    max_request_tokens: int
    vocab_size: int
    max_row_tokens: int = 1  # ids that a row which decodes may get in one step
    num_stages: int = 1  # of the pipeline: of so many consecutive steps, a row is in one at most
    num_graphs: int = 0  # that make steps quicker once `capture` has made them


class RowLogprobs(Wire, frozen=True):
    """Logprobs of a row of the step: of its sampled ids, or of prompt tokens from index `first` on (`is_prompt`)."""

    slot: int
    is_prompt: bool
    first: int
    chosen: Float32Array
    top_ids: Int32Array
    top: Float32Array
    of_ids: Float32Array


class StepResult(Wire, frozen=True, tag=61):
    """The sampled ids of a step, from rank 0 of the last stage: `counts[i]` ids for the i-th row that samples.

    That is 1 for the end of a prompt, 0 to `max_row_tokens` for a decode, and -1 (no ids) where the model gave no finite logits.
    `ids_hash` is compared with other ranks'; a rank that is alone says 0. `wants_capture`: the steps launched so far miss a graph that is
    worth its capture even while requests run.
    """

    step: int
    counts: Int32Array
    ids: Int32Array
    ids_hash: int
    logprobs: list[RowLogprobs]
    step_us: int
    wants_capture: bool = False


class StepAck(Wire, frozen=True, tag=62):
    """Any other rank's word that a step is done, with the hash of the ids that it drew: a difference is a worker fault."""

    step: int
    rank: int
    ids_hash: int
    step_us: int


class WorkDone(Wire, frozen=True, tag=63):
    """A WorkPlan is done on this rank.

    `inspect` reports `tables_hash`: hex of an 8-byte blake2b over, for every slot that was ever admitted since the last reset, in
    ascending order, little-endian int32 slot, page count and the pages of its latest admission, as read back from the device's
    table. The scheduler computes the same from what it sent. `num_slots_seen` counts those slots. `capture` reports `num_left`, as before
    while something has to be compiled for the next graph.
    """

    step: int
    rank: int
    values: dict[str, Scalar]


class WorkerFault(Wire, frozen=True, tag=64):
    """This rank cannot go on: the sentence that explains it is its last message."""

    rank: int
    step: int
    message: str


# ---- Supervisor -> child, on the inherited socketpair


class ChildStart(Wire, frozen=True, tag=80):
    """What a child is and where its links are. The first message that it gets."""

    role: str  # frontend, scheduler or worker
    index: int  # frontend number, or rank
    generation: int
    run_dir: str  # private folder of this server: sockets and rendezvous files
    model_folder: str  # the resolved checkpoint
    num_frontends: int
    args: ServerArgs
    num_tokens: int = 0  # that a worker's KV memory must hold, since its predecessor's did; 0: as the options say
    checkpoint_version: str = ""  # that the checkpoint must have, since the server's first processes read it so


class ServerReady(Wire, frozen=True, tag=81):
    """The whole server is ready: answer requests. `startup_s` is the time since the supervisor's start."""

    startup_s: float


class Stop(Wire, frozen=True, tag=82):
    """Finish what runs within `grace_s` seconds, then end with exit code 0. `reason` is why, if it was not asked for: clients are told."""

    grace_s: float
    reason: str = ""


class EngineReplaced(Wire, frozen=True, tag=83):
    """To frontends, and to a Runtime: the scheduler has ended. Another one is on its way, on the links of this generation; it knows
    nothing, so ask it again for what was asked of the old one. `by_request`: what it died of may have been a request, and not somebody
    else on this host."""

    generation: int
    by_request: bool


# ---- Child -> supervisor


class Progress(Wire, frozen=True, tag=90):
    """How far the start has come. `phase` is a word for the display (imports, weights, memory, …); `total` 0 when unknown.

    `at_s` is CLOCK_MONOTONIC when the phase began, so that phases of all processes lie on one time line.
    """

    phase: str
    done: int
    total: int
    at_s: float


class Ready(Wire, frozen=True, tag=91):
    """This child does its work from now on. `values` are facts for the start-up report and /server_info."""

    values: dict[str, Scalar]


class Heartbeat(Wire, frozen=True, tag=92):
    """Alive. `progress_age_s`: since this process last completed what it had to do."""

    progress_age_s: float


class Failed(Wire, frozen=True, tag=93):
    """The one sentence why this child ends."""

    message: str
    is_final: bool = False  # another one in its place would end for the same reason


# ---- Runtime -> supervisor, and back, on the lifeline: its end-of-file ends the engine, and Stop, ServerReady, EngineReplaced and Failed
# travel there too


class EngineStart(Wire, frozen=True, tag=100):
    """The first message of a Runtime: the options, and whether to serve HTTP as well."""

    args: ServerArgs
    http: bool


class EngineStarted(Wire, frozen=True, tag=101):
    """The processes are on their way: where a frontend finds the scheduler, and the number that it must use."""

    run_dir: str
    generation: int
    model_folder: str
    frontend: int
    url: str | None


Message = (
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
    | SchedulerHello
    | TokenBatch
    | Refused
    | Rejected
    | ControlReply
    | Load
    | LastWord
    | StepPlan
    | WorkPlan
    | WorkerHello
    | StepResult
    | StepAck
    | WorkDone
    | WorkerFault
    | ChildStart
    | ServerReady
    | EngineReplaced
    | Stop
    | Progress
    | Ready
    | Heartbeat
    | Failed
    | EngineStart
    | EngineStarted
)
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
)
ToFrontend = SchedulerHello | TokenBatch | Refused | Rejected | ControlReply | Load | LastWord | AbortLabel
ToWorker = StepPlan | WorkPlan
FromWorker = WorkerHello | StepResult | StepAck | WorkDone | WorkerFault
ToChild = ChildStart | ServerReady | EngineReplaced | Stop
FromChild = Progress | Ready | Heartbeat | Failed
FromRuntime = EngineStart | Stop
ToRuntime = EngineStarted | ServerReady | EngineReplaced | Failed

MESSAGE_TYPES: dict[int, type[Message]] = {cls.__struct_config__.tag: cls for cls in get_args(Message)}
