"""MessagePack of the typed messages: `[generation, sequence, [code, field, …]]`, every field checked on decoding; never pickle.

msgspec encodes and decodes; `arrays.py` adds the arrays.
"""

from __future__ import annotations

import functools
import hashlib
import types
import typing
from typing import Any

import msgspec

from srt.protocol.arrays import pack_array, unpack_array, unpack_extension
from srt.protocol.messages import MESSAGE_TYPES, Message, Wire
from srt.protocol.views import FromFrontendView


class DecodeError(Exception):
    """Raised for bytes that are not a message of this protocol; the text says why."""


class Envelope(Wire, frozen=True):
    generation: int
    sequence: int
    message: Message


class EnvelopeView(Wire, frozen=True):
    """A frontend's message as the scheduler reads it."""

    generation: int
    sequence: int
    message: FromFrontendView


def encode(message: Message, generation: int, sequence: int) -> bytes:
    return _ENCODER.encode(Envelope(generation, sequence, message))


def decode(data: bytes | memoryview) -> Envelope:
    """Decode the message in `data`; DecodeError if it is anything else. Arrays are read-only views of `data`."""
    try:
        return _DECODER.decode(data)
    except Exception as error:  # msgspec's own errors, and those of invalid UTF-8 and of endless nesting
        raise DecodeError(f"not a message: {error}") from error


def decode_view(data: bytes | memoryview) -> EnvelopeView:
    """Decode a frontend's message for the scheduler; DecodeError if it is anything else."""
    try:
        return _VIEW_DECODER.decode(data)
    except Exception as error:
        raise DecodeError(f"not a message of a frontend: {error}") from error


@functools.cache
def protocol_hash() -> str:
    """Hash the code, fields and types of every message. Each handshake compares it, so mixed versions are refused."""
    text = ";".join(f"{code}={_describe(cls)}" for code, cls in sorted(MESSAGE_TYPES.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _describe(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Wire):
        hints = typing.get_type_hints(kind)
        return f"{kind.__name__}({','.join(f'{name}:{_describe(hints[name])}' for name in kind.__struct_fields__)})"
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return f"[{_describe(arguments[0])}]"
    if origin in (types.UnionType, typing.Union):
        return "|".join(map(_describe, arguments))
    return str(kind)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=pack_array)
_DECODER = msgspec.msgpack.Decoder(Envelope, dec_hook=unpack_array, ext_hook=unpack_extension)
_VIEW_DECODER = msgspec.msgpack.Decoder(EnvelopeView)
