"""Find the keyword at fault in a JSON Schema that the grammar library refused: its own messages seldom say where."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from srt.constrained.json_schema import Converted, Schema, SchemaRefusal

_SEARCH_S: Final = 0.5
_INSTEAD: Final = {
    "oneOf": "its schemas are not known to exclude each other: give each object a required property with a const of its own,"
    " or use anyOf",
}


def find_culprit(converted: Converted, complaint: str, compiles: Callable[[Schema], str | None]) -> SchemaRefusal:
    """Return the refusal that names the keyword and its place.

    complaint: the library's message about the whole schema. compiles: its message about another schema, None if there is none.
    The search ends after half a second with the place found so far.
    """
    return _Search(converted, compiles).run(complaint)


class _Search:
    def __init__(self, converted: Converted, compiles: Callable[[Schema], str | None]) -> None:
        self._places = converted.places
        self._shared: Schema = {name: value for name, value in converted.schema.items() if name in ("$schema", "$defs")}
        self._root = {name: value for name, value in converted.schema.items() if name not in self._shared}
        self._compiles = compiles
        self._until_s = time.monotonic() + _SEARCH_S

    def run(self, complaint: str) -> SchemaRefusal:
        node, place = self._root, "#"
        seen = {id(node)}
        while (inner := self._failing_child(node, complaint, seen)) is not None:
            node = inner
            place = self._places.get(id(node), place)
        keyword = self._keyword(node, complaint)
        reason = _INSTEAD.get(keyword or "", f"it cannot be enforced: {complaint.rstrip('.')}")
        return SchemaRefusal(keyword, f"{place}/{keyword}" if keyword else place, reason)

    def _failing_child(self, node: Schema, complaint: str, seen: set[int]) -> Schema | None:
        """Return a part of this schema that is refused by itself for the same reason."""
        for child in self._children(node):
            if id(child) not in seen and time.monotonic() < self._until_s:
                seen.add(id(child))
                if _is_same(self._complaint(child), complaint):
                    return child
        return None

    def _children(self, node: Schema) -> Iterator[Schema]:
        if node.get("$ref", "").startswith("#/$defs/"):
            target = self._shared["$defs"][node["$ref"].removeprefix("#/$defs/")]
            yield from _schemas(target)
        for name, value in node.items():
            if name in ("properties", "patternProperties"):
                for one in value.values():
                    yield from _schemas(one)
            elif name in ("anyOf", "oneOf", "allOf", "prefixItems", "items", "additionalItems", "additionalProperties"):
                for one in value if isinstance(value, list) else [value]:
                    yield from _schemas(one)

    def _keyword(self, node: Schema, complaint: str) -> str | None:
        """Return the keyword without which the complaint is another one, best of all none."""
        best = None
        for name in sorted(node, key=lambda name: name == "type"):  # without a type, most complaints change
            if time.monotonic() > self._until_s:
                break
            left = self._complaint({other: value for other, value in node.items() if other != name})
            if left is None:
                return name
            if best is None and not _is_same(left, complaint):
                best = name
        return best

    def _complaint(self, node: Schema) -> str | None:
        return self._compiles({**self._shared, **node})


def _schemas(value: Any) -> Iterator[Schema]:
    if isinstance(value, dict):
        yield value


def _is_same(one: str | None, other: str) -> bool:
    return one is not None and one.partition(":")[0] == other.partition(":")[0]
