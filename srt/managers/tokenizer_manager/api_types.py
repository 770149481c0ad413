"""What an API hands to the TokenizerManager, and what it gets back. Plain values: no HTTP here, no wire format."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from srt.sampling.sampling_params import SamplingParams


class RequestError(Exception):
    """This request cannot be served, and the client is told why: an HTTP status, a sentence, and the parameter at fault if one is."""

    def __init__(
        self, status: int, message: str, parameter: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.parameter = parameter
        self.retry_after_s = retry_after_s


class EngineDied(RequestError):
    """The engine went away while the request ran."""

    def __init__(self, message: str = "The engine has ended.") -> None:
        super().__init__(503, message)


@dataclass(frozen=True, slots=True)
class LogprobRequest:
    output: bool = False
    prompt_start: int = -1  # logprobs of the prompt from this token on; -1: none
    top: int = 0
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerateInput:
    """One prompt, as text or as token ids (exactly one of them)."""

    params: SamplingParams
    text: str | None = None
    input_ids: list[int] | None = None
    rid: str | None = None  # the client's name for it; drawn if absent
    logprobs: LogprobRequest = field(default_factory=LogprobRequest)
    cache_salt: str = ""
    priority: int = 0  # higher goes first, where the server has priorities
    is_logged: bool = True  # where requests are
    is_counted: bool = True  # in /metrics
    urgent: bool = False  # goes before all others: for questions about the engine's health
    stream: bool = False  # its tokens are shown as they come, so none should be late
    wants_prompt_ids: bool = False
    add_special_tokens: bool = True  # False when a chat template already wrote them
    truncate_prompt_tokens: int | None = (
        None  # keep so many of the last tokens; -1: as many as leave room for the output
    )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    logprob: float | None  # None for the first token of a prompt
    token_id: int
    top: tuple[tuple[float, int], ...] = ()  # (logprob, token id), best first
    of_ids: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    kind: str  # stop, length or abort
    matched: int | str | None = None  # the stop id, stop string or stop regex that ended it
    length: int | None = None  # of kind length
    message: str = ""  # of kind abort


class ChoiceTimes(Struct, frozen=True, gc=False):
    """When what happened to a choice. `arrived_s` is a time of the process's clock, all others are seconds since then."""

    arrived_s: float
    sent_s: float  # to the scheduler
    first_token_s: float | None = None
    last_token_s: float | None = None
    queue_s: float | None = None  # from the scheduler's having it to its slot


class ChoiceUpdate(Struct, frozen=True, gc=False):
    """News of one choice: what came since its last update. With `finish` it is the last one. A request with n choices ends with the
    last finish of all. Concatenated text and ids of all updates are the answer. One is made for every chunk."""

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
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # whole, with the first update of the choice, if asked for
    prompt_ids: tuple[int, ...] = ()  # with the first update of the choice, if asked for
    num_preempted: int = 0  # known with the finish
    times: ChoiceTimes | None = None  # with the finish
