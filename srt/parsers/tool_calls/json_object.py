"""What formats share in which a call is a JSON object with the members `name` and `arguments`."""

from __future__ import annotations

import json

from srt.parsers.base_parser import NotThisForm, Steps
from srt.parsers.call_format import CallFormat
from srt.parsers.forms import CallableTool, Node, tag

_ARGUMENTS = ("arguments", "parameters")


class JsonObjectFormat(CallFormat):
    """The base of such formats."""

    def _call_object(self) -> Steps[None]:
        """Read a whole call: an object with a name, and arguments that are an object, null or left out; other members say nothing.

        The call begins when its name and the begin of its arguments are there. With the name first, the arguments come piece by piece.
        """
        name, arguments, is_begun = "", "", False
        yield from self._expect("{")
        yield from self._space()
        is_first = True
        while not (yield from self._accept("}")):
            if not is_first:
                yield from self._expect(",")
                yield from self._space()
            is_first = False
            key = yield from self._key()
            if key in _ARGUMENTS and name and not is_begun and (yield from self._next()) == "{":
                self._begin_call(name)
                yield from self._json_arguments()
                is_begun = True
            else:
                value = yield from self._json()
                name = _decoded(value) if key == "name" and not is_begun else name
                arguments = value if key in _ARGUMENTS and not is_begun else arguments
            yield from self._space()
        if not is_begun:
            if arguments not in ("", "null") and not arguments.startswith("{"):
                raise NotThisForm
            self._begin_call(name)
            self._arguments(arguments if arguments.startswith("{") else "{}")
        self._end_call()

    def _key(self) -> Steps[str]:
        if (yield from self._next()) != '"':
            raise NotThisForm
        key = _decoded((yield from self._json()))
        yield from self._space()
        yield from self._expect(":")
        yield from self._space()
        return key


def call_object(tool: CallableTool, around: tuple[str, str] = ("", ""), key: str = "arguments") -> Node:
    """Return the form of a call as an object, with the arguments under `key`."""
    return tag(f'{around[0]}{{"name": {tool.quoted_name}, "{key}": ', tool.arguments, "}" + around[1])


def _decoded(written: str) -> str:
    """Return the string that is written as JSON; NotThisForm if it is none."""
    if not written.startswith('"'):
        raise NotThisForm
    text: str = json.loads(written)
    return text
