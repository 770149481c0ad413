"""Request bodies of /v1/completions and /v1/chat/completions: the current OpenAI parameters, and SGLang's extras."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from srt.constrained.constraint import Constraint, read_constraint
from srt.entrypoints.openai.messages import MAX_MESSAGES, MESSAGE_SCHEMA
from srt.entrypoints.openai.tools import TOOL_SCHEMA
from srt.entrypoints.request_schema import (
    ADAPTER_NAME,
    ADAPTER_TEXT,
    LABEL,
    MODEL_NAME,
    NAME,
    NOT_EMPTY,
    PRIORITY,
    REPLICA,
    ROUTED_ALIAS_TEXT,
    ROUTED_TEXT,
    TOKEN_ID,
    TRUNCATION,
    RequestBody,
    bad_parameter,
    cache_namespace,
    described,
    routed_replica,
)
from srt.managers.tokenizer_manager.api_types import LogprobRequest
from srt.sampling.parameter_checks import ParameterError
from srt.sampling.sampling_params import MAX_CHOICES, MAX_TOP_LOGPROBS

COMPLETION_MAX_TOKENS = 16  # OpenAI's default

# A parameter's name in this API -> its name in the engine.
SAMPLING_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "min_p": "min_p",
        "frequency_penalty": "frequency_penalty",
        "presence_penalty": "presence_penalty",
        "repetition_penalty": "repetition_penalty",
        "logit_bias": "logit_bias",
        "n": "n",
        "stop": "stop",
        "stop_token_ids": "stop_token_ids",
        "stop_regex": "stop_regex",
        "no_stop_trim": "no_stop_trim",
        "include_stop_str_in_output": "include_stop_str_in_output",
        "bad_words": "bad_words",
        "ignore_eos": "ignore_eos",
        "skip_special_tokens": "skip_special_tokens",
        "spaces_between_special_tokens": "spaces_between_special_tokens",
        "min_tokens": "min_new_tokens",
        "max_tokens": "max_new_tokens",
        "max_completion_tokens": "max_new_tokens",
        "seed": "sampling_seed",
    }
)
_RENAMED = [("max_tokens", "max_new_tokens"), ("min_tokens", "min_new_tokens"), ("seed", "sampling_seed")]
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


_CONSTRAINTS = ("response_format", "json_schema", "regex", "ebnf", "structural_tag", "structured_outputs")
_TOP: Mapping[str, Any] = MappingProxyType({"minimum": 0, "maximum": MAX_TOP_LOGPROBS})


class StreamOptions(BaseModel):
    """Options of a stream; refused without stream."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    include_usage: bool | None = described("Send a last chunk with the usage.")
    continuous_usage_stats: bool | None = described("Write the usage so far into every chunk.")
    include_obfuscation: bool | None = described("Must be false: chunks are not padded against eavesdropping.")


class OpenAIBody(RequestBody):
    """Fields that both endpoints share."""

    SAMPLING: ClassVar[Mapping[str, str]] = SAMPLING_NAMES

    model: str | None = described(
        "One of the server's model names (/v1/models), LoRA adapters' included; its first one if absent or `default`.",
        string=MODEL_NAME,
    )
    lora_path: str | None = described(ADAPTER_TEXT, string=ADAPTER_NAME)
    stream: bool = described("Send the output as server-sent events, as it is generated.", False)
    stream_options: StreamOptions | None = described("Options of a stream. Needs stream.")
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None

    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_token_ids: int | list[int] | None = None
    stop_regex: str | list[str] | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: str | list[str] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    rid: str | None = described("A name for the request, for /abort_request, and the id of the answer.", string=NAME)
    request_id: str | None = described("An alias of rid.", string=NAME)
    truncate_prompt_tokens: int | None = described(
        "Number of tokens to keep at the prompt's end, including the special tokens around it; -1: as many as leave room for the"
        " output.",
        integer=TRUNCATION,
    )
    cache_salt: str = described("Prefixes are shared only between requests with the same salt.", "", string=LABEL)
    extra_key: str = described("The same as cache_salt; both may be given.", "", string=LABEL)
    priority: int = described("Higher runs first, if the server schedules by priority.", 0, integer=PRIORITY)
    routed_dp_rank: int | None = described(ROUTED_TEXT, integer=REPLICA)
    data_parallel_rank: int | None = described(ROUTED_ALIAS_TEXT, integer=REPLICA)
    prompt_logprobs: int | None = described(
        "Return the log-probability of every prompt token, and of this number of likeliest tokens at each position. Not with stream.",
        integer=_TOP,
    )
    return_token_ids: bool = described("Return the token ids of the prompt and of the output.", False)
    return_tokens_as_token_ids: bool = described("Write tokens as `token_id:ID` in logprobs.", False)
    return_cached_tokens_details: bool = described("Return the places of the prompts' cached tokens, in sglext.", False)
    response_format: dict[str, Any] | None = described(
        "The form of the answer: an object with the type `text`, `json_object`, `json_schema` or `structural_tag`."
    )
    json_schema: str | dict[str, Any] | None = described("A JSON Schema that the answer is valid by.")
    regex: str | None = described("A regular expression that the whole answer matches.")
    ebnf: str | None = described("A grammar of the answer, in GBNF or Lark.")
    structural_tag: str | dict[str, Any] | None = described("Tags, and the form of the text within each.")
    structured_outputs: dict[str, Any] | None = described(
        "The form of the answer, by one of the members `json`, `regex`, `choice`, `grammar`, `json_object` and `structural_tag`."
    )
    no_logs: bool = described("Do not log this request, even if the server logs requests.", False)
    log_metrics: bool = described("Count this request in /metrics.", True)

    def sampling(self) -> dict[str, Any]:
        """Return the given sampling parameters by the engine's names."""
        given = {
            ours: value for theirs, ours in SAMPLING_NAMES.items() if (value := getattr(self, theirs, None)) is not None
        }
        if self.seed is not None:
            if not -(1 << 63) <= self.seed < 1 << 64:
                raise bad_parameter("seed", f"must be a 64-bit integer, not {self.seed}")
            given["sampling_seed"] = self.seed % (1 << 64)
        return given

    def constraint(self) -> Constraint | None:
        """Return what the answer must look like; None: it is free."""
        try:
            return read_constraint({name: getattr(self, name) for name in _CONSTRAINTS})
        except ParameterError as error:
            raise bad_parameter(error.name, error.reason) from error

    def written_as(self, prompt: str) -> dict[str, str]:
        """Return the engine's names of parameters -> the names this client used, for the texts of errors."""
        rid = {"rid": "request_id"} if self.rid is None and self.request_id is not None else {}
        return {
            **rid,
            **{ours: theirs for theirs, ours in _RENAMED},
            "input_ids": prompt,
            "text": prompt,
            "tokens": prompt,
        }

    @property
    def name(self) -> str | None:
        """The client's name for the request, from rid or request_id; None if it gave none."""
        if None not in (self.rid, self.request_id) and self.rid != self.request_id:
            raise bad_parameter("request_id", "and rid are two names of one parameter: give one of them")
        name = self.request_id if self.rid is None else self.rid
        if name == "":
            raise bad_parameter("rid" if self.rid is not None else "request_id", "must not be empty")
        return name

    @property
    def salt(self) -> str:
        return cache_namespace(self.cache_salt, self.extra_key)

    @property
    def replica(self) -> int | None:
        return routed_replica(self.routed_dp_rank, self.data_parallel_rank)

    def check_prompt_logprobs(self) -> int:
        """Return the number of likeliest tokens to show at each position of the prompt; refuse values that cannot be served."""
        if self.prompt_logprobs is not None and self.stream:
            raise bad_parameter("prompt_logprobs", "is not available in a stream: set stream to false")
        top = self.prompt_logprobs or 0
        _check_top("prompt_logprobs", top)
        return top

    def check_stream_options(self) -> StreamOptions:
        if self.stream_options is None:
            return StreamOptions()
        if not self.stream:
            raise bad_parameter("stream_options", "may be given only with stream: true")
        if self.stream_options.include_obfuscation:
            raise bad_parameter("stream_options.include_obfuscation", "is not supported yet")
        return self.stream_options


class CompletionBody(OpenAIBody):
    """POST /v1/completions."""

    FAMILY: ClassVar[str] = "completions"

    prompt: str | list[str] | list[int] | list[list[int]] = described(
        "A text, a list of token ids, or a list of either.", ..., integer=TOKEN_ID, array=NOT_EMPTY
    )
    add_special_tokens: bool = described("Put the model's special tokens (BOS) around a text.", True)
    echo: bool = described("Write the prompt before the output, and its logprobs before the output's.", False)
    logprobs: int | None = described(
        "Return the log-probability of every token, and of this number of likeliest tokens at each position.",
        integer=_TOP,
    )
    best_of: int | None = described("Must equal n, if it is given.", integer={"minimum": 1, "maximum": MAX_CHOICES})

    def logprob_request(self) -> LogprobRequest:
        top = self.logprobs or 0
        _check_top("logprobs", top)
        output = self.logprobs is not None
        of_prompt = (output and self.echo) or self.prompt_logprobs is not None
        return LogprobRequest(output, prompt_start=0 if of_prompt else -1, top=max(top, self.check_prompt_logprobs()))


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions."""

    FAMILY: ClassVar[str] = "chat"

    messages: list[dict[str, Any]] = described(
        "The conversation so far.", ..., minItems=1, maxItems=MAX_MESSAGES, items=MESSAGE_SCHEMA
    )
    logprobs: bool = described("Return the log-probability of every generated token.", False)
    top_logprobs: int | None = described(
        "Number of likeliest tokens to return logprobs for at each position. Needs logprobs.", integer=_TOP
    )
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = described(
        "Let the template open the assistant's message (default: unless continue_final_message)."
    )
    add_special_tokens: bool = described(
        "Put the model's special tokens (BOS) around the template's text, which usually has them already.", False
    )
    continue_final_message: bool = described("Continue the last message, which must be the assistant's.", False)
    chat_template_kwargs: dict[str, Any] = described("Variables for the model's chat template.", {})
    tools: list[dict[str, Any]] = described("Functions that the model may call.", [], items=TOOL_SCHEMA)
    tool_choice: str | dict[str, Any] | None = described(
        "auto: the model decides on calls; none: it is told of no tools; required: the answer is at least one call;"
        " an object: it is one call of this tool.",
        string={"enum": ["auto", "none", "required"]},
    )
    parallel_tool_calls: bool = described("If false, an answer has one call at most.", True)
    reasoning_effort: str | None = described(
        "How much the model reasons, for chat templates that have this variable; none: not at all, where the template can do so.",
        string={"enum": list(EFFORTS)},
    )
    separate_reasoning: bool = described("Return reasoning as reasoning_content; if false, within the content.", True)
    stream_reasoning: bool = described("Stream reasoning as it comes; if false, at its end.", True)

    def written_as(self, prompt: str) -> dict[str, str]:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {**super().written_as(prompt), "max_new_tokens": limit}

    def logprob_request(self) -> LogprobRequest:
        top = self.top_logprobs or 0
        _check_top("top_logprobs", top)
        if top and not self.logprobs:
            raise bad_parameter("top_logprobs", "needs logprobs: true")
        prompt_start = -1 if self.prompt_logprobs is None else 0
        return LogprobRequest(self.logprobs, prompt_start, top=max(top, self.check_prompt_logprobs()))

    def check_limits(self) -> None:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise bad_parameter("max_tokens", "and max_completion_tokens exclude each other: give one of them")


def _check_top(name: str, top: int) -> None:
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise bad_parameter(name, f"must be at least 0 and at most {MAX_TOP_LOGPROBS}, not {top}")
