"""The forms of arguments that are not written as one JSON object, but each in a place of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from srt.parsers.forms import (
    CallableTool,
    FormRefusal,
    Node,
    compact,
    either,
    escaped,
    json_schema,
    members,
    regex,
    tag,
)

Schema = Mapping[str, Any]
_ADVICE = "cannot be enforced in this model's form of calls"
_NAME = re.compile(r"[\w.-]+")
# The most parts and bytes of JSON that the arguments of one call may make: references can multiply what a short schema says.
_MAX_PLACES, _MAX_BYTES, _MAX_CHOICES = 2000, 65_536, 64
_KINDS: Mapping[str, type] = {
    "required": list,
    "enum": list,
    "pattern": str,
    "minLength": int,
    "maxLength": int,
    "$ref": str,
}
# What says nothing about one object's members, or is dealt with.
_OF_OBJECTS = frozenset(("type", "properties", "required", "additionalProperties", "$defs", "$schema"))
_OF_STRINGS = frozenset(("type", "enum", "const", "minLength", "maxLength", "pattern", "allOf", "anyOf", "$ref"))


class Place:
    """A schema and where it is: its path within the tool's parameters, for refusals, and the definitions that references lead to."""

    def __init__(self, schema: Any, path: str, root: Root, trail: tuple[str, ...] = ()) -> None:
        """Raise FormRefusal if the schema allows nothing, is malformed, or makes too much with all that was made before.

        trail: the references that led here.
        """
        self.schema: Schema = schema if isinstance(schema, Mapping) else {}
        self.path = path
        self._root = root
        self._trail = trail
        if schema is False:
            raise self.refusal("allows nothing, which")
        for name, kind in _KINDS.items():
            if name in self.schema and type(self.schema[name]) is not kind:
                raise self.refusal(f"has a wrong value of {name}, which")
        if not all(isinstance(one, str) for one in self.schema.get("required", [])):
            raise self.refusal("has a wrong value of required, which")
        root.num_places += 1
        if root.num_places > _MAX_PLACES:
            raise self.refusal(f"has more than {_MAX_PLACES} parts, which")

    def refusal(self, what: str) -> FormRefusal:
        return FormRefusal(self.path, f"{what} {_ADVICE}")

    def inner(self, schema: Any, path: str) -> Place:
        return Place(schema, self.path + path, self._root, self._trail)

    def target(self) -> Place:
        """Return the place that the schema's reference leads to."""
        reference = str(self.schema["$ref"])
        if reference in self._trail:
            raise self.refusal("refers to itself, which")
        target = self._root.definitions[reference.removeprefix("#/$defs/")]
        return Place(target, self.path, self._root, (*self._trail, reference))

    def only(self, known: frozenset[str]) -> None:
        """Raise FormRefusal for a keyword that is not among `known`."""
        other = next((name for name in self.schema if name not in known), None)
        if other is not None:
            raise self.refusal(f"has the keyword {other}, which")

    def count(self, num_bytes: int) -> None:
        """Raise FormRefusal if these bytes make too much with all that was made before."""
        self._root.num_bytes += num_bytes
        if self._root.num_bytes > _MAX_BYTES:
            raise self.refusal(f"makes more than {_MAX_BYTES} bytes, which")

    @property
    def as_json(self) -> Node:
        """The value as JSON. FormRefusal if that is too much."""
        written = compact(self.schema)
        has_references = '"$ref"' in written
        self.count(len(written) + (self._root.num_definition_bytes if has_references else 0))
        return json_schema({**self.schema, "$defs": self._root.definitions} if has_references else self.schema)


class Root:
    """State that all places in the schema of one tool share: the definitions of references, and how much was made of the form."""

    def __init__(self, definitions: Schema) -> None:
        self.definitions = definitions
        self.num_definition_bytes = len(compact(definitions))
        self.num_places = 0
        self.num_bytes = 0


def root_of(tool: CallableTool) -> Place:
    """Return the place of all arguments; raise FormRefusal if their schema is needed within itself."""
    parameters = tool.parameters or {}
    root = Place(parameters, "", Root(parameters.get("$defs", {})))
    if '"$ref":"#"' in compact(parameters):
        raise root.refusal("refers to the whole schema, which")
    return root


def check_name(name: str, path: str) -> None:
    """Raise FormRefusal for a name that the text around it could be taken for a part of."""
    if not _NAME.fullmatch(name):
        raise FormRefusal(
            path, "has a name with other characters than letters, digits, `_`, `-` and `.`, which " + _ADVICE
        )


def object_members(place: Place, member: Callable[[str, Place], Node], separator: str = "") -> Node:
    """Return the form of an object's members, each as `member(name, place)` says; raise FormRefusal. Others are not allowed.

    The arguments are valid without any others, unless the schema demands some by number.
    """
    place.only(_OF_OBJECTS)
    if place.schema.get("type", "object") not in ("object", ["object"]):
        raise place.refusal("is not an object, which")
    properties = dict(place.schema.get("properties", {}))
    required = frozenset(place.schema.get("required", []))
    for name in place.schema.get("required", []):
        properties.setdefault(name, place.schema.get("additionalProperties", {}))
    possible = {name: one for name, one in properties.items() if one is not False or name in required}
    for name in properties:
        check_name(name, f"{place.path}.properties")
    elements = [member(name, place.inner(one, f".properties.{name}")) for name, one in possible.items()]
    return members(elements, [name in required for name in possible], separator)


def string_texts(place: Place) -> list[list[str]] | None:
    """Return expressions, of which a string must match all of one of the lists; None if any string will do. Raise FormRefusal."""
    place.only(_OF_STRINGS)
    if place.schema.get("type", "string") != "string":
        raise place.refusal(f"has the type {place.schema['type']}, which")
    choices: list[list[str]] = [[]]
    for name, value in place.schema.items():
        options: list[list[str]] = [[]]
        if name in ("enum", "const"):
            texts = value if name == "enum" else [value]
            given = [one for one in texts if isinstance(one, str)]
            place.count(sum(map(len, given)))
            strings = list(map(escaped, given))
            if not strings:
                raise place.refusal(f"has no text in {name}, which")
            options = [[f"({'|'.join(strings)})"]]
        elif name == "pattern":
            place.count(len(value))
            options = [[_searched(value, place)]]
        elif name == "anyOf":
            options = [
                one for index, part in enumerate(value) for one in _options(place.inner(part, f".anyOf.{index}"))
            ]
        elif name == "$ref":
            options = _options(place.target())
        choices = _both(choices, options, place)
        if name == "allOf":
            for index, part in enumerate(value):
                choices = _both(choices, _options(place.inner(part, f".allOf.{index}")), place)
    least, most = place.schema.get("minLength"), place.schema.get("maxLength")
    if least or most is not None:
        choices = [[*one, f"(?s:.){{{least or 0},{'' if most is None else most}}}"] for one in choices]
    return None if choices == [[]] else choices


def _both(choices: list[list[str]], options: list[list[str]], place: Place) -> list[list[str]]:
    """Return the lists of expressions of which one holds if one of each holds."""
    if len(choices) * len(options) > _MAX_CHOICES:
        raise place.refusal(f"has more than {_MAX_CHOICES} alternatives, which")
    return [[*one, *other] for one in choices for other in options]


def _options(place: Place) -> list[list[str]]:
    return string_texts(place) or [[]]


def text_until(begin: str, place: Place, ends: Sequence[str]) -> Node:
    """Return a tag for a string as it is, up to the last of `ends`, none of which is in it. Raise FormRefusal.

    ends: all texts at which the parser ends the string; each but the last one is the end of the last one.
    """
    found = string_texts(place)
    end = ends[-1]
    if found is None:
        return tag(begin, regex("(?s:.*)", excludes=ends), end)
    return either(*(tag(begin, regex(one or "(?s:.*)", excludes=ends), end) for one in found))


def _searched(pattern: str, place: Place) -> str:
    """Return an expression that matches a whole text in which the pattern is found."""
    # A class that is not closed reaches to the end. Each expression matches in one way only, or the time would grow without bounds.
    bare = re.sub(
        r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z)", lambda found: "x" * len(found[0]), pattern, flags=re.DOTALL
    )
    begins, ends = bare.startswith("^"), bare.endswith("$")
    if re.search(r"[\^$]", bare[begins : len(bare) - ends]) or ((begins or ends) and _has_alternatives(bare)):
        raise place.refusal(f"has the pattern {pattern!r} with an anchor within it, which")
    inner = pattern[begins : len(pattern) - ends]
    return f"{'' if begins else '(?s:.*)'}({inner}){'' if ends else '(?s:.*)'}"


def _has_alternatives(bare: str) -> bool:
    """Return whether an expression has alternatives that are not within a group."""
    depth = 0
    for sign in bare:
        depth += (sign == "(") - (sign == ")")
        if sign == "|" and depth == 0:
            return True
    return False
