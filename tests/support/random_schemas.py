"""Random JSON Schemas whose answers are short, and a random model: a loop that draws any allowed token."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from srt.constrained.json_schema import FORMATS
from srt.constrained.matcher import Matcher

Schema = dict[str, Any]

PATTERNS = [
    "^[a-c]{2,4}$",
    "^(?:foo|bar)-[0-9]{1,3}$",
    "x[0-9]y",
    "^\\d{3}-\\d{4}$",
    "^\\w{1,6}$",
    "[A-Z]{2}$",
    "^a?b*c{1,3}$",
]
NAMES = ["id", "name", "größe", 'quo"te', "a b", "key/with~marks", "tab\tname", "x", "$ref", "type", "名前"]
WORDS = ["red", "grün", "a\nb", 'say "x"', "back\\slash", "", "💡", "null", "0"]


class SchemaGenerator:
    """Draws schemas of every kind that is enforced, from one seed."""

    def __init__(self, seed: int) -> None:
        self._draws = random.Random(seed)

    def schema(self) -> Schema:
        """A whole schema, sometimes with definitions that refer to each other."""
        draws = self._draws
        names = ["Leaf", "Pair"] if draws.random() < 0.4 else []
        whole = self._node(3, names)
        if names:
            pair = {
                "type": "object",
                "properties": {
                    "left": {"$ref": "#/$defs/Leaf"},
                    "next": {"anyOf": [{"$ref": "#/$defs/Pair"}, {"type": "null"}]},
                },
                "required": ["left", "next"],
                "additionalProperties": False,
            }
            whole["$defs"] = {"Leaf": self._leaf(), "Pair": pair}
        if draws.random() < 0.5:
            whole |= {"title": "A title", "description": "uniqueItems is only a word here", "examples": [1]}
        return whole

    def _node(self, depth: int, names: list[str]) -> Schema:
        draws = self._draws
        kinds: list[Callable[[], Schema]] = [self._leaf]
        if depth:
            inner = depth - 1
            kinds += [
                lambda: self._object(inner, names),
                lambda: self._object(inner, names),
                lambda: self._array(inner, names),
                lambda: self._tuple(inner, names),
                lambda: {"anyOf": [self._node(inner, names) for _ in range(draws.randint(1, 3))]},
                lambda: self._map(inner, names),
                lambda: self._tagged(inner, names),
                self._all_of,
            ]
        if names:
            kinds.append(lambda: {"$ref": f"#/$defs/{draws.choice(names)}"})
        return draws.choice(kinds)()

    def _leaf(self) -> Schema:
        draws = self._draws
        kinds: list[Callable[[], Schema]] = [
            self._string,
            self._number,
            self._integer,
            self._enum,
            self._const,
            self._nullable,
            lambda: {"type": "boolean"},
        ]
        return draws.choice(kinds)()

    def _string(self) -> Schema:
        draws = self._draws
        least = draws.randint(0, 3)
        length: Schema = {"minLength": least, "maxLength": least + draws.randint(0, 8)}
        kind = draws.random()
        if kind < 0.3:
            return {"type": "string", "format": draws.choice(FORMATS), "maxLength": 40}
        if kind < 0.6:
            return {"type": "string", "pattern": draws.choice(PATTERNS), "maxLength": 16}
        return {"type": "string", **length}

    def _integer(self) -> Schema:
        draws = self._draws
        low = draws.randint(-2000, 2000)
        schema: Schema = {"type": "integer"}
        schema[draws.choice(["minimum", "exclusiveMinimum"])] = low
        schema[draws.choice(["maximum", "exclusiveMaximum"])] = low + draws.randint(50, 3000)
        if draws.random() < 0.3:
            schema["multipleOf"] = draws.choice([2, 5, 7, 10])
        if draws.random() < 0.1:
            return {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
        return schema

    def _number(self) -> Schema:
        draws = self._draws
        low = draws.choice([-3.5, -0.125, 0, 0.1, 7, 1e3])
        schema: Schema = {"type": "number", "minimum": low, "maximum": low + draws.choice([0.5, 1, 12.25])}
        if draws.random() < 0.3:
            schema = {"type": "number", "minimum": 0, "maximum": 40, "multipleOf": draws.choice([0.5, 0.25, 3])}
        return schema

    def _enum(self) -> Schema:
        draws = self._draws
        values: list[Any] = [*WORDS, 1, -7, 2.5, True, None, [1, "a"], {"a": 1}, []]
        return {"enum": draws.sample(values, draws.randint(1, 6))}

    def _const(self) -> Schema:
        return {"const": self._draws.choice([*WORDS, 12, {"k": ["v", None]}, False])}

    def _nullable(self) -> Schema:
        schema = self._draws.choice([self._string, self._integer])()
        return {**schema, "type": [schema["type"], "null"]}

    def _object(self, depth: int, names: list[str]) -> Schema:
        draws = self._draws
        keys = draws.sample(NAMES, draws.randint(1, 4))
        schema: Schema = {
            "type": "object",
            "properties": {key: self._node(depth, names) for key in keys},
            "required": draws.sample(keys, draws.randint(0, len(keys))),
            "additionalProperties": False,
        }
        if draws.random() < 0.15:
            schema["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 9}
            schema["required"] = keys
            schema["maxProperties"] = len(keys) + 1
        return schema

    def _map(self, depth: int, names: list[str]) -> Schema:
        """An object whose names match a pattern, or seldom are free: a random model seldom ends a free name."""
        value = self._node(depth, names)
        if self._draws.random() < 0.2:
            return {"type": "object", "additionalProperties": value, "minProperties": 1, "maxProperties": 2}
        return {
            "type": "object",
            "patternProperties": {"^k[0-9]$": value},
            "additionalProperties": False,
            "maxProperties": 2,
        }

    def _tagged(self, depth: int, names: list[str]) -> Schema:
        """Objects that a constant tells apart, of which exactly one must match."""
        options = [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, "value": self._node(depth, names)},
                "required": ["kind", "value"],
                "additionalProperties": False,
            }
            for kind in ("a", "b")
        ]
        return {"oneOf": options}

    def _array(self, depth: int, names: list[str]) -> Schema:
        least = self._draws.randint(0, 2)
        return {"type": "array", "items": self._node(depth, names), "minItems": least, "maxItems": least + 2}

    def _tuple(self, depth: int, names: list[str]) -> Schema:
        items = [self._node(depth, names) for _ in range(self._draws.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}

    def _all_of(self) -> Schema:
        return {"type": "string", "allOf": [{"minLength": 2}, {"maxLength": 5}, {"pattern": "^[a-f]*$"}]}


@dataclass(frozen=True)
class Drawn:
    ids: list[int]
    is_finished: bool
    error: str | None


def draw_answer(matcher: Matcher, draws: random.Random, most: int = 300) -> Drawn:
    """Draw allowed tokens, all equally likely, until the answer ends or has `most` of them. The ids have no end of text."""
    ids: list[int] = []
    while len(ids) < most:
        allowed = matcher.allowed_ids()
        if matcher.error is not None or not len(allowed):
            return Drawn(ids, False, matcher.error or "no token is allowed")
        token_id = int(allowed[draws.randrange(len(allowed))])
        assert matcher.accept(token_id), f"the mask allows {token_id}, which the matcher refuses"
        if matcher.has_ended:
            return Drawn(ids, True, None)
        ids.append(token_id)
    return Drawn(ids, matcher.is_finished, None)
