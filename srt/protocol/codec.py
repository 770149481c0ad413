"""MessagePack of the typed messages: `[code, generation, sequence, field, …]`, every field checked on decoding; never pickle.

Encoders and decoders are built once per class from its annotations, when this module is imported.
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from srt.protocol.messages import MESSAGE_TYPES, Float32Array, Int32Array, Int64Array, Message, Scalar


class DecodeError(Exception):
    """The bytes are not a message of this protocol; the text says why."""


@dataclass(frozen=True, slots=True)
class Envelope:
    generation: int
    sequence: int
    message: Message


Encoder = Callable[[Any], Any]
Decoder = Callable[[Any], Any]
_ARRAYS: dict[Any, np.dtype[Any]] = {
    Int32Array: np.dtype("<i4"),
    Int64Array: np.dtype("<i8"),
    Float32Array: np.dtype("<f4"),
}
_PLAIN = (int, str, bool, float)


def encode(message: Message, generation: int, sequence: int) -> bytes:
    code, pack_fields = _BY_CLASS[type(message)]
    packed: bytes = msgpack.packb([code, generation, sequence, *pack_fields(message)])
    return packed


def decode(data: bytes | memoryview) -> Envelope:
    """The message in `data`; DecodeError if it is anything else. Arrays are read-only views of `data`."""
    try:
        parts = msgpack.unpackb(data, max_str_len=1 << 26, strict_map_key=False)
    except Exception as error:  # msgpack raises half a dozen unrelated types on broken bytes
        raise DecodeError(f"not MessagePack: {error}") from error
    if not isinstance(parts, list) or len(parts) < 3:
        raise DecodeError("not a message: expected a list that begins with code, generation and sequence")
    code, generation, sequence = parts[:3]
    if type(code) is not int or code not in _BY_CODE:
        raise DecodeError(f"unknown message code {code!r}")
    if type(generation) is not int or type(sequence) is not int:
        raise DecodeError("generation and sequence must be integers")
    return Envelope(generation, sequence, _BY_CODE[code](parts[3:]))


def protocol_hash() -> str:
    """Changes whenever a message's code, fields or types change: compared in every handshake."""
    text = ";".join(f"{code}={_describe(cls)}" for code, cls in sorted(MESSAGE_TYPES.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _describe(kind: Any) -> str:
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return f"{kind.__name__}({','.join(f'{f.name}:{_describe(hints[f.name])}' for f in dataclasses.fields(kind))})"  # type: ignore[union-attr]
    return f"[{_describe(typing.get_args(kind)[0])}]" if typing.get_origin(kind) is list else str(kind)


def _codec_of(kind: Any, where: str) -> tuple[Encoder | None, Decoder]:
    """How a value of this annotated type travels: (encoder, or None where it travels as it is; checking decoder)."""
    if kind in _ARRAYS:
        return _array_codec(_ARRAYS[kind], where)
    if dataclasses.is_dataclass(kind):
        pack, unpack = _class_codec(kind)
        return pack, unpack
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (list, tuple):
        return _list_codec(arguments[0], origin, where)
    if origin is dict:
        return None, _scalar_dict_decoder(where)
    if origin in (types.UnionType, typing.Union):
        return _optional_codec(arguments, where)
    if kind in _PLAIN:
        return None, _plain_decoder(kind, where)
    raise TypeError(f"{where}: no encoding for {kind}")


def _array_codec(dtype: np.dtype[Any], where: str) -> tuple[Encoder, Decoder]:
    empty = np.frombuffer(b"", dtype)  # read-only, so all messages can share it: most arrays of a request are empty

    def pack(value: Any) -> bytes:
        data: bytes = (value if value.dtype == dtype else value.astype(dtype)).tobytes()
        return data

    def unpack(value: Any) -> Any:
        if type(value) is not bytes or len(value) % dtype.itemsize:
            raise DecodeError(f"{where}: expected the bytes of {dtype.name} values")
        return np.frombuffer(value, dtype) if value else empty

    return pack, unpack


def _list_codec(item: Any, container: type, where: str) -> tuple[Encoder | None, Decoder]:
    pack_item, unpack_item = _codec_of(item, where)

    def pack(value: Any) -> list[Any]:
        return [pack_item(v) for v in value] if pack_item else list(value)

    def unpack(value: Any) -> Any:
        if type(value) is not list:
            raise DecodeError(f"{where}: expected a list")
        return container([unpack_item(v) for v in value])

    return pack, unpack


def _scalar_dict_decoder(where: str) -> Decoder:
    scalar_types = (*typing.get_args(Scalar),)

    def unpack(value: Any) -> Any:
        if type(value) is not dict or not all(type(k) is str and type(v) in scalar_types for k, v in value.items()):
            raise DecodeError(f"{where}: expected a map from names to plain values")
        return value

    return unpack


def _optional_codec(arguments: tuple[Any, ...], where: str) -> tuple[Encoder | None, Decoder]:
    inner = [a for a in arguments if a is not type(None)]
    if len(inner) != 1 or len(arguments) != 2:
        raise TypeError(f"{where}: of unions only `X | None` can travel")
    pack_inner, unpack_inner = _codec_of(inner[0], where)

    def pack(value: Any) -> Any:
        return None if value is None else pack_inner(value) if pack_inner else value

    return pack if pack_inner else None, lambda value: None if value is None else unpack_inner(value)


def _plain_decoder(kind: type, where: str) -> Decoder:
    def unpack(value: Any) -> Any:
        if type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return float(value)
        raise DecodeError(f"{where}: expected {kind.__name__}, not {type(value).__name__}")

    return unpack


def _class_codec(cls: Any) -> tuple[Callable[[Any], list[Any]], Decoder]:
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    codecs = [_codec_of(hints[name], f"{cls.__name__}.{name}") for name in names]
    packs = [(i, pack) for i, (pack, _) in enumerate(codecs) if pack]
    decoders = [unpack for _, unpack in codecs]
    get_fields = operator.attrgetter(*names) if len(names) > 1 else lambda message: [getattr(message, n) for n in names]
    # Most messages have exactly these types on the wire: then one comparison checks all plain fields at once.
    wire_types = [hints[name] if hints[name] in _PLAIN else _wire_type(hints[name]) for name in names]
    unpacks = [(i, unpack) for i, unpack in enumerate(decoders) if hints[names[i]] not in _PLAIN]

    def pack(message: Any) -> list[Any]:
        parts = list(get_fields(message))
        for i, pack_field in packs:
            parts[i] = pack_field(parts[i])
        return parts

    def unpack(parts: Any) -> Any:
        if type(parts) is not list or len(parts) != len(decoders):
            raise DecodeError(f"{cls.__name__}: expected {len(decoders)} fields")
        if list(map(type, parts)) == wire_types:
            for i, unpack_field in unpacks:
                parts[i] = unpack_field(parts[i])
            return cls(*parts)
        return cls(*[unpack_field(part) for unpack_field, part in zip(decoders, parts, strict=True)])

    return pack, unpack


def _wire_type(kind: Any) -> type | None:
    """What a value of this annotated type is in MessagePack; None: one of several."""
    if kind in _ARRAYS:
        return bytes
    if dataclasses.is_dataclass(kind) or typing.get_origin(kind) in (list, tuple):
        return list
    return dict if typing.get_origin(kind) is dict else None


_CODECS = {code: (cls, *_class_codec(cls)) for code, cls in MESSAGE_TYPES.items()}
_BY_CLASS = {cls: (code, pack) for code, (cls, pack, _) in _CODECS.items()}
_BY_CODE = {code: unpack for code, (_, _, unpack) in _CODECS.items()}
