"""Input and output types of the TokenizerManager. Plain values: no HTTP here, no wire format."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

from srt.protocol.messages import Float32Array
from srt.sampling.sampling_params import SamplingParams


class RequestError(Exception):
    """A refusal or failure to report to the client: an HTTP status, a sentence, and the parameter at fault, if any."""

    def __init__(
        self, status: int, message: str, parameter: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.parameter = parameter
        self.retry_after_s = retry_after_s


class EngineDied(RequestError):
    """The engine has ended, so the request cannot be finished."""

    def __init__(self, message: str = "The engine has ended.") -> None:
        super().__init__(503, message)


@dataclass(frozen=True, slots=True)
class LogprobRequest:
    output: bool = False
    prompt_start: int = -1  # first prompt token to give logprobs for; -1: no prompt logprobs
    top: int = 0
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerateInput:
    """The input of a request: a prompt, as text or as token ids (exactly one of them), and its options."""

    params: SamplingParams
    text: str | None = None
    input_ids: list[int] | None = None
    rid: str | None = None  # the client's name for the request; None: a random one
    logprobs: LogprobRequest = field(default_factory=LogprobRequest)
    cache_salt: str = ""
    adapter: str | None = None  # name of a LoRA adapter
    priority: int = 0  # higher runs first, if the server schedules by priority
    is_logged: bool = True  # False: not logged even if requests are
    is_counted: bool = True  # in /metrics
    replica: int | None = None  # that begins to run it; None: the router chooses
    urgent: bool = False  # runs before all others: for health probes
    stream: bool = False  # tokens are shown as they come, so each should be in time
    wants_prompt_ids: bool = False
    add_special_tokens: bool = True  # False when a chat template already wrote them
    # Number of tokens to keep at the prompt's end; -1: as many as leave room for the output.
    truncate_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    logprob: float | None  # None for the first token of a prompt
    token_id: int
    top: tuple[tuple[float, int], ...] = ()  # (logprob, token id), best first
    of_ids: tuple[tuple[float, int], ...] = ()  # the same for the ids that were asked for
    vector: Float32Array | None = None  # what a model that pools made of the prompt


@dataclass(frozen=True, slots=True)
class Finish:
    kind: Literal["stop", "length", "abort"]
    matched: int | str | None = None  # the stop id, stop string or stop regex that ended it
    length: int | None = None  # only for the kind length
    message: str = ""  # only for the kind abort


class ChoiceTimes(Struct, frozen=True, gc=False):
    """Times of a choice's events. `arrived_s` is a time of the process's clock; all others are seconds since then."""

    arrived_s: float
    sent_s: float  # to the scheduler
    first_token_s: float | None = None
    last_token_s: float | None = None
    queue_s: float | None = None  # wait in the scheduler until the request got a slot


class ChoiceUpdate(Struct, frozen=True, gc=False):
    """The text and tokens of one choice since its last update; one update is made for every chunk.

    The update with `finish` is the choice's last; a request ends when all its choices have finished. The texts and ids of all updates,
    end to end, are the answer.
    """

    index: int
    text: str
    ids: tuple[int, ...]
    prompt_tokens: int
    completion_tokens: int  # so far, this update included
    cached_tokens: int
    seed: int  # of this choice's draws
    rid: str
    finish: Finish | None = None
    output_logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # all of them, with the first update of the choice, if asked for
    prompt_ids: tuple[int, ...] = ()  # with the first update of the choice, if asked for
    num_preempted: int = 0  # known with the finish
    num_verified: int = 0  # steps that verified drafts, known with the finish
    num_verified_ids: int = 0  # that these steps brought
    weight_version: str = ""  # of the weights at the finish, known with it
    times: ChoiceTimes | None = None  # with the finish
    replica: int | None = (
        None  # that runs the request, if the server has several; with the first update, logprobs and the finish
    )
