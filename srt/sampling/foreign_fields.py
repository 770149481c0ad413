"""Request fields that SGLang, vLLM, OpenAI or Anthropic define and this server lacks: one rule decides on them, with reviewed exceptions.

The rule: null, an empty value and the default of a package that defines the field change nothing ("off values"), and pass; any other
value is refused by name. False is an off value unless a package's default is true; 0 is one only if it is a default. `foreign_table`
lists the fields. Fields that a request body or PARAMETERS defines never come here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from srt.sampling.foreign_table import FIELDS

Values = tuple[Any, ...]
Schema = dict[str, Any]
EMPTY: Values = (None, "", [], {})
OPENAI = ("completions", "chat")
ANTHROPIC = ("messages", "count_tokens")

# Accepted with any value, since they never change an answer: OpenAI's and Anthropic's notes about the user, about prices and about what
# a platform stores or caches, vLLM's form of rendered prompts (only /render reads it), and SGLang's name by which a client finds its
# request again.
IGNORED: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        **dict.fromkeys(
            OPENAI,
            frozenset(
                "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention"
                " prompt_cache_options mm_payload return_mm_kwargs".split()
            ),
        ),
        **dict.fromkeys(
            ANTHROPIC, frozenset("cache_control metadata service_tier user_profile_id workspace_id".split())
        ),
        "responses": frozenset(
            "user service_tier safety_identifier prompt_cache_key prompt_cache_retention mm_payload".split()
        ),
        "native": frozenset(("conversation_id",)),
        "text_part": frozenset(("prompt_cache_breakpoint",)),
    }
)

# Null is the only off value, whatever the packages' defaults are: an empty list allows no token or is a prompt,
# 0 or false limits or forbids thinking, {} switches a search on, and the default of max_tokens is a limit, too.
NULL_ONLY = frozenset(
    "allowed_token_ids logprob_token_ids prompt_logprob_token_ids prompt_logprobs logprobs thinking thinking_token_budget"
    " max_thinking_tokens reasoning_effort web_search_options truncate_prompt_tokens max_tokens input_ids".split()
)

# More off values. Some ask for what happens here anyway: one beam, chunks of one token, text answers, prompts that
# lose their beginning. The others set up what another field would ask for.
ALSO: Mapping[str, Values] = MappingProxyType(
    {
        "beam_width": (1,),
        "stream_interval": (1,),
        "tool_choice": ("none", "auto"),
        "return_flat_raw_top_logprobs_b64": (False,),  # only the format of what another field asks for
        "watermark": ({"enabled": False},),
        "verbosity": ("medium",),
        "truncation_side": ("left",),
        "speed": ("standard",),
        "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    }
)
ALSO_IN: Mapping[tuple[str, str], Values] = MappingProxyType(
    {("chat", "modalities"): (["text"],), ("chat", "function_call"): ("none", "auto")}
)

# Fields of a family that no listed version of a package has there: dropped since, or known only in another family.
BESIDE: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "completions": frozenset("structural_tag return_meta_info beam_width".split()),
        "chat": frozenset("json_schema structural_tag beam_width".split()),
    }
)

# Refusals that can say more than "is not supported yet".
_THINKING = "is not supported yet: set it in chat_template_kwargs, if the model's template has it"
INSTEAD: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("sampling_params", "max_tokens"): "is called max_new_tokens here",
        ("sampling_params", "min_tokens"): "is called min_new_tokens here",
        ("sampling_params", "seed"): "is called sampling_seed here",
        (
            "sampling_params",
            "logprobs",
        ): "is not a sampling parameter here: set return_logprob, next to sampling_params",
        ("chat", "thinking"): _THINKING,
    }
)


def unsupported(family: str, own: Collection[str]) -> dict[str, Values]:
    """Return the family's unsupported fields (known, not in `own`, not ignored) with the off values of each."""
    return {
        name: _off_values(family, name)
        for name in _known(family)
        if name not in own and name not in ignored(family, own)
    }


def ignored(family: str, own: Collection[str]) -> frozenset[str]:
    """Return the fields of the family that are accepted with any value."""
    return IGNORED.get(family, frozenset()).difference(own)


def is_one_of(value: object, off_values: Values) -> bool:
    """Return whether the value equals one of these in JSON's sense: true is not 1, but 1.0 is.

    Null members count as absent, because clients send whole objects, and lists with one null for each prompt of a batch.
    """
    if isinstance(value, dict):
        value = {name: member for name, member in value.items() if member is not None}
    elif isinstance(value, list) and not any(member is not None for member in value):
        value = []
    return any(_same(value, one) for one in off_values)


def schema_of(off_values: Values) -> Schema:
    """Return the JSON Schema of the values that `is_one_of` accepts."""
    objects = [
        {
            "type": "object",
            "properties": {
                name: {"const": member, "description": "The value that always applies here."}
                for name, member in one.items()
            },
            "required": list(one),
            "additionalProperties": {"type": "null"},
        }
        for one in off_values
        if isinstance(one, dict)
    ]
    lists = [{"type": "array", "items": {"type": "null"}}] if [] in off_values else []
    values = {"enum": list(off_values)}
    return {"anyOf": [values, *objects, *lists]} if objects or lists else values


def refusal(family: str, name: str) -> str:
    """Return the rest of the sentence that refuses a value; the field's name comes before it."""
    return INSTEAD.get((family, name), "is not supported yet")


def _known(family: str) -> Iterator[str]:
    table = FIELDS.get(family, {})
    yield from table
    yield from sorted(BESIDE.get(family, frozenset()).difference(table))


def _off_values(family: str, name: str) -> Values:
    if name in NULL_ONLY:
        return (None,)
    defaults = [one for of_package in FIELDS[family].get(name, {}).values() for one in of_package]
    values: list[Any] = [*EMPTY, *([] if is_one_of(True, tuple(defaults)) else [False])]
    for one in (*defaults, *ALSO.get(name, ()), *ALSO_IN.get((family, name), ())):
        if not is_one_of(one, tuple(values)):
            values.append(one)
    return tuple(values)


def _same(value: object, one: object) -> bool:
    if isinstance(value, dict) and isinstance(one, dict):
        return value.keys() == one.keys() and all(_same(member, one[name]) for name, member in value.items())
    return _kind(value) is _kind(one) and value == one


def _kind(value: object) -> type:
    return float if type(value) is int else type(value)
