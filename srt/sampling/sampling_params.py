"""What a client may ask of the draw and the end of a generation, and its validation. The same for every API."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from srt.protocol.messages import SamplingSpec

MAX_STOPS = 32
MAX_STOP_CHARS = 4096
MAX_STOP_REGEX_CHARS = 256
MAX_TOP_LOGPROBS = 128
MAX_CHOICES = 128
MAX_STOP_TOKEN_IDS = 256
MAX_BIAS_ENTRIES = 1024
DEFAULT_MAX_NEW_TOKENS = 128
GREEDY_BELOW = 1e-6  # a temperature under this means greedy


class ParameterError(ValueError):
    """A parameter that the client must change: `name` is how the client wrote it."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} {reason}")
        self.name = name
        self.reason = reason


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one request, complete and checked. Build it with `from_dict`, which knows defaults, types and ranges."""

    max_new_tokens: int | None = DEFAULT_MAX_NEW_TOKENS  # None: all that fits
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    n: int = 1
    sampling_seed: int | None = None  # 64 bits
    may_shorten: bool = False  # max_new_tokens was not asked for: fewer are right where fewer fit

    @classmethod
    def from_dict(
        cls,
        given: Mapping[str, Any],
        defaults: Mapping[str, Any] | None = None,
        default_max_new_tokens: int | None = DEFAULT_MAX_NEW_TOKENS,
    ) -> SamplingParams:
        """`given` over `defaults` (the model's own). null means default; an unknown or unsupported name is a ParameterError.

        Where `given` has no max_new_tokens, `default_max_new_tokens` is an upper bound, not a wish (`may_shorten`).
        """
        if not isinstance(given, Mapping):
            raise ParameterError("sampling_params", f"must be an object, not {_kind(given)}")
        values = {name: value for name, value in (defaults or {}).items() if value is not None}
        for name, value in given.items():
            if name in _UNSUPPORTED:
                if not _is_neutral(value, _UNSUPPORTED[name]):
                    raise ParameterError(name, "is not supported yet")
                continue
            if name not in _CHECKS:
                raise ParameterError(show(name).strip("'"), "is not a known sampling parameter")
            if value is not None:
                values[name] = value
        checked = {name: _CHECKS[name](name, value) for name, value in values.items()}
        if "max_new_tokens" not in checked:
            least = checked.get("min_new_tokens", 0)
            limit = None if default_max_new_tokens is None else max(default_max_new_tokens, least)
            return cls(**checked, max_new_tokens=limit, may_shorten=True)
        params = cls(**checked)
        if params.min_new_tokens > checked["max_new_tokens"]:
            raise ParameterError(
                "min_new_tokens",
                f"must not exceed max_new_tokens ({params.max_new_tokens}), not {params.min_new_tokens}",
            )
        return params

    def check_vocabulary(self, vocab_size: int) -> None:
        """ParameterError for a token id outside the vocabulary."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", [i for i, _ in self.logit_bias])):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise ParameterError(
                        name, f"has the token id {show(token_id)}, outside the vocabulary of {vocab_size}"
                    )

    def spec(self, max_new_tokens: int, eos_ids: tuple[int, ...]) -> SamplingSpec:
        """The engine's part, with the output limit that fits and the ids that end the request."""
        stop_ids = sorted({*self.stop_token_ids, *(() if self.ignore_eos else eos_ids)})
        greedy = self.temperature < GREEDY_BELOW
        return SamplingSpec(
            max_new_tokens=max_new_tokens,
            temperature=0.0 if greedy else self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            min_new_tokens=self.min_new_tokens,
            stop_ids=np.asarray(stop_ids, np.int32),
            bias_ids=np.asarray([i for i, _ in self.logit_bias], np.int32),
            bias_values=np.asarray([b for _, b in self.logit_bias], np.float32),
        )


def choice_seed(seed: int, choice: int) -> int:
    """The 64-bit seed of choice i of a request: choice 0 draws with the request's own."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + choice.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def is_unicode(text: str) -> bool:
    """Whether the text can be written as UTF-8: JSON can smuggle in halves of surrogate pairs, which cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def compile_stop_regex(pattern: str) -> Any:
    """The expression for a linear-time engine, so that no client can stall a frontend. ValueError says why it cannot be had."""
    import re2  # only requests that use it pay for the import

    options = re2.Options()
    options.log_errors = False
    options.max_mem = (
        1 << 20
    )  # an expression that needs more is refused: compiling it would stall, and hundreds are kept
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0] if error.args else "invalid"
        raise ValueError(reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)) from error


# ---- Checks: one function a kind of value; each takes (name, value) and returns the value as the dataclass holds it


def _integer(least: int, most: int | None = None) -> Any:
    def check(name: str, value: Any) -> int:
        if type(value) is not int:
            raise ParameterError(name, f"must be an integer, not {_kind(value)}")
        if value < least or (most is not None and value > most):
            raise ParameterError(
                name,
                f"must be at least {least}"
                + (f" and at most {most}" if most is not None else "")
                + f", not {show(value)}",
            )
        return value

    return check


def _number(least: float, most: float, *, open_low: bool = False) -> Any:
    def check(name: str, value: Any) -> float:
        if type(value) not in (int, float):
            raise ParameterError(name, f"must be a number, not {_kind(value)}")
        if not ((least < value if open_low else least <= value) and value <= most):  # NaN fails too
            raise ParameterError(
                name,
                f"must be {'above' if open_low else 'at least'} {least:g} and at most {most:g}, not {show(value)}",
            )
        return float(value)

    return check


def _boolean(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise ParameterError(name, f"must be true or false, not {_kind(value)}")
    return value


def _top_k(name: str, value: Any) -> int:
    if type(value) is not int:
        raise ParameterError(name, f"must be an integer, not {_kind(value)}")
    if value < -1:
        raise ParameterError(name, f"must be -1 or 0 (all), or at least 1, not {show(value)}")
    return -1 if value in (-1, 0) or value >= 1 << 30 else value


def _strings(most: int, most_chars: int) -> Any:
    def check(name: str, value: Any) -> tuple[str, ...]:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
            raise ParameterError(name, "must be a string or a list of strings")
        if len(items) > most:
            raise ParameterError(name, f"may have at most {most} entries, not {len(items)}")
        if any(not item for item in items):
            raise ParameterError(name, "must not contain an empty string")
        if any(len(item) > most_chars for item in items):
            raise ParameterError(name, f"may have at most {most_chars} characters an entry")
        if not all(is_unicode(item) for item in items):
            raise ParameterError(name, "has half of a surrogate pair, which is no character")
        return tuple(items)

    return check


def _stop_regex(name: str, value: Any) -> tuple[str, ...]:
    patterns: tuple[str, ...] = _strings(MAX_STOPS, MAX_STOP_REGEX_CHARS)(name, value)
    for pattern in patterns:
        try:
            matches_nothing = compile_stop_regex(pattern).search("") is not None
        except ValueError as error:
            raise ParameterError(
                name, f"has an expression that cannot be compiled ({error}): {show(pattern)}"
            ) from error
        if matches_nothing:
            raise ParameterError(name, f"has an expression that matches the empty text: {show(pattern)}")
    return patterns


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    items = [value] if type(value) is int else value
    if not isinstance(items, (list, tuple)) or not all(type(item) is int for item in items):
        raise ParameterError(name, "must be a list of token ids")
    if len(items) > MAX_STOP_TOKEN_IDS:
        raise ParameterError(name, f"may have at most {MAX_STOP_TOKEN_IDS} entries, not {len(items)}")
    return tuple(items)


def _logit_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise ParameterError(name, f"must be an object of token id: bias, not {_kind(value)}")
    if len(value) > MAX_BIAS_ENTRIES:
        raise ParameterError(name, f"may have at most {MAX_BIAS_ENTRIES} entries, not {len(value)}")
    pairs: dict[int, float] = {}
    for key, bias in value.items():
        if not (type(key) is int or (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 12)):
            raise ParameterError(name, f"must have token ids as keys, not {show(key)}")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ParameterError(name, f"must have numbers between -100 and 100 as values, not {show(bias)}")
        pairs[int(key)] = float(bias)
    return tuple(sorted(pairs.items()))


def _seed(name: str, value: Any) -> int:
    seed: int = _integer(-(1 << 63), (1 << 64) - 1)(name, value)
    return seed % (1 << 64)  # a negative seed is another way to write 64 bits


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    return any(type(value) is type(one) and value == one for one in (None, False, "", 0, [], {}, *neutral))


def show(value: Any) -> str:
    """The value as a sentence may quote it: short, whatever a client sent."""
    if type(value) is int and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = ascii(value) if isinstance(value, str) and not is_unicode(value) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _kind(value: Any) -> str:
    names = {
        type(None): "null",
        str: "a string",
        list: "a list",
        dict: "an object",
        bool: "a boolean",
        int: "an integer",
        float: "a number",
    }
    return names.get(type(value), type(value).__name__)


_CHECKS: dict[str, Any] = {
    "max_new_tokens": _integer(1, 1 << 30),
    "temperature": _number(0, 1000),
    "top_k": _top_k,
    "top_p": _number(0, 1, open_low=True),
    "min_p": _number(0, 1),
    "frequency_penalty": _number(-2, 2),
    "presence_penalty": _number(-2, 2),
    "repetition_penalty": _number(0, 2, open_low=True),
    "min_new_tokens": _integer(0, 1 << 30),
    "stop": _strings(MAX_STOPS, MAX_STOP_CHARS),
    "stop_token_ids": _token_ids,
    "stop_regex": _stop_regex,
    "ignore_eos": _boolean,
    "skip_special_tokens": _boolean,
    "spaces_between_special_tokens": _boolean,
    "no_stop_trim": _boolean,
    "logit_bias": _logit_bias,
    "n": _integer(1, MAX_CHOICES),
    "sampling_seed": _seed,
}
assert {*_CHECKS, "may_shorten"} == {f.name for f in fields(SamplingParams)}
# What other servers know, with the values (beside the empty ones) that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "beam_width": (1,),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "structural_tag": (),
    "custom_params": (),
    "watermark": (),
    "stream_interval": (1,),
}
