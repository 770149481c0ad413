"""The constraint of a request, read from any of the fields in which OpenAI's, SGLang's and vLLM's clients state it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from srt.sampling.parameter_checks import ParameterError, is_unicode, kind_of, show

MAX_CONTENT_BYTES: Final = 65_536
MAX_DEPTH: Final = 100  # of arrays and objects in each other: the library's own parser ends at 128

KINDS: Final = ("json_schema", "regex", "ebnf", "choice", "structural_tag")
ANY_OBJECT: Final = '{"type":"object"}'


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the answer must look like. Equal constraints are written equally, whichever field they came from."""

    kind: str  # one of KINDS
    content: str  # an expression or a grammar as the client wrote it; anything else as compact JSON
    source: str = field(default="constraint", compare=False)  # the client's name for it, used in refusals
    # Tokens that end the reasoning: the answer is free up to the first of them. Empty: it has the form from its beginning.
    begins_after: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """A short name for what the answer must look like. `resource.resource_of` names the grammar that it becomes."""
        return hashlib.blake2b(f"{self.kind}\0{self.content}".encode(), digest_size=16).hexdigest()


def read_constraint(fields: Mapping[str, Any]) -> Constraint | None:
    """Return the constraint that a request's fields state, or None; ParameterError names the field at fault.

    fields: the request's members of these names (CONSTRAINT_FIELDS). Null, false and an empty text count as absent, for clients send
    whole objects; other names are not looked at.
    """
    given = {
        name: fields[name]
        for name in CONSTRAINT_FIELDS
        if fields.get(name) not in (None, "") and fields[name] is not False
    }
    found = [constraint for name, value in given.items() if (constraint := _READERS[name](name, value)) is not None]
    if len(found) > 1:
        raise ParameterError(
            found[1].source, f"and {found[0].source} are two constraints on one answer: give only one of them"
        )
    return found[0] if found else None


def tag_constraint(source: str, format_: Mapping[str, Any]) -> Constraint:
    """Return the constraint of a structural tag that the server has made of what the field `source` says. Raise ParameterError."""
    return Constraint("structural_tag", _compact(source, {"format": format_}), source)


# ---- Fields whose value is the constraint itself


def _json_schema(name: str, value: Any) -> Constraint:
    schema = _parsed(name, value) if isinstance(value, str) else value
    if not isinstance(schema, (dict, bool)):
        raise ParameterError(name, f"must be a JSON Schema, an object or a boolean, not {kind_of(schema)}")
    return Constraint("json_schema", _compact(name, schema), source=name)


def _regex(name: str, value: Any) -> Constraint:
    return Constraint("regex", _text(name, value), source=name)


def _ebnf(name: str, value: Any) -> Constraint:
    return Constraint("ebnf", _text(name, value), source=name)


def _choice(name: str, value: Any) -> Constraint:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        raise ParameterError(name, "must be a list of at least one string")
    return Constraint("choice", _compact(name, list(dict.fromkeys(value))), source=name)


def _structural_tag(name: str, value: Any) -> Constraint:
    tag = _parsed(name, value) if isinstance(value, str) else value
    if not isinstance(tag, dict):
        raise ParameterError(name, f"must be a structural tag, an object, not {kind_of(tag)}")
    if tag.get("type", "structural_tag") != "structural_tag":
        raise ParameterError(f"{name}.type", f"must be structural_tag, not {show(tag['type'])}")
    content = {member: one for member, one in tag.items() if member != "type"}
    return Constraint("structural_tag", _compact(name, content), source=name)


def _json_object(name: str, value: Any) -> Constraint | None:
    if type(value) is not bool:
        raise ParameterError(name, f"must be true or false, not {kind_of(value)}")
    return Constraint("json_schema", ANY_OBJECT, source=name) if value else None


# ---- Fields that hold the constraint as a member


def _response_format(name: str, value: Any) -> Constraint | None:
    """Read OpenAI's field. `strict` and the schema's name change nothing: a schema is always enforced."""
    if not isinstance(value, dict):
        raise ParameterError(name, f"must be an object, not {kind_of(value)}")
    kind = value.get("type")
    match kind:
        case "text":
            _refuse_others(name, value, ("type",))
            return None
        case "json_object":
            _refuse_others(name, value, ("type",))
            return Constraint("json_schema", ANY_OBJECT, source=name)
        case "json_schema":
            _refuse_others(name, value, ("type", "json_schema"))
            return _named_schema(f"{name}.json_schema", value.get("json_schema"))
        case "structural_tag":
            return _structural_tag(name, value)
    allowed = "text, json_object, json_schema or structural_tag"
    raise ParameterError(f"{name}.type", f"must be {allowed}, not {show(kind)}")


def _named_schema(name: str, value: Any) -> Constraint:
    if not isinstance(value, dict):
        raise ParameterError(name, f"must be an object with the schema in its member schema, not {kind_of(value)}")
    _refuse_others(name, value, ("name", "description", "schema", "strict"))
    if value.get("schema") is None:
        raise ParameterError(f"{name}.schema", "is missing: it must hold the JSON Schema")
    return _json_schema(f"{name}.schema", value["schema"])


def _structured_outputs(name: str, value: Any) -> Constraint | None:
    """Read vLLM's field, an object with one of several members."""
    if not isinstance(value, dict):
        raise ParameterError(name, f"must be an object, not {kind_of(value)}")
    _refuse_others(name, value, tuple(_MEMBERS))
    given = {member: one for member, one in value.items() if one is not None}
    found = [one for member in given if (one := _MEMBERS[member](f"{name}.{member}", given[member])) is not None]
    if len(found) > 1:
        raise ParameterError(name, f"has the members {' and '.join(given)}: give only one of them")
    return found[0] if found else None


_Reader = Callable[[str, Any], Constraint | None]
_MEMBERS: Mapping[str, _Reader] = MappingProxyType(
    {
        "json": _json_schema,
        "regex": _regex,
        "choice": _choice,
        "grammar": _ebnf,
        "json_object": _json_object,
        "structural_tag": _structural_tag,
    }
)
_READERS: Mapping[str, _Reader] = MappingProxyType(
    {
        "response_format": _response_format,
        "json_schema": _json_schema,
        "regex": _regex,
        "ebnf": _ebnf,
        "structural_tag": _structural_tag,
        "structured_outputs": _structured_outputs,
    }
)
CONSTRAINT_FIELDS: Final = tuple(_READERS)


# ---- Values


def _refuse_others(name: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Refuse members that are not known, unless they are null or false, which ask for nothing."""
    for member, one in value.items():
        if member not in known and one is not None and one is not False:
            raise ParameterError(f"{name}.{show(member).strip(chr(39))}", "is not supported yet")


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ParameterError(name, f"must be a string, not {kind_of(value)}")
    if not value:
        raise ParameterError(name, "must not be empty")
    return _checked(name, value)


def _parsed(name: str, text: str) -> Any:
    _checked(name, text)
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise _too_deep(name) from None
    except ValueError as error:
        raise ParameterError(name, f"is not JSON: {error}") from error


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not a number in JSON")


def _compact(name: str, value: Any) -> str:
    """Return compact JSON. The order of members stays: answers have their properties in the schema's order."""
    check_nesting(name, value)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise ParameterError(name, f"is not JSON: {error}") from error
    return _checked(name, text)


def check_nesting(name: str, value: Any) -> None:
    """Raise ParameterError for a value with more than MAX_DEPTH arrays and objects in each other."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for one in level
            if isinstance(one, (dict, list))
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return
    raise _too_deep(name)


def _too_deep(name: str) -> ParameterError:
    return ParameterError(name, f"is nested too deeply: at most {MAX_DEPTH} levels of objects and arrays are allowed")


def _checked(name: str, text: str) -> str:
    if not is_unicode(text):
        raise ParameterError(name, "has half of a surrogate pair, which is not a character")
    if "\0" in text:
        raise ParameterError(name, "has a null character")
    size = len(text.encode())
    if size > MAX_CONTENT_BYTES:
        raise ParameterError(name, f"may have at most {MAX_CONTENT_BYTES} bytes, not {size}")
    return text
