"""Checks of the objects within a request: which members each may have, and which only with a value that asks for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from srt.entrypoints.request_schema import bad_parameter
from srt.sampling.foreign_fields import Values, is_one_of, schema_of
from srt.sampling.parameter_checks import kind_of

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Members:
    """The members of one kind of object."""

    known: Mapping[str, Schema]  # their schemas, with descriptions
    required: tuple[str, ...] = ()
    off: Mapping[str, Values] = field(
        default_factory=dict
    )  # not supported, but known -> the values that ask for nothing

    def check(self, where: str, value: object) -> dict[str, Any]:
        """Return the object's known members that are not null; raise RequestError (400) for a wrong object."""
        if not isinstance(value, dict):
            raise bad_parameter(where, f"must be an object, not {kind_of(value)}")
        for name, member in value.items():
            if name in self.off:
                if not is_one_of(member, (None, *self.off[name])):
                    raise bad_parameter(f"{where}.{name}", "is not supported yet")
            elif name not in self.known:
                raise bad_parameter(f"{where}.{name[:100]}", "is not a known field")
        for name in self.required:
            if value.get(name) is None:
                raise bad_parameter(f"{where}.{name}", "is required")
        return {name: value[name] for name in self.known if value.get(name) is not None}

    def schema(self, text: str = "") -> Schema:
        """Return the JSON Schema of the objects that `check` accepts, as far as it looks."""
        optional = {
            name: schema if name in self.required else {**schema, **_or_null(schema)}
            for name, schema in self.known.items()
        }
        refused = {
            name: {
                **schema_of((None, *values)),
                "description": "Not supported yet: only values without effect are accepted.",
            }
            for name, values in self.off.items()
        }
        return {
            "type": "object",
            **({"description": text} if text else {}),
            "properties": {**optional, **refused},
            "required": list(self.required),
            "additionalProperties": False,
        }


def checked_text(where: str, value: object) -> str:
    """Return the value; raise RequestError (400) unless it is a string."""
    if not isinstance(value, str):
        raise bad_parameter(where, f"must be a string, not {kind_of(value)}")
    return value


def _or_null(schema: Schema) -> Schema:
    if "type" in schema and isinstance(schema["type"], str):
        return {"type": [schema["type"], "null"]}
    if "enum" in schema:
        return {"enum": [*schema["enum"], None]}
    return {}
