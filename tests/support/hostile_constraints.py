"""Constraints that would take very long, or very much memory, if nothing bounded them."""

from __future__ import annotations

from typing import Any


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def chain(rules: int) -> str:
    return "start: r0\n" + "".join(f"r{i}:r{i + 1}\n" for i in range(rules)) + f'r{rules}:"z"\n'


HOSTILE: dict[str, dict[str, Any]] = {
    "a million characters": {"json_schema": {"type": "string", "maxLength": 10**6}},
    "a million items of a million characters": {
        "json_schema": {"type": "array", "items": {"type": "string", "maxLength": 10**6}, "maxItems": 10**6}
    },
    "nesting of 1,000": {"json_schema": '{"items":' * 1000 + "{}" + "}" * 1000},
    "the deepest nesting that is read": {"json_schema": nested(99)},
    "an enum of 10,000": {"json_schema": {"enum": list(range(10_000))}},
    "a choice of 8,000": {"structured_outputs": {"choice": [f"x{i}" for i in range(8000)]}},
    "an exponential expression": {"regex": "(((a{100}){100}){100}){100}"},
    "many states": {"regex": "(?:[ab]*a[ab]{14}){3}"},
    "many optional parts": {"regex": "(a|b|c){1,5000}(x?){5000}x{5000}"},
    "nested groups": {"regex": "(" * 10_000 + "a" + ")" * 10_000},
    "5,000 rules": {"ebnf": chain(4999)},
    "3,300 rules in the other language": {
        "ebnf": "root ::= r0\n" + "".join(f'r{i}::="a"r{i + 1}\n' for i in range(3300)) + 'r3300::="z"\n'
    },
    "left recursion without end": {"ebnf": 'start: a\na: a a | a | "x"\n'},
    "5,000 brackets": {"ebnf": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
    "a pattern that explodes": {
        "json_schema": {"type": "string", "pattern": "^(?:(?:.*a){20}.*b){20}$", "minLength": 5000}
    },
    "patterns that must be compared": {
        "json_schema": {"type": "object", "patternProperties": {f"^(a|b)*{c}.{{20}}$": {} for c in "abcd"}}
    },
}
