"""Sampling parameters of a request, and their validation, the same for every API."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import numpy as np

from srt.constrained.constraint import Constraint, read_constraint
from srt.protocol.messages import SamplingSpec
from srt.sampling.draw_checks import DRAW_CHECKS
from srt.sampling.foreign_fields import Values, is_one_of, refusal, unsupported
from srt.sampling.parameter_checks import (
    Biases,
    Boolean,
    Check,
    Expressions,
    Integer,
    Number,
    ParameterError,
    Seed,
    Strings,
    TokenIds,
    kind_of,
    show,
)

MAX_STOPS = 32
MAX_STOP_CHARS = 4096
MAX_TOP_LOGPROBS = 128
MAX_CHOICES = 128
MAX_STOP_TOKEN_IDS = 256
MAX_BIAS_ENTRIES = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
DEFAULT_MAX_NEW_TOKENS = 128
GREEDY_BELOW = 1e-6  # a temperature under this means greedy


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one request, complete and checked. Build it with `from_dict`, which applies defaults, types and ranges."""

    max_new_tokens: int | None = DEFAULT_MAX_NEW_TOKENS  # None: as many as fit
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
    bad_words: tuple[str, ...] = ()
    n: int = 1
    sampling_seed: int | None = None  # 64 bits
    constraint: Constraint | None = None  # what the output must look like
    may_shorten: bool = False  # the client set no max_new_tokens, so it is lowered to what fits

    @classmethod
    def from_dict(
        cls,
        given: Mapping[str, Any],
        defaults: Mapping[str, Any] | None = None,
        default_max_new_tokens: int | None = DEFAULT_MAX_NEW_TOKENS,
    ) -> SamplingParams:
        """Check `given` and complete it with `defaults` (the model's own); null means default.

        ParameterError names a parameter that is unknown, unsupported or has a wrong value.
        If `given` has no max_new_tokens, `default_max_new_tokens` is only an upper bound (`may_shorten`).
        """
        if not isinstance(given, Mapping):
            raise ParameterError("sampling_params", f"must be an object, not {kind_of(given)}")
        values = {name: value for name, value in (defaults or {}).items() if value is not None}
        constraint = read_constraint({name: given[name] for name in CONSTRAINTS if name in given})
        for name, value in given.items():
            if name in CONSTRAINTS:
                continue
            if name in UNSUPPORTED:
                if not is_one_of(value, UNSUPPORTED[name]):
                    raise ParameterError(name, refusal("sampling_params", name))
                continue
            if name not in PARAMETERS:
                raise ParameterError(show(name).strip("'"), "is not a known sampling parameter")
            if value is not None:
                values[name] = value
        checked = {name: PARAMETERS[name].check(name, value) for name, value in values.items()}
        _resolve_aliases(checked)
        if "max_new_tokens" not in checked:
            least = checked.get("min_new_tokens", 0)
            limit = None if default_max_new_tokens is None else max(default_max_new_tokens, least)
            return cls(**checked, max_new_tokens=limit, may_shorten=True, constraint=constraint)
        params = cls(**checked, constraint=constraint)
        if params.min_new_tokens > checked["max_new_tokens"]:
            raise ParameterError(
                "min_new_tokens",
                f"must not exceed max_new_tokens ({params.max_new_tokens}), not {params.min_new_tokens}",
            )
        return params

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ParameterError for a token id outside the vocabulary."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", [i for i, _ in self.logit_bias])):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise ParameterError(
                        name, f"has the token id {show(token_id)}, outside the vocabulary of {vocab_size}"
                    )

    def spec(self, max_new_tokens: int, eos_ids: tuple[int, ...], forbidden_ids: Sequence[int] = ()) -> SamplingSpec:
        """Return the engine's part: with the output limit that fits, the ids that end the request, and the ids that it may not draw."""
        biases = {**dict(self.logit_bias), **dict.fromkeys(forbidden_ids, float("-inf"))}
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
            bias_ids=np.asarray(list(biases), np.int32),
            bias_values=np.asarray(list(biases.values()), np.float32),
        )


def choice_seed(seed: int, choice: int) -> int:
    """Return the 64-bit seed of a request's choice: choice 0 draws with the request's own, the others with a hash of it."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + choice.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _resolve_aliases(checked: dict[str, Any]) -> None:
    for alias, name in ALIASES.items():
        if alias in checked:
            value = checked.pop(alias)
            if checked.setdefault(name, value) != value:
                raise ParameterError(alias, f"and {name} are two names of one parameter: give one of them")


@dataclass(frozen=True, slots=True)
class Parameter:
    """The check of a parameter and its description in the OpenAPI document."""

    check: Check
    text: str


PARAMETERS: Mapping[str, Parameter] = MappingProxyType(
    {
        "max_new_tokens": Parameter(
            Integer(0, 1 << 30),
            "Most tokens to generate. With 0 only the prompt is computed, for its logprobs or the prefix cache.",
        ),
        "temperature": Parameter(
            DRAW_CHECKS["temperature"], "Divides the logits before sampling; 0 always takes the most likely token."
        ),
        "top_k": Parameter(DRAW_CHECKS["top_k"], "Sample among this many most likely tokens; -1 or 0: all."),
        "top_p": Parameter(
            DRAW_CHECKS["top_p"], "Sample among the most likely tokens that together have this probability."
        ),
        "min_p": Parameter(
            DRAW_CHECKS["min_p"], "Sample among tokens with at least this share of the most likely token's probability."
        ),
        "frequency_penalty": Parameter(
            Number(-2, 2), "Subtracted from a token's logit for each time that it is in the output already."
        ),
        "presence_penalty": Parameter(
            Number(-2, 2), "Subtracted once from the logit of each token that is in the output already."
        ),
        "repetition_penalty": Parameter(
            DRAW_CHECKS["repetition_penalty"],
            "Above 1, tokens that are in the prompt or the output become less likely.",
        ),
        "min_new_tokens": Parameter(
            Integer(0, 1 << 30), "Fewest tokens to generate: until then no stop ends the output."
        ),
        "stop": Parameter(Strings(MAX_STOPS, MAX_STOP_CHARS), "The output ends before the first of these strings."),
        "stop_token_ids": Parameter(TokenIds(MAX_STOP_TOKEN_IDS), "The output ends with any of these tokens."),
        "stop_regex": Parameter(
            Expressions(MAX_STOPS), "The output ends before the first match of any of these regular expressions (RE2)."
        ),
        "ignore_eos": Parameter(Boolean(), "If true, the model's end-of-text token does not end the output."),
        "skip_special_tokens": Parameter(Boolean(), "If true, special tokens are left out of the text."),
        "spaces_between_special_tokens": Parameter(
            Boolean(), "If true, special tokens in the text are separated by spaces."
        ),
        "no_stop_trim": Parameter(Boolean(), "If true, the stop that ended the output stays in the text."),
        "logit_bias": Parameter(
            Biases(MAX_BIAS_ENTRIES), "Biases to add to the logits of tokens: an object of token id: bias."
        ),
        "include_stop_str_in_output": Parameter(
            Boolean(),
            "Another name of no_stop_trim. A stop token stays, too, unless skip_special_tokens leaves it out.",
        ),
        "bad_words": Parameter(
            Strings(MAX_BAD_WORDS, MAX_BAD_WORD_CHARS),
            "Words that are not generated at the beginning of a text or after a space. Each must be a single token.",
        ),
        "n": Parameter(Integer(1, MAX_CHOICES), "Number of outputs to generate for the prompt."),
        "sampling_seed": Parameter(
            Seed(),
            "The same request with the same seed gives the same output, up to rounding of its logits; random if absent.",
        ),
    }
)
# What the output must look like: one of these at most. `read_constraint` checks them.
_TEXT_OR_OBJECT: Mapping[str, Any] = MappingProxyType({"type": ["string", "object"]})
CONSTRAINTS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "json_schema": ("A JSON Schema that the output is valid by, as an object or as its text.", _TEXT_OR_OBJECT),
        "regex": ("A regular expression that the whole output matches.", MappingProxyType({"type": "string"})),
        "ebnf": ("A grammar of the output, in GBNF or Lark.", MappingProxyType({"type": "string"})),
        "structural_tag": ("Tags, and the form of the text within each, as an object or as its text.", _TEXT_OR_OBJECT),
    }
)
# Other servers' names for a parameter.
ALIASES: Mapping[str, str] = MappingProxyType({"include_stop_str_in_output": "no_stop_trim"})
assert {*PARAMETERS, "may_shorten", "constraint"} - ALIASES.keys() == {f.name for f in fields(SamplingParams)}
# Parameters of other servers that are missing here, with the off values of each.
UNSUPPORTED: Mapping[str, Values] = MappingProxyType(unsupported("sampling_params", {*PARAMETERS, *CONSTRAINTS}))
