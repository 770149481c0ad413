"""The tools of a request, as parsers need them: their names, and the types of their arguments.

`Format._begin_call` in base_parser.py decides what becomes of a call of any other tool.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]
_MAX_DEPTH = 8
_TYPES: Mapping[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "object": (dict,),
    "array": (list,),
    "string": (str,),
}
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}


class Tools:
    """The callable tools: name -> JSON Schema of the arguments."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._parameters = dict(parameters)

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def is_string(self, tool: str, argument: str) -> bool:
        """Return whether the argument can only be a string."""
        return self._types(tool, argument) == {"string"}

    def json_of(self, tool: str, argument: str, text: str) -> str:
        """Return an argument that a model wrote without quotes as JSON of a type that the schema allows; as a string if none fits."""
        types = self._types(tool, argument)
        if types != {"string"}:
            bare = text.strip()
            written = _PYTHON_LITERALS.get(bare, bare)
            value = _parsed(written)
            if value is not _NOT_JSON and _fits(value, types):
                return written
        return quoted(text)

    def _types(self, tool: str, argument: str) -> set[str]:
        """Return the names of the types that the schema allows; empty if it does not say."""
        root = self._parameters.get(tool)
        properties = root.get("properties") if isinstance(root, Mapping) else None
        schema = properties.get(argument) if isinstance(properties, Mapping) else None
        return set(_types_of(schema, root, _MAX_DEPTH))


def is_json(text: str) -> bool:
    """Return whether the text is a JSON value."""
    return _parsed(text) is not _NOT_JSON


def quoted(text: str) -> str:
    """Return the text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _types_of(schema: Any, root: Any, depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or not depth:
        return
    kind = schema.get("type")
    yield from (one for one in (kind if isinstance(kind, list) else [kind]) if isinstance(one, str))
    if kind is None and isinstance(schema.get("enum"), list):
        yield from (name for name, types in _TYPES.items() if any(type(one) in types for one in schema["enum"]))
    if kind is None and "const" in schema:
        yield from (name for name, types in _TYPES.items() if type(schema["const"]) in types)
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(word), list):
            for one in schema[word]:
                yield from _types_of(one, root, depth - 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target = root
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        yield from _types_of(target, root, depth - 1)


_NOT_JSON = object()


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _NOT_JSON


def _fits(value: Any, types: set[str]) -> bool:
    known = [name for name in types if name in _TYPES]
    return not known or any(type(value) in _TYPES[name] for name in known)
