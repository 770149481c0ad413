"""Checks before a request is sent. Each refusal is a sentence that names the parameter at fault and gives the figures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from srt.managers.tokenizer_manager.api_types import GenerateInput, LogprobRequest, RequestError
from srt.managers.tokenizer_manager.model_facts import ModelFacts
from srt.protocol.messages import (
    GenerateRequest,
    Int32Array,
    LogprobSpec,
    Resource,
    SamplingSpec,
    SchedulerHello,
    int32_array,
)
from srt.sampling.parameter_checks import ParameterError, is_unicode, kind_of, show
from srt.sampling.sampling_params import MAX_BIAS_ENTRIES, MAX_TOP_LOGPROBS

MAX_PRIORITY = 1_000_000
MAX_LABEL_CHARS = 256
MAX_LOGPROB_IDS = 128


def bad(parameter: str, reason: str) -> RequestError:
    """Return a refusal (HTTP 400) that reads "`parameter` `reason`.", such as "priority must be …"."""
    return RequestError(400, f"{parameter} {reason}.", parameter)


def check_form(request: GenerateInput) -> None:
    """Check everything that does not need the prompt's tokens."""
    if (request.text is None) == (request.input_ids is None):
        both = "both" if request.text is not None else "neither"
        raise RequestError(400, f"A request needs exactly one of text and input_ids, but it has {both}.", "text")
    if request.text is not None:
        check_text("text", request.text)
    if request.rid is not None:
        check_label("rid", request.rid)
        if not request.rid:
            raise bad("rid", "must not be empty")
    check_label("cache_salt", request.cache_salt)
    check_label("lora_path", request.adapter or "")
    if type(request.priority) is not int or abs(request.priority) > MAX_PRIORITY:
        raise bad(
            "priority", f"must be an integer from -{MAX_PRIORITY} to {MAX_PRIORITY}, not {show(request.priority)}"
        )
    _check_logprobs(request.logprobs)
    most = request.truncate_prompt_tokens
    if most is not None and (type(most) is not int or most < -1 or most == 0):
        allowed = "an integer of at least 1, or -1 (as many as leave room for the output)"
        raise bad("truncate_prompt_tokens", f"must be {allowed}, not {show(most)}")


def check_replica(request: GenerateInput, num_replicas: int) -> None:
    """Check that the replica asked for is one of the server's."""
    asked = request.replica
    if asked is not None and (type(asked) is not int or not 0 <= asked < num_replicas):
        allowed = f"an integer from 0 to {num_replicas - 1}" if num_replicas > 1 else "0, as the server has one replica"
        raise bad("routed_dp_rank", f"must be {allowed} (see --dp-size), not {show(asked)}")


def check_text(parameter: str, text: object) -> None:
    if not isinstance(text, str):
        raise bad(parameter, f"must be a string, not {kind_of(text)}")
    if not is_unicode(text):
        raise bad(parameter, "has half of a surrogate pair, which is not a character")


def check_label(parameter: str, label: object) -> None:
    check_text(parameter, label)
    if len(str(label)) > MAX_LABEL_CHARS:
        raise bad(parameter, f"may have at most {MAX_LABEL_CHARS} characters, not {len(str(label))}")


def _check_logprobs(logprobs: LogprobRequest) -> None:
    if type(logprobs.output) is not bool:
        raise bad("return_logprob", f"must be true or false, not {kind_of(logprobs.output)}")
    start = logprobs.prompt_start
    if type(start) is not int or start < -1:
        raise bad(
            "logprob_start_len",
            f"must be -1 (no logprobs of the prompt) or an integer of at least 0, not {show(start)}",
        )
    if type(logprobs.top) is not int or not 0 <= logprobs.top <= MAX_TOP_LOGPROBS:
        raise bad("top_logprobs_num", f"must be an integer from 0 to {MAX_TOP_LOGPROBS}, not {show(logprobs.top)}")
    if len(logprobs.ids) > MAX_LOGPROB_IDS:
        raise bad("token_ids_logprob", f"may have at most {MAX_LOGPROB_IDS} token ids, not {len(logprobs.ids)}")


def check_ids(parameter: str, ids: object, vocab_size: int) -> None:
    """Refuse `ids` unless it is a list of token ids within the vocabulary."""
    if not isinstance(ids, (list, tuple)) or not set(map(type, ids)) <= {int}:
        raise bad(parameter, "must be a list of integers")
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        shown = wrong if wrong.bit_length() < 64 else f"of {wrong.bit_length()} bits"
        raise bad(parameter, f"has the token id {shown}, outside the vocabulary of {vocab_size}")


def _checked_ids(parameter: str, ids: list[int] | Int32Array, vocab_size: int) -> Int32Array:
    """Return the prompt's ids as a checked array. A list comes from a client; an array comes from the tokenizer, whose vocabulary may
    be larger than the model's."""
    if not isinstance(ids, np.ndarray):
        check_ids(parameter, ids, vocab_size)
        return int32_array(ids)
    if int(ids.max()) >= vocab_size:
        check_ids(parameter, ids.tolist(), vocab_size)
    return ids


def build_request(
    request: GenerateInput,
    prompt_ids: list[int] | Int32Array,
    *,
    rid: int,
    label: str,
    seed: int,
    model: ModelFacts,
    limits: SchedulerHello,
    forbidden_ids: Sequence[int] = (),
    resource: Resource | None = None,
) -> GenerateRequest:
    """Return the message for the scheduler; raise RequestError if the request cannot be served.

    forbidden_ids: the token ids of the request's bad_words.
    resource: what the workers must prepare for it.
    """
    source = "input_ids" if request.text is None else "text"
    if len(prompt_ids) == 0:
        raise bad(source, "has no tokens: a prompt needs at least one")
    try:
        request.params.check_vocabulary(model.vocab_size)
    except ParameterError as error:
        raise RequestError(400, f"{error}.", error.name) from error
    max_new_tokens = _output_limit(request, source, len(prompt_ids), model, limits)
    checked = _checked_ids(source, prompt_ids, model.vocab_size)
    spec = request.params.spec(max_new_tokens, model.eos_ids, forbidden_ids)
    if forbidden_ids:
        _check_forbidden(spec, model.vocab_size)
    return GenerateRequest(
        rid=rid,
        label=label,
        prompt_ids=checked,
        choices=np.arange(request.params.n, dtype=np.int32),
        output_ids=[int32_array() for _ in range(request.params.n)],
        sampling=spec,
        logprobs=_logprob_spec(request.logprobs, len(prompt_ids), model.vocab_size),
        seed=seed,
        priority=request.priority,
        cache_salt=request.cache_salt,
        urgent=request.urgent,
        stream=request.stream,
        resource=resource,
    )


def _check_forbidden(spec: SamplingSpec, vocab_size: int) -> None:
    """Refuse bad_words that overflow the bias table or that leave no token to draw."""
    if len(spec.bias_ids) > MAX_BIAS_ENTRIES:
        count = len(spec.bias_ids)
        raise bad("bad_words", f"and logit_bias may name at most {MAX_BIAS_ENTRIES} tokens together, not {count}")
    forbidden = spec.bias_ids[np.isneginf(spec.bias_values)]
    check_ids("bad_words", forbidden.tolist(), vocab_size)
    held_back = spec.stop_ids if spec.min_new_tokens else spec.stop_ids[:0]
    if len(np.union1d(forbidden, held_back)) >= vocab_size:
        raise bad("bad_words", f"must leave at least one of the vocabulary's {vocab_size} tokens to draw")


def num_kept_tokens(request: GenerateInput, model: ModelFacts, limits: SchedulerHello) -> int | None:
    """Return the number of tokens to keep at the prompt's end; None keeps all."""
    most = request.truncate_prompt_tokens
    if most != -1:
        return most
    total, _ = _most_tokens(model, limits)
    wanted = max(request.params.max_new_tokens or 1, request.params.min_new_tokens)
    return max(1, total - wanted)


def _most_tokens(model: ModelFacts, limits: SchedulerHello) -> tuple[int, str]:
    """Return the largest number of tokens for a prompt and its output together, and the name of what limits it."""
    return min((model.context_length, "the model's context"), (limits.max_request_tokens, "the server's memory"))


def _output_limit(
    request: GenerateInput, source: str, num_prompt: int, model: ModelFacts, limits: SchedulerHello
) -> int:
    """Return the largest number of output tokens: the number asked for, if it fits, or without one all that fit."""
    params = request.params
    total, owner = _most_tokens(model, limits)
    room = total - num_prompt
    if room < 1:
        raise bad(source, f"has {num_prompt} tokens, but {owner} holds {total}, including at least one for the output")
    wanted = params.max_new_tokens
    if wanted is not None and wanted > room and not params.may_shorten:
        raise bad(
            "max_new_tokens",
            f"is {wanted}, but with a prompt of {num_prompt} tokens only {room} fit: {owner} holds {total}",
        )
    if params.min_new_tokens > room:
        raise bad(
            "min_new_tokens",
            f"is {params.min_new_tokens}, but with a prompt of {num_prompt} tokens only {room} fit: {owner} holds {total}",
        )
    return room if wanted is None else max(1, min(wanted, room))  # the engine draws at least one, even if none is shown


def _logprob_spec(logprobs: LogprobRequest, num_prompt: int, vocab_size: int) -> LogprobSpec:
    check_ids("token_ids_logprob", logprobs.ids, vocab_size)
    if logprobs.prompt_start > num_prompt:
        raise bad("logprob_start_len", f"is {logprobs.prompt_start}, but the prompt has only {num_prompt} tokens")
    return LogprobSpec(
        output=logprobs.output,
        prompt_start=-1 if logprobs.prompt_start == num_prompt else logprobs.prompt_start,
        top=logprobs.top,
        ids=int32_array(logprobs.ids),
    )
