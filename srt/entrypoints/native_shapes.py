"""The JSON of the native API's requests and answers, the same for /generate and Runtime.generate."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import ConfigDict

from srt.entrypoints.answers import (
    CachedTokensDetails,
    FinishReason,
    Generated,
    Logprobs,
    MetaInfo,
    Row,
    Speculation,
    Times,
)
from srt.entrypoints.request_schema import (
    ADAPTER_NAME,
    ADAPTER_TEXT,
    LABEL,
    NAME,
    NOT_EMPTY,
    PRIORITY,
    REPLICA,
    ROUTED_ALIAS_TEXT,
    ROUTED_TEXT,
    TOKEN_ID,
    TRUNCATION,
    RequestBody,
    SamplingParamsOf,
    bad_parameter,
    cache_namespace,
    checked_sampling_params,
    described,
    routed_replica,
)
from srt.managers.tokenizer_manager.api_types import (
    ChoiceTimes,
    ChoiceUpdate,
    Finish,
    GenerateInput,
    LogprobRequest,
    RequestError,
    TokenLogprob,
)
from srt.protocol.labels import numbered
from srt.sampling.parameter_checks import show
from srt.sampling.sampling_params import MAX_TOP_LOGPROBS

MAX_BATCH = 4096
MAX_BATCH_REGEXES = 256  # each blocks the event loop for a millisecond or more
TokenText = Callable[[int], str]


class GenerateBody(RequestBody):
    """POST /generate. A list where one prompt would have one value makes it a batch."""

    FAMILY: ClassVar[str] = "native"
    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["text"]}, {"required": ["input_ids"]}]})

    text: str | list[str] | None = described("The prompt. Either this or input_ids is required.", array=NOT_EMPTY)
    input_ids: list[int] | list[list[int]] | None = described(
        "The prompt as token ids.", integer=TOKEN_ID, array=NOT_EMPTY
    )
    sampling_params: dict[str, Any] | list[dict[str, Any]] = described(
        "Parameters of sampling and of the output's end. Absent ones have the model's defaults.", {}
    )
    lora_path: str | list[str | None] | None = described(ADAPTER_TEXT, string=ADAPTER_NAME)
    stream: bool = described("Send the output as server-sent events, as it is generated.", False)
    rid: str | list[str] | None = described(
        "A name for the request, for /abort_request. In a batch, prompt i of `x` is named `x_i`.",
        string=NAME,
    )
    return_logprob: bool | list[bool] = described("Return the log-probability of every generated token.", False)
    logprob_start_len: int | list[int] = described(
        "First prompt token to return logprobs for; -1: none. Needs return_logprob.",
        -1,
        integer={"minimum": -1},
    )
    top_logprobs_num: int | list[int] = described(
        "Number of likeliest tokens to return logprobs for at each position. Needs return_logprob.",
        0,
        integer={"minimum": 0, "maximum": MAX_TOP_LOGPROBS},
    )
    token_ids_logprob: list[int] | list[list[int]] = described(
        "Token ids to return logprobs for at each position. Needs return_logprob.", [], integer=TOKEN_ID
    )
    return_text_in_logprobs: bool = described("Write each token's text into its logprobs.", False)
    return_prompt_token_ids: bool = described("Return the token ids of the prompt.", False)
    extra_key: str | list[str] = described(
        "Prefixes are shared only between requests with the same key.", "", string=LABEL
    )
    cache_salt: str | list[str] = described("The same as extra_key; both may be given.", "", string=LABEL)
    priority: int | list[int] = described(
        "Higher runs first, if the server schedules by priority.", 0, integer=PRIORITY
    )
    routed_dp_rank: int | None = described(ROUTED_TEXT, integer=REPLICA)
    data_parallel_rank: int | None = described(ROUTED_ALIAS_TEXT, integer=REPLICA)
    return_cached_tokens_details: bool = described("Without effect: meta_info always has cached_tokens_details.", False)
    truncate_prompt_tokens: int | None = described(
        "Number of tokens to keep at each prompt's end, including the special tokens around it; -1: as many as leave room for the"
        " output.",
        integer=TRUNCATION,
    )
    no_logs: bool = described("Do not log this request, even if the server logs requests.", False)
    log_metrics: bool = described("Count this request in /metrics.", True)


@dataclass(frozen=True, slots=True)
class NativeCall:
    """A parsed request of the native API."""

    inputs: list[GenerateInput]
    is_list: bool  # the answer is a list: a batch, or more than one choice
    stream: bool
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False


def parse_generate(body: object, sampling_params: SamplingParamsOf) -> NativeCall:
    """Parse a /generate body; raise RequestError (400) with the parameter at fault. `sampling_params` completes and checks one dict."""
    given = GenerateBody.parse(body)
    prompts, is_batch = _prompts(given)
    count = len(prompts)
    params = _per_prompt("sampling_params", given.sampling_params, count, is_batch)
    _check_num_regexes(params)
    rids = _rids(given.rid, count, is_batch)
    wants_logprob = _per_prompt("return_logprob", given.return_logprob, count, is_batch)
    starts = _per_prompt("logprob_start_len", given.logprob_start_len, count, is_batch)
    tops = _per_prompt("top_logprobs_num", given.top_logprobs_num, count, is_batch)
    token_ids = _per_prompt_ids(given.token_ids_logprob, count, is_batch)
    salts = _per_prompt("cache_salt", given.cache_salt, count, is_batch)
    keys = _per_prompt("extra_key", given.extra_key, count, is_batch)
    adapters = _per_prompt("lora_path", given.lora_path or None, count, is_batch)
    priorities = _per_prompt("priority", given.priority, count, is_batch)
    inputs = [
        GenerateInput(
            params=checked_sampling_params(params[i], sampling_params),
            text=prompts[i] if isinstance(prompts[i], str) else None,
            input_ids=None if isinstance(prompts[i], str) else prompts[i],
            rid=rids[i],
            logprobs=_logprob_request(wants_logprob[i], starts[i], tops[i], token_ids[i]),
            cache_salt=cache_namespace(salts[i], keys[i]),
            priority=priorities[i],
            adapter=adapters[i] or None,
            replica=routed_replica(given.routed_dp_rank, given.data_parallel_rank),
            stream=given.stream,
            is_logged=not given.no_logs,
            is_counted=given.log_metrics,
            truncate_prompt_tokens=given.truncate_prompt_tokens,
            wants_prompt_ids=given.return_prompt_token_ids,
        )
        for i in range(count)
    ]
    check_num_choices("sampling_params", inputs)
    return NativeCall(
        inputs=inputs,
        is_list=is_batch or any(one.params.n > 1 for one in inputs),
        stream=given.stream,
        return_text_in_logprobs=given.return_text_in_logprobs,
        return_prompt_token_ids=given.return_prompt_token_ids,
    )


def _prompts(given: GenerateBody) -> tuple[list[Any], bool]:
    if given.text is not None and given.input_ids is not None:
        raise RequestError(400, "text and input_ids exclude each other: give one of them.", "input_ids")
    prompts: Any
    if given.text is not None:
        name, prompts, is_batch = "text", given.text, isinstance(given.text, list)
    elif given.input_ids is not None:
        name, prompts = "input_ids", given.input_ids
        is_batch = bool(prompts) and isinstance(prompts[0], list)
    else:
        raise RequestError(400, "text or input_ids is required.", "text")
    if not is_batch:
        return [prompts], False
    if not prompts:
        raise bad_parameter(name, "must not be an empty list")
    if len(prompts) > MAX_BATCH:
        raise bad_parameter(name, f"may have at most {MAX_BATCH} prompts, not {len(prompts)}")
    return list(prompts), True


def _per_prompt(name: str, value: Any, count: int, is_batch: bool) -> list[Any]:
    """Return one value for every prompt: the single value repeated, or the given list."""
    if not isinstance(value, list):
        return [value] * count
    if not is_batch:
        raise bad_parameter(name, "may be a list only if the prompt is a list")
    if len(value) != count:
        raise bad_parameter(name, f"must have one entry per prompt ({count}), not {len(value)}")
    return value


def _check_num_regexes(params: list[dict[str, Any]]) -> None:
    distinct: set[str] = set()
    for stops in {id(one): one.get("stop_regex") for one in params}.values():
        distinct.update(stop for stop in (stops if isinstance(stops, list) else [stops]) if isinstance(stop, str))
    if len(distinct) > MAX_BATCH_REGEXES:
        raise bad_parameter(
            "stop_regex", f"may have at most {MAX_BATCH_REGEXES} expressions in a batch, not {len(distinct)}"
        )


def _per_prompt_ids(value: list[Any], count: int, is_batch: bool) -> list[list[int]]:
    if value and isinstance(value[0], list):
        return _per_prompt("token_ids_logprob", value, count, is_batch)
    return [value] * count


def _rids(rid: str | list[str] | None, count: int, is_batch: bool) -> list[str | None]:
    if rid is None:
        return [None] * count
    if isinstance(rid, str):
        rids = numbered(rid, count) if is_batch else [rid]
    else:
        rids = _per_prompt("rid", rid, count, is_batch)
    if not all(rids):
        raise bad_parameter("rid", "must not be empty")
    if len(set(rids)) != count:
        raise bad_parameter("rid", "must be different for each prompt of a batch")
    return list(rids)


def check_num_choices(parameter: str, inputs: Sequence[GenerateInput]) -> None:
    """Refuse a call whose number of choices over all prompts is too large."""
    count = sum(one.params.n for one in inputs)
    if count > MAX_BATCH:
        raise bad_parameter(parameter, f"asks for {count} choices in all (n for each prompt), more than {MAX_BATCH}")


def _logprob_request(wanted: bool, start: int, top: int, ids: list[int]) -> LogprobRequest:
    if start < -1:
        raise bad_parameter("logprob_start_len", f"must be at least -1, not {show(start)}")
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise bad_parameter("top_logprobs_num", f"must be at least 0 and at most {MAX_TOP_LOGPROBS}, not {show(top)}")
    if len(ids) > MAX_TOP_LOGPROBS:
        raise bad_parameter("token_ids_logprob", f"may have at most {MAX_TOP_LOGPROBS} entries, not {len(ids)}")
    if not wanted:
        for name, asked in (
            ("top_logprobs_num", top > 0),
            ("token_ids_logprob", ids),
            ("logprob_start_len", start >= 0),
        ):
            if asked:
                raise bad_parameter(name, "needs return_logprob")
        return LogprobRequest()
    return LogprobRequest(output=True, prompt_start=start, top=top, ids=tuple(ids))


@dataclass(slots=True)
class _ChoiceSoFar:
    """A choice's text, ids and logprobs so far, and how many of them were streamed."""

    prompt: int
    choice: int
    latest: ChoiceUpdate | None = None
    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    texts_sent: int = 0
    ids_sent: int = 0
    finished_at: float | None = None
    replica: int | None = None


class NativeAnswer:
    """The collected updates of a call, written in /generate's format: whole, or chunk by chunk."""

    def __init__(
        self,
        call: NativeCall,
        token_text: TokenText,
        *,
        incremental: bool = False,
        num_drafts: int,
        is_deterministic: bool = False,
        weight_version: Callable[[], str],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._call = call
        self._token_text = token_text
        self._incremental = incremental
        self._num_drafts = num_drafts  # most drafts of a step, if the server drafts
        self._is_deterministic = is_deterministic
        self._weight_version = weight_version  # of the present weights
        self._now = now
        self._began = now()
        self._epoch = time.time() - self._began  # add it to a time of `now` to get seconds since the epoch
        self._first_of: list[int] = []  # flat index of choice 0 of each prompt
        self._choices: list[_ChoiceSoFar] = []
        for prompt, one in enumerate(call.inputs):
            self._first_of.append(len(self._choices))
            self._choices += [_ChoiceSoFar(prompt, choice) for choice in range(one.params.n)]

    def add(self, prompt: int, update: ChoiceUpdate) -> int:
        """Add an update of a choice of prompt number `prompt`. Return the choice's index in the flat list of all choices."""
        index = self._first_of[prompt] + update.index
        so_far = self._choices[index]
        so_far.latest = update
        so_far.texts.append(update.text)
        so_far.ids += update.ids
        so_far.logprobs += update.output_logprobs
        so_far.prompt_logprobs = so_far.prompt_logprobs or update.prompt_logprobs
        so_far.prompt_ids = so_far.prompt_ids or update.prompt_ids
        if update.replica is not None:  # most updates do not say it
            so_far.replica = update.replica
        if update.finish is not None:
            so_far.finished_at = self._now()
        return index

    def result(self) -> Any:
        """Return the whole answer: a dict, or a flat list of them."""
        parts = [self._write(so_far, 0, 0) for so_far in self._choices]
        return parts if self._call.is_list else parts[0]

    def chunk(self, index: int) -> Generated:
        """Return the next chunk of this choice: all text so far, or with `incremental` only the text since the last chunk."""
        so_far = self._choices[index]
        texts_sent, ids_sent = (so_far.texts_sent, so_far.ids_sent) if self._incremental else (0, 0)
        chunk = self._write(so_far, texts_sent, ids_sent)
        so_far.texts_sent, so_far.ids_sent = len(so_far.texts), len(so_far.ids)
        if self._call.is_list:
            chunk["index"] = index
        return chunk

    def _write(self, so_far: _ChoiceSoFar, first_text: int, first_id: int) -> Generated:
        if not first_text:
            so_far.texts = ["".join(so_far.texts)]  # so that later cumulative chunks do not join all pieces again
        written: Generated = {
            "text": "".join(so_far.texts[first_text:]),
            "output_ids": so_far.ids[first_id:],
            "meta_info": self._meta_info(so_far, first_id),
        }
        if self._call.return_prompt_token_ids:
            written["prompt_token_ids"] = list(so_far.prompt_ids)
        return written

    def _speculation(self, update: ChoiceUpdate) -> Speculation:
        num_steps, num_ids = update.num_verified, update.num_verified_ids
        return {
            "spec_verify_ct": num_steps,
            "spec_accept_length": num_ids / num_steps,
            "spec_accept_rate": (num_ids - num_steps) / (num_steps * self._num_drafts),
        }

    def _meta_info(self, so_far: _ChoiceSoFar, first_id: int) -> MetaInfo:
        latest = so_far.latest
        assert latest is not None, "a choice is written only after its first update"
        meta: MetaInfo = {
            "id": latest.rid,
            "finish_reason": finish_reason(latest.finish),
            "prompt_tokens": latest.prompt_tokens,
            "completion_tokens": latest.completion_tokens,
            "cached_tokens": latest.cached_tokens,
            "cached_tokens_details": cached_tokens_details(latest.cached_tokens) if latest.cached_tokens else None,
            "reasoning_tokens": 0,
            "weight_version": latest.weight_version or self._weight_version(),
            "num_retractions": latest.num_preempted,
            "dp_rank": so_far.replica,
            "seed": latest.seed,
        }
        if so_far.finished_at is not None and latest.times is not None:
            meta = {**meta, **self._times(latest.completion_tokens, latest.times, so_far.finished_at)}
        if self._is_deterministic:
            meta = {**meta, "deterministic": True}
        if latest.num_verified:
            meta = {**meta, **self._speculation(latest)}
        asked = self._call.inputs[so_far.prompt].logprobs
        if asked.output:
            meta = {**meta, **self._logprobs(asked, so_far, first_id)}
        return meta

    def _times(self, num_tokens: int, times: ChoiceTimes, finished_at: float) -> Times:
        """Return the choice's times in seconds, and its throughput without the first token. Names in `_ts`, and in `_time` for a moment,
        are since the epoch."""
        first, last, queue_s = times.first_token_s, times.last_token_s, times.queue_s
        took = None if first is None or last is None else last - first
        arrived_ts = self._epoch + times.arrived_s
        return {
            "e2e_latency": finished_at - self._began,
            "first_token_latency": first,
            "decode_throughput": (num_tokens - 1) / took if took else None,
            "queue_time": queue_s,
            "forward_entry_time": None if queue_s is None else arrived_ts + times.sent_s + queue_s,
            "prefill_finished_time": None if first is None else arrived_ts + first,
            "request_received_ts": self._epoch + self._began,
            "request_finished_ts": self._epoch + finished_at,
            "response_sent_to_client_ts": self._epoch + self._now(),
        }

    def _logprobs(self, asked: LogprobRequest, so_far: _ChoiceSoFar, first_id: int) -> Logprobs:
        output = so_far.logprobs[first_id:]
        written: Logprobs = {
            "input_token_logprobs": [self._row(one.logprob, one.token_id) for one in so_far.prompt_logprobs],
            "output_token_logprobs": [self._row(one.logprob, one.token_id) for one in output],
            "output_token_logprobs_length": len(so_far.logprobs),
        }
        if asked.top:
            written["input_top_logprobs"] = [self._rows(one.top) for one in so_far.prompt_logprobs]
            written["output_top_logprobs"] = [self._rows(one.top) for one in output]
        if asked.ids:
            written["input_token_ids_logprobs"] = [self._rows(one.of_ids) for one in so_far.prompt_logprobs]
            written["output_token_ids_logprobs"] = [self._rows(one.of_ids) for one in output]
        return written

    def _row(self, logprob: float | None, token_id: int) -> Row:
        return [logprob, token_id, self._token_text(token_id) if self._call.return_text_in_logprobs else None]

    def _rows(self, pairs: Sequence[tuple[float, int]]) -> list[Row] | None:
        return [self._row(logprob, token_id) for logprob, token_id in pairs] or None


def cached_tokens_details(num_cached: int) -> CachedTokensDetails:
    """Return where the cached tokens of a prompt were: here, always in the device's memory."""
    return {"device": num_cached, "host": 0}


def finish_reason(finish: Finish | None) -> FinishReason | None:
    """Return meta_info's finish_reason; None while the choice runs."""
    if finish is None:
        return None
    if finish.kind == "length":
        assert finish.length is not None, "an output that reached its limit has a length"
        return {"type": "length", "length": finish.length}
    if finish.kind == "abort":
        return {"type": "abort", "message": finish.message, "status_code": None, "err_type": None}
    if finish.matched is None:
        return {"type": "stop"}
    return {"type": "stop", "matched": finish.matched}
