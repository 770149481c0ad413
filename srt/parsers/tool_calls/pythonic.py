"""Llama 4, Llama 3.2 and others: `[f(a=1, b="text"), g()]` as the whole answer, or behind `<|python_start|>`."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Sequence
from typing import Any

from srt.parsers.argument_forms import Place, object_members, root_of
from srt.parsers.base_parser import NotThisForm, Steps
from srt.parsers.call_format import CallFormat
from srt.parsers.forms import (
    CallableTool,
    FormRefusal,
    Node,
    calls,
    either,
    json_schema,
    optional,
    regex,
    sequence,
    tag,
)
from srt.parsers.tools import is_json, quoted

_NAME = re.compile(r"[^\W\d][\w.-]*\Z")
_SURROGATE = re.compile("[\ud800-\udfff]")  # which no text may hold as such
_CONSTANTS = {"true": True, "false": False, "null": None}
_MAX_VALUE = 1 << 24
_MAX_DEPTH = 64


class Pythonic(CallFormat):
    BEGINS = ("<|python_start|>",)
    SECTION = ("[", "]")
    BETWEEN = ", "

    @classmethod
    def call_form(cls, tool: CallableTool) -> Node:
        """Return the form in which values are JSON, which is read as such."""
        if tool.parameters is None:
            argument = tag("", sequence(regex("[a-zA-Z_][a-zA-Z0-9_]*="), json_schema(True)), "")
            return tag(f"{tool.name}(", optional(calls([argument], ", ", several=True)), ")")
        return tag(f"{tool.name}(", object_members(root_of(tool), _argument_form, ", "), ")")

    @classmethod
    def free_form(cls, tools: Sequence[CallableTool], several: bool) -> Node:
        """Text that begins with `[` would be calls."""
        return either(cls.calls_form(tools, several), regex(r"\s*([^\[\s](?s:.*))?", excludes=cls.BEGINS))

    def _opening(self) -> Steps[None]:
        yield from self._space()
        yield from self._calls()

    def _part(self) -> Steps[None]:
        yield from self._expect("<|python_start|>")
        yield from self._space()
        yield from self._calls()
        yield from self._skip("<|python_end|>")

    def _calls(self) -> Steps[None]:
        yield from self._expect("[")
        yield from self._space()
        yield from self._one_call()
        yield from self._space()
        while (yield from self._accept(",")):
            yield from self._space()
            yield from self._one_call()
            yield from self._space()
        self._at = self._start
        yield from self._skip("]")

    def _one_call(self) -> Steps[None]:
        """Read a call. It begins when its first argument or its end is there, so that prose in brackets begins none."""
        name = (yield from self._until("(")).strip()
        yield from self._expect("(")
        yield from self._space()
        if not (yield from self._accept(")")):
            key = yield from self._key()
            self._begin_call(name)
            self._arguments("{" + quoted(key) + ": ")
            while not (yield from self._value()):
                yield from self._space()
                key = yield from self._key()
                self._arguments(", " + quoted(key) + ": ")
            self._arguments("}")
        else:
            self._begin_call(name)
            self._arguments("{}")
        self._has_arguments = True
        self._end_call()

    def _key(self) -> Steps[str]:
        key = (yield from self._until("=")).strip()
        if not _NAME.match(key):
            raise NotThisForm
        yield from self._expect("=")
        return key

    def _value(self) -> Steps[bool]:
        """Read a value and the comma or bracket behind it; return whether that ended the call."""
        begin = self._at - self._start
        closing: list[str] = []
        while True:
            sign = yield from self._next()
            if not closing and sign in ",)":
                break
            self._at += 1
            if sign in "([{":
                closing.append({"(": ")", "[": "]", "{": "}"}[sign])
            elif closing and sign == closing[-1]:
                closing.pop()
            elif sign in ")]}" or self._at - self._start - begin > _MAX_VALUE or len(closing) > _MAX_DEPTH:
                raise NotThisForm
            elif sign in "'\"":
                yield from self._quoted(sign)
        written = _json_of(self._text[self._start + begin : self._at])
        self._at += 1
        self._arguments(written)
        return sign == ")"

    def _quoted(self, quote: str) -> Steps[None]:
        """Read the rest of a string."""
        while (sign := (yield from self._next())) != quote:
            self._at += 1
            if sign == "\\":
                yield from self._next()
                self._at += 1
        self._at += 1


def _argument_form(key: str, place: Place) -> Node:
    if not _NAME.match(key):
        raise FormRefusal(
            place.path, "has a name that is no name in Python, which this model's form of calls cannot have"
        )
    return tag(f"{key}=", place.as_json, "")


def _json_of(text: str) -> str:
    """Return JSON as it is, and a Python literal as JSON; NotThisForm if the text is neither."""
    if is_json(text):
        return text.strip()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            value = _value_of(ast.parse(text.strip(), mode="eval").body)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return json.dumps(value) if _SURROGATE.search(written) else written
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise NotThisForm from error


def _value_of(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value_of(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key_of(key): _value_of(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
    raise NotThisForm


def _key_of(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise NotThisForm
