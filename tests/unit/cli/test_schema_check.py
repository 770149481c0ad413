"""What `srt chat` says of an answer that should be valid for a schema."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from srt.cli.schema_check import LONGEST_REASON, judge

COUNT = {"type": "object", "properties": {"count": {"minimum": 3}}, "required": ["count"]}


@pytest.mark.parametrize(
    ("text", "schema", "phrase"),
    [
        ('{"count": 3}', COUNT, "valid JSON for the schema"),
        ("[]", True, "valid JSON for the schema"),
        ('{"count": 2}', COUNT, "not valid for the schema: at $.count, 2 is less than the minimum of 3"),
        ("{}", COUNT, "not valid for the schema: at $, 'count' is a required property"),
        ('"1.2.3"', {"format": "ipv4"}, "not valid for the schema: at $, '1.2.3' is not a 'ipv4'"),
        ('[1, "a"]', {"items": [{"type": "null"}], "$schema": "http://json-schema.org/draft-07/schema#"}, "at $[0], "),
        ('{"count": ', COUNT, "not JSON, or not all of it"),
        ("", COUNT, "not JSON, or not all of it"),
        ("[" * 100_000, {}, "not checked against the schema: too deeply nested"),
        ('"a"', {"pattern": "(?P<"}, "JSON, not checked against the schema: "),
        ("1", {"$ref": "https://example.com/schema"}, "JSON, not checked against the schema: "),
        ("1", {"$ref": "#"}, "JSON, not checked against the schema: "),
    ],
)
def test_an_answer_is_judged_in_a_phrase(text: str, schema: Any, phrase: str) -> None:
    assert phrase in judge(text, schema)


def test_a_reason_is_kept_short() -> None:
    phrase = judge(json.dumps("x" * 10_000), {"type": "null"})
    assert phrase.startswith("not valid for the schema: at $, 'xxx") and len(phrase) == LONGEST_REASON


def test_an_answer_is_not_checked_where_the_validator_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    assert judge("{}", COUNT) == "JSON, not checked against the schema: pip install jsonschema"
