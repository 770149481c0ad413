"""JSON Schemas of the routes' answers, derived from their types."""

from __future__ import annotations

import types
import typing
from typing import Annotated, Any, Literal, NotRequired

Schema = dict[str, Any]
_PLAIN = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


def answer_schema(kind: Any) -> Schema:
    """Return the schema of a type, such as those in `answers`; a schema is returned as it is.

    In `Annotated`, a text is the description, and a tuple type says what each entry of a list is.
    """
    if isinstance(kind, dict):
        return kind
    if kind is Any:
        return {}
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        schema = answer_schema(parts[0])
        for note in parts[1:]:
            schema = {**schema, **_noted(note)}
        return schema
    if typing.is_typeddict(kind):
        return _object(kind)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [answer_schema(part) for part in parts]}
    if origin is Literal:
        return {"const": parts[0]} if len(parts) == 1 else {"enum": list(parts)}
    if origin is list:
        return {"type": "array"} if parts[0] is Any else {"type": "array", "items": answer_schema(parts[0])}
    if origin is dict:
        return (
            {"type": "object"}
            if parts[1] is Any
            else {"type": "object", "additionalProperties": answer_schema(parts[1])}
        )
    return {"type": _PLAIN[kind]}


def _noted(note: Any) -> Schema:
    if isinstance(note, str):
        return {"description": note}
    if typing.get_origin(note) is tuple:
        entries = [answer_schema(part) for part in typing.get_args(note)]
        return {"prefixItems": entries, "minItems": len(entries), "maxItems": len(entries)}
    constraint: Schema = note._asdict()
    return constraint


def _object(kind: Any) -> Schema:
    """Return the schema of an object with these fields and no others: first those that are always there."""
    required: Schema = {}
    optional: Schema = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        if typing.get_origin(hint) is NotRequired:
            optional[name] = answer_schema(typing.get_args(hint)[0])
        else:
            (required if name in kind.__required_keys__ else optional)[name] = answer_schema(hint)
    return {
        "type": "object",
        "properties": required | optional,
        "required": list(required),
        "additionalProperties": False,
    }
