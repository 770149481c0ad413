"""Constraints as texts in the grammar library's own language, which workers compile without looking into them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from llguidance import LLMatcher, grammar_from

from srt.constrained.constraint import Constraint
from srt.constrained.json_schema import Converted, SchemaRefusal, convert
from srt.constrained.structural_tag import StructuralTag, TagRefusal

# White space between the parts of JSON: a blank, or a line break with indentation. Unbounded, a model could go on with it for ever.
_WHITESPACE: Final = r"\x20|\n(?:\x20{0,32}|\t{0,16})"
_ESCAPES_OF_CONTROLS: Final = 'nrbtf\\"'


class GrammarRefusal(Exception):
    """A constraint that cannot be written as a grammar. The message is the rest of a sentence, behind the constraint's name."""


def grammar_text(constraint: Constraint, special_ids: Mapping[str, int]) -> tuple[str, Converted | None]:
    """Return the grammar, and for a JSON Schema what it was made of; raise GrammarRefusal."""
    try:
        match constraint.kind:
            case "json_schema":
                converted = convert(json.loads(constraint.content))
                return schema_grammar(converted.schema, converted), converted
            case "structural_tag":
                tag = StructuralTag(special_ids, _inline_schema, _side_grammar)
                return tag.build(json.loads(constraint.content)), None
            case "choice":
                texts = [json.dumps(text, ensure_ascii=False) for text in json.loads(constraint.content)]
                # One lexeme: as alternatives of a rule, more than 2,000 exceed a limit.
                return f"start: CHOICE\nCHOICE: {' | '.join(texts)}", None
        return json.dumps({"grammars": [_side_grammar(constraint.kind, constraint.content)]}), None
    except (SchemaRefusal, TagRefusal) as refusal:
        raise GrammarRefusal(str(refusal)) from refusal
    except RecursionError:
        raise GrammarRefusal("is nested too deeply") from None


def schema_grammar(schema: Any, converted: Converted) -> str:
    """Return the grammar of a part of a converted schema."""
    with_options = {**schema, "x-guidance": _options(converted)}
    return json.dumps({"grammars": [{"json_schema": with_options}]}, ensure_ascii=False)


def _inline_schema(schema: Any, place: str) -> str:
    if not isinstance(schema, (dict, bool)):
        raise TagRefusal(f"needs a JSON Schema at {place}")
    converted = convert(schema)
    return json.dumps({**converted.schema, "x-guidance": _options(converted)}, ensure_ascii=False)


def _options(converted: Converted) -> dict[str, Any]:
    if converted.allows_escapes:
        return {"whitespace_pattern": _WHITESPACE, "json_allow_general_unicode_escapes": True}
    return {"whitespace_pattern": _WHITESPACE, "json_allowed_escapes": _ESCAPES_OF_CONTROLS}


def _side_grammar(kind: str, content: str) -> dict[str, Any]:
    if kind == "regex":
        grammar: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(content))["grammars"][0]
        return grammar
    try:
        return {"lark_grammar": grammar_from("ebnf", content)}
    except (ValueError, IndexError) as error:
        raise GrammarRefusal(f"cannot be read: {' '.join(str(error).split())}") from error
