"""Each keyword of JSON Schema, one by one: enforced, without effect, or refused by name and place."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from srt.constrained.compile_process import try_constraint
from srt.constrained.constraint import Constraint
from srt.constrained.grammar import GrammarRefusal
from srt.constrained.json_schema import ENFORCED, FORMATS, KEYWORDS, NOTE
from srt.constrained.matcher import Grammars
from srt.constrained.vocabulary import Vocabulary
from srt.utils.tokenizer import Tokenizer
from tests.support.server_process import ROOT

Schema = dict[str, Any]
OBJECT: Schema = {"type": "object"}
CLOSED: Schema = {"type": "object", "additionalProperties": False}

# keyword -> (schema, JSON texts that it allows, JSON texts that it does not allow)
EXAMPLES: dict[str, tuple[Schema, list[str], list[str]]] = {
    "type": ({"type": ["integer", "null"]}, ["1", "null"], ['"a"', "1.5", "true"]),
    "enum": ({"enum": ["a", 2, None, [1]]}, ['"a"', "2", "null", "[1]"], ['"b"', "3", "[2]"]),
    "const": ({"const": {"a": [1, "x"]}}, ['{"a":[1,"x"]}'], ['{"a":[1]}', "{}"]),
    "anyOf": ({"anyOf": [{"type": "integer"}, {"const": "a"}]}, ["7", '"a"'], ['"b"', "null"]),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["7", '"a"'], ["null"]),
    "allOf": ({"type": "integer", "allOf": [{"minimum": 3}, {"maximum": 5}]}, ["3", "5"], ["2", "6"]),
    "$ref": ({"$ref": "#/$defs/a", "$defs": {"a": {"const": 1}}}, ["1"], ["2"]),
    "$defs": ({"items": {"$ref": "#/$defs/a"}, "type": "array", "$defs": {"a": {"const": 1}}}, ["[1,1]"], ["[2]"]),
    "definitions": ({"anyOf": [{"$ref": "#/definitions/a~1b"}], "definitions": {"a/b": {"const": 1}}}, ["1"], ["2"]),
    "$schema": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "array",
            "items": [{"const": 1}],
            "additionalItems": False,
        },
        ["[1]"],
        ["[2]", "[1,1]"],
    ),
    "properties": ({**CLOSED, "properties": {"a": {"type": "integer"}}}, ["{}", '{"a":1}'], ['{"a":"x"}']),
    "required": ({**OBJECT, "required": ["a"]}, ['{"a":1}', '{"a":null,"b":2}'], ["{}"]),
    "additionalProperties": (
        {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": {"type": "null"}},
        ['{"a":1,"b":null}'],
        ['{"b":1}', '{"a":1,"a":null}', '{"a":1,"\\u0061":null}'],
    ),
    "patternProperties": (
        {**CLOSED, "patternProperties": {"^x": {"type": "integer"}}},
        ['{"xa":1,"xb":2}', "{}"],
        ['{"a":1}', '{"xa":"b"}'],
    ),
    "minProperties": ({"type": "object", "minProperties": 1}, ['{"a":1}', '{"a":1,"b":2}'], ["{}"]),
    "maxProperties": ({"type": "object", "maxProperties": 1}, ["{}", '{"a":1}'], ['{"a":1,"b":2}']),
    "items": ({"type": "array", "items": {"type": "integer"}}, ["[]", "[1, 2]"], ['["a"]']),
    "prefixItems": ({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}]}, ["[1]", "[1,2,3]"], ["[2]"]),
    "additionalItems": (
        {
            "$schema": "https://json-schema.org/draft/2019-09/schema",
            "type": "array",
            "items": [{"const": 1}],
            "additionalItems": {"const": 2},
        },
        ["[1]", "[1,2,2]"],
        ["[1,1]"],
    ),
    "minItems": ({"type": "array", "minItems": 2}, ["[1,2]"], ["[]", "[1]"]),
    "maxItems": ({"type": "array", "maxItems": 1}, ["[]", "[1]"], ["[1,2]"]),
    "minLength": ({"type": "string", "minLength": 2}, ['"ab"', '"\\u00e9é"'], ['"a"', '"💡"']),
    "maxLength": ({"type": "string", "maxLength": 2}, ['"ab"', '"💡💡"', '"\\n\\u00e9"'], ['"abc"']),
    "pattern": ({"type": "string", "pattern": "b[0-9]"}, ['"ab1c"'], ['"ab"']),
    "format": ({"type": "string", "format": "ipv4"}, ['"1.2.3.4"'], ['"1.2.3"', '"256.1.1.1"']),
    "minimum": ({"type": "number", "minimum": 1.5}, ["1.5", "2"], ["1.4", "-3"]),
    "maximum": ({"type": "integer", "maximum": 10}, ["10", "-5"], ["11", "100"]),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 3}, ["4"], ["3"]),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 3}, ["2.9"], ["3", "3.0"]),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, ["9", "-6", "0"], ["4", "-5"]),
}
# Refused keywords with a value that demands something, each in a schema for which it is the only reason.
REFUSED: dict[str, Any] = {
    **{name: {"type": "string"} for name in ("not", "if", "then", "else", "contains", "propertyNames")},
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), False),
    **dict.fromkeys(("uniqueItems", "nullable", "$recursiveAnchor"), True),
    **dict.fromkeys(("minContains", "maxContains"), 1),
    **dict.fromkeys(("$dynamicRef", "$dynamicAnchor", "$recursiveRef"), "#a"),
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"required": ["b"]}},
    "dependencies": {"a": ["b"]},
    "x-guidance": {"lenient": True},
}
# Schemas that are refused for another reason, with the keyword and the place that the refusal must name.
FAULTS: list[tuple[Any, str]] = [
    (False, "a schema at #"),
    ({"type": "strin"}, "the keyword type at #/type"),
    ({"properties": {"a": 1}}, "a schema at #/properties/a"),
    ({"properties": []}, "the keyword properties at #/properties"),
    ({"anyOf": {}}, "the keyword anyOf at #/anyOf"),
    ({"type": "string", "format": "color"}, "the keyword format at #/format"),
    ({"items": {"pattern": "(?=a)b", "type": "string"}, "type": "array"}, "the keyword pattern at #/items/pattern"),
    ({"items": {"pattern": "(", "type": "string"}, "type": "array"}, "the keyword pattern at #/items/pattern"),
    ({"type": "string", "minLength": -1}, "the keyword minLength at #/minLength"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "the keyword minLength at #/minLength"),
    ({"$ref": "#/$defs/a"}, "the keyword $ref at #/$ref"),
    ({"$ref": "https://example.com/a"}, "the keyword $ref at #/$ref"),
    ({"properties": {"a": {"$id": "https://example.com/a"}}}, "the keyword $id at #/properties/a/$id"),
    ({"const": 2**60}, "the keyword const at #/const"),
    ({"type": "integer", "minimum": 2**60}, "the keyword minimum at #/minimum"),
    ({"type": "object", "minProperties": 2}, "the keyword minProperties at #/minProperties"),
    (
        {**OBJECT, "properties": {"a": {"oneOf": [{"type": "string"}, {"maxLength": 3, "type": "string"}]}}},
        "the keyword oneOf at #/properties/a/oneOf",
    ),
    (
        {"type": "array", "items": {"$ref": "#/definitions/d"}, "definitions": {"d": {"anyOf": [{"not": {}}]}}},
        "the keyword not at #/definitions/d/anyOf/0/not",
    ),
    (
        {
            "type": "array",
            "items": {"$ref": "#/$defs/d"},
            "$defs": {"d": {**OBJECT, "patternProperties": {"^a": {}, "a$": {}}}},
        },
        "the keyword patternProperties at #/$defs/d/patternProperties",
    ),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "the keyword allOf at #/allOf"),
]


class World:
    """Schemas and texts, by the vocabulary of the shipped model."""

    def __init__(self, vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
        self.vocabulary = vocabulary
        self.tokenizer = tokenizer

    def grammar(self, schema: Any) -> str:
        return try_constraint(Constraint("json_schema", json.dumps(schema)), self.vocabulary)

    def allows(self, schema: Any, text: str) -> bool:
        grammars = Grammars(self.vocabulary)
        grammars.compile("key", self.grammar(schema))
        matcher = grammars.matcher("key")
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return matcher.accept_all(ids) == len(ids) and matcher.may_end

    def refusal(self, schema: Any) -> str:
        with pytest.raises(GrammarRefusal) as caught:
            self.grammar(schema)
        return str(caught.value)


@pytest.fixture(scope="module")
def world(vocabulary: Vocabulary, tokenizer: Tokenizer) -> World:
    return World(vocabulary, tokenizer)


def test_every_keyword_has_an_example() -> None:
    assert set(EXAMPLES) == {name for name, what in KEYWORDS.items() if what == ENFORCED}
    assert set(REFUSED) == {name for name, what in KEYWORDS.items() if what not in (ENFORCED, NOTE)}


@pytest.mark.parametrize("keyword", EXAMPLES)
def test_a_keyword_is_enforced(world: World, keyword: str) -> None:
    schema, valid, invalid = EXAMPLES[keyword]
    for text in valid:
        jsonschema.validate(json.loads(text), schema)
        assert world.allows(schema, text), text
    for text in invalid:
        assert not world.allows(schema, text), text


@pytest.mark.parametrize("keyword", REFUSED)
def test_a_keyword_is_refused_by_name(world: World, keyword: str) -> None:
    schema = {"type": "object", "properties": {"a/b": {"anyOf": [{"type": "array", keyword: REFUSED[keyword]}]}}}
    assert world.refusal(schema).startswith(f"has the keyword {keyword} at #/properties/a~1b/anyOf/0/{keyword}: ")


@pytest.mark.parametrize("keyword", [name for name, what in KEYWORDS.items() if what == NOTE and name != "$id"])
def test_a_note_changes_nothing(world: World, keyword: str) -> None:
    schema = {"type": "array", "items": {"type": "integer", keyword: "not"}, keyword: "contains"}
    assert world.grammar(schema) == world.grammar({"type": "array", "items": {"type": "integer"}})


@pytest.mark.parametrize(
    "harmless",
    [{"uniqueItems": False}, {"nullable": False}, {"dependentRequired": {}}, {"propertyNames": True}, {"x-order": 3}],
    ids=str,
)
def test_a_value_that_demands_nothing_passes(world: World, harmless: Schema) -> None:
    assert world.grammar({"type": "array", **harmless}) == world.grammar({"type": "array"})


@pytest.mark.parametrize(("schema", "what"), FAULTS, ids=[f"{what}-{i}" for i, (_, what) in enumerate(FAULTS)])
def test_a_fault_is_named_with_its_place(world: World, schema: Any, what: str) -> None:
    assert world.refusal(schema).startswith(f"has {what}: ")


@pytest.mark.parametrize("keyword", ["not", "title", "uniqueItems"])
def test_properties_may_be_named_like_keywords(world: World, keyword: str) -> None:
    schema = {**CLOSED, "properties": {keyword: {"const": {keyword: 1}}}, "required": [keyword]}
    assert world.allows(schema, json.dumps({keyword: {keyword: 1}}))


def test_a_definition_that_nothing_uses_is_not_looked_at(world: World) -> None:
    assert world.grammar({"type": "integer", "$defs": {"a": {"not": {}}}}) == world.grammar({"type": "integer"})


def test_a_reference_may_lead_anywhere(world: World) -> None:
    schema = {
        "$ref": "#/components/schemas/A%20b",
        "components": {"schemas": {"A b": {"items": {"$ref": "#"}, "type": "array"}}},
    }
    assert world.allows(schema, "[[],[[]]]") and not world.allows(schema, "[1]")


def test_tagged_unions_of_references_are_enforced(world: World) -> None:
    """As pydantic writes them."""
    kinds = {
        name: {
            **OBJECT,
            "properties": {"kind": {"const": name}, "value": {"type": kind}},
            "required": ["kind", "value"],
        }
        for name, kind in (("a", "integer"), ("b", "string"))
    }
    schema = {
        "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        "discriminator": {"propertyName": "kind", "mapping": {"a": "#/$defs/a", "b": "#/$defs/b"}},
        "$defs": kinds,
    }
    assert world.allows(schema, '{"kind":"b","value":"x"}') and not world.allows(schema, '{"kind":"a","value":"x"}')


def test_bounds_of_64_bits_stay_within_exact_numbers(world: World) -> None:
    schema = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    assert world.allows(schema, str(2**53)) and world.allows(schema, str(-(2**53)))
    assert not world.allows(schema, str(2**63))


FORMAT_TEXTS: dict[str, tuple[str, str]] = {
    "date-time": ("2024-02-29T23:59:59.5+01:00", "2023-02-29T23:59:59Z"),
    "time": ("23:59:59Z", "23:59:60Z"),
    "date": ("2000-02-29", "1900-02-29"),
    "duration": ("P1DT2H", "1D"),
    "email": ("a.b@example.org", "a@"),
    "hostname": ("a-b.example", "-a"),
    "ipv4": ("127.0.0.1", "127.0.0.01"),
    "ipv6": ("::1", "1::2::3"),
    "uuid": ("123e4567-e89b-12d3-a456-426614174000", "123e4567"),
    "uri": ("https://example.org/a?b#c", "example.org"),
}


@pytest.mark.parametrize("form", FORMATS)
def test_a_format_is_enforced(world: World, form: str) -> None:
    right, wrong = FORMAT_TEXTS[form]
    assert world.allows({"type": "string", "format": form}, json.dumps(right))
    assert not world.allows({"type": "string", "format": form}, json.dumps(wrong))


@pytest.mark.parametrize(
    "schema", [{"type": "integer", "format": "int32"}, {"type": ["number", "null"], "format": "double"}]
)
def test_a_format_of_numbers_says_nothing(world: World, schema: Schema) -> None:
    assert world.allows(schema, "7")


def test_a_date_keeps_the_pattern_beside_it(world: World) -> None:
    schema = {"type": "string", "format": "date", "pattern": "^2024", "allOf": [{"maxLength": 10}]}
    assert world.allows(schema, '"2024-01-31"') and not world.allows(schema, '"2023-01-31"')


def test_the_page_lists_all_keywords_and_formats() -> None:
    page = (ROOT / "docs" / "structured-output.md").read_text("utf-8")
    section = page.partition("## JSON Schema")[2]
    rows = dict(re.findall(r"^\| (`.*?) \| (enforced|refused)[^|]*\|$", section, re.MULTILINE))
    listed = {name: what for names, what in rows.items() for name in re.findall(r"`([^`]+)`", names)}
    assert listed == {
        name: "enforced" if what == ENFORCED else "refused" for name, what in KEYWORDS.items() if what != NOTE
    }
    assert re.findall(r"`([^`]+)`", section.partition("Formats: ")[2].partition(". ")[0]) == list(FORMATS)
