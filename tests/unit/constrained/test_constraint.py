"""Every spelling of a constraint means the same, and what cannot be meant is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from srt.constrained.constraint import CONSTRAINT_FIELDS, MAX_CONTENT_BYTES, Constraint, read_constraint
from srt.sampling.parameter_checks import ParameterError

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
TEXT = json.dumps(SCHEMA, indent=2)
TAG = {
    "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
    "triggers": ["<f"],
}

SAME: list[list[dict[str, Any]]] = [
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"json_schema": SCHEMA},
        {"json_schema": TEXT},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": TEXT, "regex": None}},
        {"structured_outputs": {"json": TEXT}},
    ],
    [
        {"response_format": {"type": "json_object"}},
        {"json_schema": {"type": "object"}},
        {"structured_outputs": {"json_object": True}},
    ],
    [{"regex": "a+"}, {"structured_outputs": {"regex": "a+"}}],
    [{"ebnf": 'root ::= "a"'}, {"structured_outputs": {"grammar": 'root ::= "a"'}}],
    [{"structured_outputs": {"choice": ["a", "b"]}}, {"structured_outputs": {"choice": ["a", "b", "a"]}}],
    [
        {"structural_tag": TAG},
        {"structural_tag": json.dumps({"type": "structural_tag", **TAG})},
        {"response_format": {"type": "structural_tag", **TAG}},
        {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
    ],
]

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format.type must be text, json_object,"),
    ({"response_format": "json"}, "response_format must be an object, not a string"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema must be an object"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema is",
    ),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema is not supported"),
    ({"json_schema": "{"}, "json_schema is not JSON"),
    ({"json_schema": '{"const": NaN}'}, "json_schema is not JSON: NaN is not a number"),
    ({"json_schema": {"const": float("inf")}}, "json_schema is not JSON"),
    ({"json_schema": "[]"}, "json_schema must be a JSON Schema"),
    ({"json_schema": {"const": "\ud800"}}, "json_schema has half of a surrogate pair"),
    ({"regex": 1}, "regex must be a string, not an integer"),
    ({"regex": "a\0"}, "regex has a null character"),
    (
        {"regex": "é" * MAX_CONTENT_BYTES},
        f"regex may have at most {MAX_CONTENT_BYTES} bytes, not {2 * MAX_CONTENT_BYTES}",
    ),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice must be a list of at least one string"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice must be a list of at least one string"),
    ({"structural_tag": "1"}, "structural_tag must be a structural tag"),
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml is not supported"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs has the members regex and choice"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object must be true or false"),
    ({"regex": "a", "ebnf": "b"}, "ebnf and regex are two constraints on one answer"),
    (
        {"regex": "a", "structured_outputs": {"regex": "a"}},
        "structured_outputs.regex and regex are two constraints on one answer",
    ),
    (
        {"json_schema": {}, "response_format": {"type": "json_object"}},
        "json_schema and response_format are two constraints",
    ),
]


def read(fields: dict[str, Any]) -> Constraint:
    constraint = read_constraint(fields)
    assert constraint is not None
    return constraint


@pytest.mark.parametrize("spellings", SAME, ids=lambda spellings: next(iter(spellings[-1])))
def test_all_spellings_of_a_constraint_have_one_key(spellings: list[dict[str, Any]]) -> None:
    constraints = [read(fields) for fields in spellings]
    assert len(set(constraints)) == 1
    assert len({constraint.key for constraint in constraints}) == 1


def test_all_fields_are_tried_here() -> None:
    assert {name for spellings in SAME for fields in spellings for name in fields} == set(CONSTRAINT_FIELDS)


@pytest.mark.parametrize(("fields", "sentence"), WRONG, ids=[sentence for _, sentence in WRONG])
def test_what_is_wrong_is_refused_by_name(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ParameterError) as caught:
        read_constraint(fields)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    "fields",
    [{}, {"regex": None}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}, {"temperature": 1}],
    ids=str,
)
def test_no_constraint_is_none(fields: dict[str, Any]) -> None:
    assert read_constraint(fields) is None


def test_kinds_and_contents_have_different_keys() -> None:
    keys = {Constraint(kind, content).key for kind in ("regex", "ebnf") for content in ("a", "b", "ab")}
    assert len(keys) == 6


def test_the_order_of_properties_is_kept() -> None:
    assert read({"json_schema": TEXT}).content.index('"b"') < read({"json_schema": TEXT}).content.index('"a"')


@pytest.mark.parametrize("as_text", [False, True], ids=["object", "text"])
@pytest.mark.parametrize("depth", [1000, 100_000])
def test_deep_nesting_is_refused(depth: int, as_text: bool) -> None:
    schema: Any = {"type": "integer"}
    for _ in range(1000 if not as_text else 0):
        schema = {"items": schema}
    text = '{"not":' * depth + "{}" + "}" * depth
    with pytest.raises(ParameterError, match=r"nested too deeply|may have at most"):
        read_constraint({"json_schema": text if as_text else schema})
