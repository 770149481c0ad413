"""GenerateRequest and Admission as the scheduler handles them: the same bytes on the wire, but with arrays left as bytes.

The scheduler decodes a GenerateRequest as a `RequestView`, and sends an `AdmissionView` that the workers decode as an Admission. It
only compares these arrays or passes them on, and decoding one array costs as much as all other fields of its message together.
"""

from __future__ import annotations

from typing import Final

from msgspec.msgpack import Ext

from srt.protocol.engine_work import SetWeightVersion, UpdateWeights
from srt.protocol.messages import (
    Abort,
    AbortLabel,
    AckBatch,
    AskRange,
    ContinueGeneration,
    FlushCache,
    FrontendHello,
    GenerateRequest,
    GetState,
    PauseGeneration,
    PinResources,
    Resource,
    Wire,
)


class SamplingView(Wire, frozen=True):
    """A SamplingSpec with its arrays as bytes."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    min_new_tokens: int
    stop_ids: bytes
    bias_ids: bytes
    bias_values: Ext


class LogprobView(Wire, frozen=True):
    """A LogprobSpec with its array as bytes."""

    output: bool
    prompt_start: int
    top: int
    ids: bytes


class RequestView(Wire, frozen=True, tag=GenerateRequest.__struct_config__.tag):
    """A GenerateRequest with its arrays as bytes."""

    rid: int
    label: str
    prompt_ids: bytes
    choices: bytes
    output_ids: list[bytes]
    sampling: SamplingView
    logprobs: LogprobView
    seed: int
    priority: int
    cache_salt: str
    resumed: bool
    urgent: bool
    stream: bool
    suspect: bool
    resource: Resource | None
    adapter: Resource | None


class AdmissionView(Wire, frozen=True):
    """An Admission with its arrays as bytes."""

    slot: int
    ids: bytes
    prompt_len: int
    cached: int
    seed: int
    sampling: SamplingView
    logprobs: LogprobView
    resource: str
    adapter: str


FromFrontendView = (
    FrontendHello
    | RequestView
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
FROM_FRONTEND: Final = (
    FrontendHello,
    Abort,
    AbortLabel,
    AckBatch,
    AskRange,
    FlushCache,
    GetState,
    PauseGeneration,
    ContinueGeneration,
    UpdateWeights,
    SetWeightVersion,
    PinResources,
)
"""These classes but for RequestView, which is the most frequent one and asked for first."""
