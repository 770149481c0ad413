"""JSON Schemas as the grammar library can enforce them: what it cannot do is refused here by keyword and place.

`KEYWORDS` lists what becomes of each keyword of JSON Schema. Unknown keywords change nothing, as JSON Schema demands. `convert` returns
an equivalent schema that holds only what the library enforces, and closes the gaps that were found in it: see the comments there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import unquote

Schema = dict[str, Any]

ENFORCED: Final = "enforced"
NOTE: Final = "note"  # never changes which values are valid

KEYWORDS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            # Any value
            "type enum const anyOf oneOf allOf $ref $defs definitions $schema "
            # Objects and arrays
            "properties required additionalProperties patternProperties minProperties maxProperties "
            "items prefixItems additionalItems minItems maxItems "
            # Strings and numbers
            "minLength maxLength pattern format minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split(),
            ENFORCED,
        ),
        **dict.fromkeys(
            "$id id $anchor $comment $vocabulary title description default example examples deprecated readOnly writeOnly "
            "contentMediaType contentEncoding contentSchema discriminator externalDocs xml".split(),
            NOTE,
        ),
        # Refused, with what to do instead.
        "not": "say what the value must be instead, for example with enum",
        "if": "use anyOf with one schema for each case",
        "then": "use anyOf with one schema for each case",
        "else": "use anyOf with one schema for each case",
        "uniqueItems": "leave it out, and check the answer",
        "contains": "leave it out, and check the answer",
        "minContains": "leave it out, and check the answer",
        "maxContains": "leave it out, and check the answer",
        "propertyNames": "use patternProperties with additionalProperties: false",
        "dependentRequired": "use anyOf with one object for each case",
        "dependentSchemas": "use anyOf with one object for each case",
        "dependencies": "use anyOf with one object for each case",
        "unevaluatedProperties": "use additionalProperties",
        "unevaluatedItems": "use items",
        "nullable": 'it is not a keyword of JSON Schema: write type: ["string", "null"] or anyOf with type null',
        "$dynamicRef": "use $ref",
        "$dynamicAnchor": "use $defs and $ref",
        "$recursiveRef": "use $ref",
        "$recursiveAnchor": "use $defs and $ref",
        "x-guidance": "leave it out: the server sets the grammar library's options",
    }
)
# Values with which a refused keyword demands nothing.
_NO_DEMAND: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("uniqueItems", "nullable", "not", "$recursiveAnchor"), (False,)),
        **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
        **dict.fromkeys(("propertyNames", "unevaluatedProperties", "unevaluatedItems"), (True, {})),
    }
)
FORMATS: Final = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
# Floats hold every integer up to this one; the library computes with floats.
_LARGEST_EXACT: Final = 2**53
_NUMBERS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ONE: Final = ("additionalProperties", "additionalItems")
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS: Final = ("properties", "patternProperties")

_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    "(?:(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    f"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:[.][0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
# The library's own expressions allow the 29th of February in every year, the year 0, and the 60th second anywhere.
_STRICTER: Mapping[str, str] = MappingProxyType(
    {
        "date": f"^{_DATE}$",
        "date-time": f"^{_DATE}T{_TIME}$",
        "time": f"^{_TIME}$",
    }
)


class SchemaRefusal(Exception):
    """A schema that cannot be enforced: the keyword at fault, its place as a JSON pointer, and a reason."""

    def __init__(self, keyword: str | None, place: str, reason: str) -> None:
        what = f"the keyword {keyword} at {place}" if keyword else f"a schema at {place}"
        super().__init__(f"has {what}: {reason}")
        self.keyword = keyword
        self.place = place


@dataclass(frozen=True, slots=True)
class Converted:
    """A schema for the library, and where each of its parts stood in the client's."""

    schema: Schema
    allows_escapes: bool  # strings may hold characters as \\uXXXX
    places: dict[int, str] = field(default_factory=dict)  # id of a part -> JSON pointer


def convert(schema: Schema | bool) -> Converted:
    """Return the schema for the library; raise SchemaRefusal for what it cannot enforce."""
    if schema is False:
        raise SchemaRefusal(None, "#", "the schema false allows no value")
    conversion = _Conversion(schema if isinstance(schema, dict) else {})
    return conversion.run()


class _Conversion:
    """One run of `convert`. References are followed, so that definitions which nothing uses are neither checked nor sent."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._places: dict[int, str] = {}
        self._definitions: dict[str, str] = {}  # pointer in the client's schema -> name among our $defs
        self._pointers: list[str] = []  # of our $defs, in the order of their names
        self._allows_escapes = True

    def run(self) -> Converted:
        converted = self._node(self._root, "#")
        assert isinstance(converted, dict)
        defs: Schema = {}
        while len(defs) < len(self._pointers):
            pointer = self._pointers[len(defs)]
            defs[self._definitions[pointer]] = self._node(_resolve(self._root, pointer), f"#{pointer}")
        whole = {**converted, **({"$defs": defs} if defs else {})}
        if isinstance(self._root.get("$schema"), str):
            whole = {"$schema": self._root["$schema"], **whole}
        self._places[id(whole)] = "#"
        return Converted(whole, self._allows_escapes, self._places)

    def _node(self, node: Any, place: str) -> Schema | bool:
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            raise SchemaRefusal(None, place, "it must be an object or a boolean")
        self._refuse_keywords(node, place)
        converted = {name: self._keyword(name, value, place) for name, value in node.items() if _is_enforced(name)}
        self._check_strings(node, converted, place)
        self._check_counts(node, place)
        self._check_names(node)
        self._places[id(converted)] = place
        return converted

    def _refuse_keywords(self, node: Schema, place: str) -> None:
        for name, value in node.items():
            advice = KEYWORDS.get(name, NOTE)
            no_demand = _NO_DEMAND.get(name, ())
            if advice in (ENFORCED, NOTE) or (isinstance(value, (bool, dict)) and value in no_demand):
                continue
            raise SchemaRefusal(name, f"{place}/{_escaped(name)}", f"it cannot be enforced: {advice}")
        nested = node.get("$id")
        if place != "#" and isinstance(nested, str) and not nested.startswith("#"):
            raise SchemaRefusal("$id", f"{place}/$id", "only the whole schema may have a name of its own")

    def _keyword(self, name: str, value: Any, place: str) -> Any:
        inner = f"{place}/{name}"
        if name == "$ref":
            return self._reference(value, inner)
        if name in _ONE or (name == "items" and not isinstance(value, list)):
            return self._node(value, inner)
        if name in _LISTS or name == "items":
            return self._list(name, value, inner)
        if name in _MAPS:
            if not isinstance(value, dict):
                raise SchemaRefusal(name, inner, "it must be an object")
            return {key: self._node(one, f"{inner}/{_escaped(key)}") for key, one in value.items()}
        if name in _NUMBERS:
            return _bound(name, value, inner)
        if name in ("const", "enum"):
            _check_exact(name, value, inner)
        return value

    def _list(self, name: str, value: Any, place: str) -> list[Schema | bool]:
        if not isinstance(value, list):
            raise SchemaRefusal(name, place, "it must be an array")
        nodes = [self._node(one, f"{place}/{index}") for index, one in enumerate(value)]
        return [self._with_type(node) for node in nodes] if name == "oneOf" else nodes

    def _with_type(self, node: Schema | bool) -> Schema | bool:
        """Add to a bare reference the type that it leads to: the library cannot see that references exclude each other, but it looks
        through one that has a keyword beside it."""
        if isinstance(node, bool) or set(node) != {"$ref"} or node["$ref"] == "#":
            return node
        target = _resolve(self._root, self._pointer_of(node["$ref"]))
        kind = target.get("type") if isinstance(target, dict) else None
        if not isinstance(kind, str):
            return node
        typed = {"type": kind, **node}
        self._places[id(typed)] = self._places[id(node)]
        return typed

    def _pointer_of(self, reference: str) -> str:
        name = reference.removeprefix("#/$defs/")
        return self._pointers[int(name.removeprefix("d"))]

    def _reference(self, value: Any, place: str) -> str:
        if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
            raise SchemaRefusal(
                "$ref", place, "only references within the schema, which begin with #/, can be followed"
            )
        pointer = unquote(value[1:])
        if not pointer:
            return "#"
        if _resolve(self._root, pointer) is None:
            raise SchemaRefusal("$ref", place, f"the schema has nothing at {value}")
        if pointer not in self._definitions:
            self._definitions[pointer] = f"d{len(self._pointers)}"
            self._pointers.append(pointer)
        return "#/$defs/" + self._definitions[pointer]

    def _check_strings(self, node: Schema, converted: Schema, place: str) -> None:
        """Refuse unknown formats of strings, and tighten those that the library enforces too loosely."""
        form = node.get("format")
        kinds = node.get("type", "string")
        if form is None or "string" not in ([kinds] if isinstance(kinds, str) else kinds):
            converted.pop("format", None)  # such as int32, which says nothing that the type does not
            return
        if form not in FORMATS:
            known = ", ".join(FORMATS)
            raise SchemaRefusal("format", f"{place}/format", f"{form!r} cannot be enforced; these can: {known}")
        if form in _STRICTER:
            stricter: Schema = {"type": kinds, "pattern": _STRICTER[form]}
            converted["allOf"] = [*converted.get("allOf", []), stricter]
            self._places[id(stricter)] = place
            del converted["format"]

    def _check_counts(self, node: Schema, place: str) -> None:
        """Refuse a least number of properties that needs more than one without a name in `required`: the library would accept one name
        twice, which a reader counts once."""
        least = node.get("minProperties")
        required = node.get("required")
        named = len(set(map(str, required))) if isinstance(required, list) else 0
        is_closed = node.get("additionalProperties") is False and not node.get("patternProperties")
        if isinstance(least, int) and least > named + 1 and not is_closed:
            reason = f"at least {least} properties, of which {named} are required by name, cannot be enforced"
            raise SchemaRefusal("minProperties", f"{place}/minProperties", reason)

    def _check_names(self, node: Schema) -> None:
        """Forbid escapes where a property has a name and others are free: the library would accept the name once more, written with an
        escape, and with any other value."""
        names = any(node.get(keyword) for keyword in ("properties", "patternProperties", "required"))
        if names and node.get("additionalProperties") is not False:
            self._allows_escapes = False


def _is_enforced(name: str) -> bool:
    return KEYWORDS.get(name) == ENFORCED and name not in ("$schema", "$defs", "definitions")


def _bound(name: str, value: Any, place: str) -> Any:
    """Return the bound of a number. The library computes with floats, so a bound on integers beyond those that floats hold exactly is
    drawn in to the last of these: answers stay within it either way."""
    if type(value) is not int or abs(value) <= _LARGEST_EXACT:
        return value
    is_least = name in ("minimum", "exclusiveMinimum")
    if name == "multipleOf" or (value > 0) == is_least:
        raise SchemaRefusal(name, place, f"integers beyond {_LARGEST_EXACT} cannot be enforced exactly")
    return -_LARGEST_EXACT if is_least else _LARGEST_EXACT


def _check_exact(name: str, value: Any, place: str) -> None:
    """Refuse integers in constants that a float cannot hold."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, (dict, list)):
            waiting += one.values() if isinstance(one, dict) else one
        elif type(one) is int and abs(one) > _LARGEST_EXACT:
            raise SchemaRefusal(
                name, place, f"integers beyond {_LARGEST_EXACT} cannot be enforced exactly: use strings"
            )


def _resolve(root: Any, pointer: str) -> Any:
    """Return what is at a JSON pointer, or None."""
    node = root
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(name)
        elif isinstance(node, list) and re.fullmatch("0|[1-9][0-9]{0,5}", name) and int(name) < len(node):
            node = node[int(name)]
        else:
            return None
    return node


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
