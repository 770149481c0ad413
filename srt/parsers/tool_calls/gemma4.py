"""Gemma 4: `<|tool_call>call:f{a:1,b:<|"|>text<|"|>}<tool_call|>`: JSON with bare keys, and strings between quotes of their own."""

from __future__ import annotations

from srt.parsers.argument_forms import Place, object_members, root_of, text_until
from srt.parsers.base_parser import NotThisForm, Steps
from srt.parsers.call_format import CallFormat
from srt.parsers.forms import ANY_TEXT, CallableTool, FormRefusal, Node, calls, const, either, optional, sequence, tag
from srt.parsers.tools import quoted

_QUOTE = '<|"|>'
_MAX_DEPTH = 64


class Gemma4(CallFormat):
    BEGINS = ("<|tool_call>",)

    @classmethod
    def call_form(cls, tool: CallableTool) -> Node:
        if tool.parameters is None:
            return tag(f"<|tool_call>call:{tool.name}{{", ANY_TEXT, "}<tool_call|>")
        try:
            arguments = _object_form(root_of(tool))
        except FormRefusal:
            arguments = tool.arguments
        return tag(f"<|tool_call>call:{tool.name}", arguments, "<tool_call|>")

    def _part(self) -> Steps[None]:
        yield from self._expect("<|tool_call>")
        yield from self._expect("call:")
        name = yield from self._until("{")
        self._begin_call(name.strip())
        yield from self._object(0)
        self._has_arguments = True
        self._end_call()
        yield from self._skip("<tool_call|>")

    def _object(self, depth: int) -> Steps[None]:
        yield from self._expect("{")
        lead = "{"
        yield from self._space()
        while not (yield from self._accept("}")):
            if lead != "{":
                yield from self._expect(",")
                yield from self._space()
            key = yield from self._key()
            self._arguments(lead + key + ": ")
            yield from self._value(depth)
            lead = ", "
            yield from self._space()
        self._arguments("{}" if lead == "{" else "}")

    def _array(self, depth: int) -> Steps[None]:
        yield from self._expect("[")
        lead = "["
        yield from self._space()
        while not (yield from self._accept("]")):
            if lead != "[":
                yield from self._expect(",")
                yield from self._space()
            self._arguments(lead)
            yield from self._value(depth)
            lead = ", "
            yield from self._space()
        self._arguments("[]" if lead == "[" else "]")

    def _key(self) -> Steps[str]:
        """Read a key and what stands between it and its value; return the key as JSON."""
        if (yield from self._accept(_QUOTE)):
            key = quoted((yield from self._until(_QUOTE)))
            yield from self._expect(_QUOTE)
        elif (yield from self._next()) == '"':
            key = yield from self._json()
        else:
            key = quoted((yield from self._until(":")).strip())
        yield from self._space()
        yield from self._expect(":")
        yield from self._space()
        return key

    def _value(self, depth: int) -> Steps[None]:
        if depth == _MAX_DEPTH:
            raise NotThisForm
        first = yield from self._next()
        if first == "{":
            yield from self._object(depth + 1)
        elif first == "[":
            yield from self._array(depth + 1)
        elif (yield from self._accept(_QUOTE)):
            yield from self._string(_QUOTE)
        else:
            yield from self._json(self._arguments)


def _object_form(place: Place) -> Node:
    if not place.schema.get("properties") and place.schema.get("additionalProperties") is not False:
        raise place.refusal("has no properties, which")
    inner = object_members(place, lambda key, one: tag(f"{key}:", _value_form(one), ""), ",")
    return sequence(const("{"), inner, const("}"))


def _value_form(place: Place) -> Node:
    """Return the format's own form of a value, and JSON, which can also be read, where that is not known."""
    try:
        return _own_form(place)
    except FormRefusal:
        return place.as_json


def _own_form(place: Place) -> Node:
    schema = place.schema
    kinds = schema.get("type")
    if "$ref" in schema:
        place.only(frozenset(("$ref", "type")))
        return _own_form(place.target())
    if isinstance(kinds, list):
        return either(*(_value_form(place.inner({**schema, "type": kind}, "")) for kind in kinds))
    listed = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else []
    if kinds == "string" or (kinds is None and listed and all(isinstance(one, str) for one in listed)):
        return text_until(_QUOTE, place, (_QUOTE,))
    if "anyOf" in schema:
        place.only(frozenset(("anyOf",)))
        return either(*(_value_form(place.inner(one, f".anyOf.{index}")) for index, one in enumerate(schema["anyOf"])))
    if kinds == "object":
        return _object_form(place)
    if kinds == "array":
        place.only(frozenset(("type", "items")))
        if isinstance(schema.get("items"), list):
            raise place.refusal("has a list of items, which")
        entry = _value_form(place.inner(schema.get("items", {}), ".items"))
        return sequence(const("["), optional(calls([tag("", entry, "")], ",", several=True)), const("]"))
    return place.as_json
