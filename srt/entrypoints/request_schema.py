"""Parsing of a request's JSON into a checked object: a base class for bodies, and errors that name the field at fault."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema

from srt.managers.tokenizer_manager.api_types import RequestError
from srt.managers.tokenizer_manager.request_checks import MAX_LABEL_CHARS, MAX_PRIORITY
from srt.sampling.foreign_fields import Values, ignored, is_one_of, refusal, unsupported
from srt.sampling.parameter_checks import ParameterError
from srt.sampling.sampling_params import SamplingParams

SamplingParamsOf = Callable[[dict[str, Any]], SamplingParams]
Body = TypeVar("Body", bound="RequestBody")


def _end_lists_at_the_first_error(schema: Any) -> None:
    """Make list validation stop at the first error: a body of a few MiB could have millions, which cost minutes and GiB to collect."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _end_lists_at_the_first_error(part)
    elif isinstance(schema, (list, tuple)):
        for part in schema:
            _end_lists_at_the_first_error(part)


LEAF = "x-leaf"
TOKEN_ID: Mapping[str, Any] = MappingProxyType({"minimum": 0, "format": "token-id"})
MODEL_NAME: Mapping[str, Any] = MappingProxyType({"format": "model-name"})
ADAPTER_NAME: Mapping[str, Any] = MappingProxyType({"format": "adapter-name", "maxLength": MAX_LABEL_CHARS})
ADAPTER_TEXT = "The name of a LoRA adapter (/v1/models); none if it is empty."
LABEL: Mapping[str, Any] = MappingProxyType({"maxLength": MAX_LABEL_CHARS})
NAME: Mapping[str, Any] = MappingProxyType({"minLength": 1, "maxLength": MAX_LABEL_CHARS})
PRIORITY: Mapping[str, Any] = MappingProxyType(
    {"minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY, "format": "priority"}
)
REPLICA: Mapping[str, Any] = MappingProxyType({"minimum": 0, "format": "replica"})
TRUNCATION: Mapping[str, Any] = MappingProxyType({"minimum": -1, "not": {"const": 0}})
NOT_EMPTY: Mapping[str, Any] = MappingProxyType({"minItems": 1})


def described(text: str, default: Any = None, **schema: Any) -> Any:
    """Return a field with its text for the API's description.

    schema: more of the field's JSON Schema. Its entries `string`, `integer`, `array` and `object` apply to every value of that type in
    the field, also inside lists.
    """
    leaf: Any = {kind: dict(schema.pop(kind)) for kind in ("string", "integer", "array", "object") if kind in schema}
    return Field(default, description=text, json_schema_extra={LEAF: leaf, **schema})


ROUTED_TEXT = (
    "The replica that begins to run the request, of a server with --dp-size; another one continues it if that one is being replaced."
    " The server chooses if it is null."
)
ROUTED_ALIAS_TEXT = "An alias of routed_dp_rank."


class RequestBody(BaseModel):
    """Base class of request bodies: the fields of one endpoint. Types are strict, null means default, and unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _end_lists_at_the_first_error(schema)
        return schema

    # FAMILY is the endpoint's name in foreign_fields, from which the next two are derived. UNSUPPORTED are fields that other servers
    # know, with the values that change nothing: other values are refused. MEANINGLESS fields do not affect the answer: any value passes.
    FAMILY: ClassVar[str] = ""
    UNSUPPORTED: ClassVar[Mapping[str, Values]] = MappingProxyType({})
    MEANINGLESS: ClassVar[frozenset[str]] = frozenset()
    # Fields that are sampling parameters -> their names in the engine.
    SAMPLING: ClassVar[Mapping[str, str]] = MappingProxyType({})

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls.UNSUPPORTED = MappingProxyType(unsupported(cls.FAMILY, cls.model_fields))
        cls.MEANINGLESS = ignored(cls.FAMILY, cls.model_fields)

    @classmethod
    def parse(cls: type[Body], body: object) -> Body:
        """Return the body as an object; raise RequestError (400) with the parameter at fault."""
        if not isinstance(body, dict):
            raise RequestError(400, "The body must be a JSON object.")
        given = {}
        for name, value in body.items():
            if name in cls.UNSUPPORTED:
                if not is_one_of(value, cls.UNSUPPORTED[name]):
                    raise bad_parameter(str(name), refusal(cls.FAMILY, name))
            elif name in cls.model_fields:
                if value is not None:
                    given[name] = value
            elif name not in cls.MEANINGLESS:
                raise _unknown(str(name))
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise _explain(cls, error) from error


def bad_parameter(name: str, reason: str) -> RequestError:
    """Return a refusal (HTTP 400) that reads "`name` `reason`."; its parameter is the top-level field of `name`."""
    return RequestError(400, f"{name} {reason}.", name.partition("[")[0].partition(".")[0])


def checked_sampling_params(
    given: dict[str, Any], sampling_params: SamplingParamsOf, written_as: dict[str, str] | None = None
) -> SamplingParams:
    """Return complete, checked parameters; raise RequestError (400) otherwise.

    written_as: the engine's name of a parameter -> its name in this API.
    """
    try:
        return sampling_params(given)
    except ParameterError as error:
        raise renamed(bad_parameter(error.name, error.reason), written_as or {}) from error


def renamed(error: RequestError, written_as: dict[str, str]) -> RequestError:
    """Return the error with the engine's parameter names replaced by those of the API that was called."""
    message = error.message
    for ours, theirs in written_as.items():
        # A name that is a common word is the parameter only at the beginning of the sentence.
        message = re.sub(rf"\b{ours}\b" if "_" in ours else rf"^{ours}\b", theirs, message)
    parameter = None if error.parameter is None else written_as.get(error.parameter, error.parameter)
    return RequestError(error.status, message, parameter, error.retry_after_s)


def routed_replica(routed_dp_rank: int | None, data_parallel_rank: int | None) -> int | None:
    """Return the replica asked for by a parameter that has two names; None if it was not given."""
    if None not in (routed_dp_rank, data_parallel_rank) and routed_dp_rank != data_parallel_rank:
        raise bad_parameter("data_parallel_rank", "and routed_dp_rank are two names of one parameter: give one of them")
    return data_parallel_rank if routed_dp_rank is None else routed_dp_rank


def cache_namespace(salt: str, extra_key: str) -> str:
    """Return the namespace of the prefix cache: requests share prefixes only if both their salt and their key are equal."""
    if not extra_key:
        return salt
    joined = f"{salt}\0{extra_key}"
    if len(joined) > MAX_LABEL_CHARS:
        raise bad_parameter("extra_key", f"and cache_salt may have at most {MAX_LABEL_CHARS - 1} characters together")
    return joined


def _unknown(path: str) -> RequestError:
    path = path[:200]
    shown = path if path.isascii() and path.isprintable() and path else repr(path)
    return RequestError(400, f"{shown} is not a known parameter.", path.partition(".")[0])


def _explain(body: type[RequestBody], error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path, annotation = _walk(body, first["loc"])
    kind = first["type"]
    if kind == "missing":
        return bad_parameter(path, "is required")
    if kind == "extra_forbidden":
        return _unknown(path)
    if kind == "value_error":
        return bad_parameter(path, first["msg"].removeprefix("Value error, "))
    if kind.startswith(("greater_than", "less_than", "too_long", "too_short", "string_too")):
        text = first["msg"][0].lower() + first["msg"][1:]
        return bad_parameter(path, f"is out of range: {text}")
    return bad_parameter(path, f"must be {describe(annotation)}")


def _walk(body: type[BaseModel], location: tuple[int | str, ...]) -> tuple[str, Any]:
    """Return the path of a pydantic error as a client would write it, and the type expected there. It ends where a union begins."""
    path, annotation = "", typing.cast(Any, body)
    for step in location:
        annotation = _bare(annotation)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            path = f"{path}.{step}" if path else str(step)
            known = annotation.model_fields.get(str(step))
            if known is None:
                return path[:200], Any
            annotation = known.annotation
        elif typing.get_origin(annotation) is list and isinstance(step, int):
            path = f"{path}[{step}]"
            annotation = typing.get_args(annotation)[0]
        else:
            break
    return path, annotation


def _bare(annotation: Any) -> Any:
    """Return the type without `Annotated[…]` and `| None`."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _bare(typing.get_args(annotation)[0])
    members = union_members(annotation)
    return _bare(members[0]) if len(members) == 1 and members[0] is not annotation else annotation


def union_members(annotation: Any) -> list[Any]:
    """Return the types that a field may hold, apart from null."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [member for member in typing.get_args(annotation) if member is not type(None)]
    return [annotation]


_WORDS: dict[Any, tuple[str, str]] = {
    str: ("a string", "strings"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "true or false"),
    Any: ("of another kind", "values"),
}


def describe(annotation: Any, *, plural: bool = False) -> str:
    """Return the type in words, such as 'a string or a list of strings'."""
    annotation = _bare(annotation)
    members = union_members(annotation)
    if len(members) > 1:
        words = [describe(member, plural=plural) for member in members]
        return ", ".join(words[:-1]) + " or " + words[-1]
    if typing.get_origin(annotation) is list:
        return f"{'lists' if plural else 'a list'} of {describe(typing.get_args(annotation)[0], plural=True)}"
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(repr(value) for value in typing.get_args(annotation))
    if annotation in _WORDS:
        return _WORDS[annotation][plural]
    return "objects" if plural else "an object"
