"""Messages of every class with generated values."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from srt.protocol.messages import MESSAGE_TYPES, Float32Array, Int32Array, Int64Array, Message, Wire

DTYPES = {Int32Array: np.int32, Int64Array: np.int64, Float32Array: np.float32}
INT64 = st.integers(-(2**63), 2**64 - 1)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an annotated type, as a message may hold them."""
    if kind in DTYPES:
        return st_numpy.arrays(DTYPES[kind], st.integers(0, 5))
    if dataclasses.is_dataclass(kind) or (isinstance(kind, type) and issubclass(kind, Wire)):
        return objects_of(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return st.lists(values_of(arguments[0]), max_size=2)
    if origin is tuple:
        return st.lists(values_of(arguments[0]), max_size=2).map(tuple)
    if origin is dict:
        return st.dictionaries(st.text(max_size=5), values_of(arguments[1]), max_size=3)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*(st.none() if one is type(None) else values_of(one) for one in arguments))
    plain: dict[Any, st.SearchStrategy[Any]] = {
        int: INT64,
        bool: st.booleans(),
        str: st.text(max_size=8),
        bytes: st.binary(max_size=8),
        float: st.floats(allow_nan=False),
    }
    return plain[kind]


def objects_of(cls: Any) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{name: values_of(kind) for name, kind in hints.items() if name in names_of(cls)})


def names_of(cls: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else list(cls.__struct_fields__)


MESSAGES: st.SearchStrategy[Message] = st.one_of(*(objects_of(cls) for cls in MESSAGE_TYPES.values()))


def same(one: Any, other: Any) -> bool:
    """Equality that looks into arrays."""
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if dataclasses.is_dataclass(one) or isinstance(one, Wire):
        return type(one) is type(other) and all(same(getattr(one, n), getattr(other, n)) for n in names_of(type(one)))
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)
