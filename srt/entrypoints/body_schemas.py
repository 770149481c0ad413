"""JSON Schemas of request bodies, derived from the classes that parse them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srt.entrypoints.native_shapes import GenerateBody
from srt.entrypoints.request_schema import LEAF, RequestBody
from srt.sampling.foreign_fields import Values, schema_of
from srt.sampling.sampling_params import CONSTRAINTS, PARAMETERS, UNSUPPORTED

Schema = dict[str, Any]


def body_schema(body: type[RequestBody]) -> Schema:
    """Return the schema of a body with all its fields, including those that are refused or ignored."""
    whole = body.model_json_schema()
    definitions = whole.pop("$defs", {})
    properties = {name: _field(schema, definitions) for name, schema in whole["properties"].items()}
    for theirs, ours in body.SAMPLING.items():
        if theirs in properties:
            properties[theirs] = _sampling_parameter(ours)
    if body is GenerateBody:
        one = sampling_schema()
        properties["sampling_params"]["anyOf"] = [one, {"type": "array", "items": one}, {"type": "null"}]
    properties |= {name: _unsupported(values) for name, values in body.UNSUPPORTED.items()}
    properties |= {name: {"description": "Accepted and ignored."} for name in sorted(body.MEANINGLESS)}
    return {
        "type": "object",
        "description": body.__doc__ or "",
        "properties": properties,
        "required": whole.get("required", []),
        "additionalProperties": False,
        **{name: whole[name] for name in ("anyOf",) if name in whole},
    }


def sampling_schema() -> Schema:
    """Return the schema of /generate's sampling_params."""
    properties = {name: _sampling_parameter(name) for name in PARAMETERS}
    for name, (text, schema) in CONSTRAINTS.items():
        properties[name] = _or_null({**schema, "description": text})
    properties |= {name: _unsupported(values) for name, values in UNSUPPORTED.items()}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def with_values(schema: Any, formats: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return a copy of the schema, where each value of a format in `formats` gets that format's entries, such as this model's
    vocabulary size."""
    if isinstance(schema, dict):
        known = formats.get(str(schema.get("format")), {})
        return {name: with_values(part, formats) for name, part in {**schema, **known}.items()}
    if isinstance(schema, list):
        return [with_values(part, formats) for part in schema]
    return schema


def _sampling_parameter(name: str) -> Schema:
    parameter = PARAMETERS[name]
    schema = parameter.check.schema()
    if name in ("max_new_tokens", "min_new_tokens"):
        schema["format"] = "num-tokens"
    return _or_null({**schema, "description": parameter.text})


def _unsupported(off_values: Values) -> Schema:
    return {
        **schema_of(off_values),
        "description": "Not supported yet: only values without effect are accepted.",
    }


def _field(schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    leaf = schema.pop(LEAF, {})
    written = _plain(schema, leaf, definitions)
    if "default" not in schema:
        return written
    given = {} if schema["default"] in (None, "", [], {}) else {"default": schema["default"]}
    return {**_or_null(written), **given}


def _plain(schema: Schema, leaf: Mapping[str, Any], definitions: Mapping[str, Schema]) -> Schema:
    """Return the schema without titles and references, and with the entries of `leaf` at the values of their type."""
    if "$ref" in schema:
        whole = definitions[schema["$ref"].rpartition("/")[2]]
        return {
            "type": "object",
            "properties": {name: _field(dict(part), definitions) for name, part in whole["properties"].items()},
            "additionalProperties": False,
        }
    written = {name: value for name, value in schema.items() if name not in ("title", "default", LEAF)}
    if "anyOf" in written:
        written["anyOf"] = [_plain(one, leaf, definitions) for one in written["anyOf"]]
    elif written.get("type") == "array" and "properties" not in written.get("items", {}):
        written["items"] = _plain(written["items"], leaf, definitions)
    return {**written, **leaf.get(str(written.get("type")), {})}


def _or_null(schema: Schema) -> Schema:
    """Return the schema with null allowed: null means the default."""
    text = {"description": schema["description"]} if "description" in schema else {}
    rest = {name: value for name, value in schema.items() if name != "description"}
    options = rest["anyOf"] if rest.keys() == {"anyOf"} else [rest]
    return {**text, "anyOf": [*[one for one in options if one != {"type": "null"}], {"type": "null"}]}
