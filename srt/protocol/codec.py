"""MessagePack of the typed messages: `[generation, sequence, [code, field, …]]`, every field checked on decoding; never pickle.

Arrays of int32 are the raw bytes, little-endian; of other types, an extension value whose code says which.
"""

from __future__ import annotations

import hashlib
import typing
from typing import Any

import msgspec
import numpy as np

from srt.protocol.messages import MESSAGE_TYPES, Int32Array, Int64Array, Message, Wire

INT32, INT64, FLOAT32 = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f4")
NO_INT32 = np.frombuffer(b"", INT32)  # read-only, so all messages can share it: most arrays of a request are empty


class DecodeError(Exception):
    """The bytes are not a message of this protocol; the text says why."""


class Envelope(Wire, frozen=True):
    generation: int
    sequence: int
    message: Message


def encode(message: Message, generation: int, sequence: int) -> bytes:
    return _ENCODER.encode(Envelope(generation, sequence, message))


def decode(data: bytes | memoryview) -> Envelope:
    """The message in `data`; DecodeError if it is anything else. Arrays are read-only views of `data`."""
    try:
        return _DECODER.decode(data)
    except Exception as error:  # besides its own errors, those of broken text and of nesting without end
        raise DecodeError(f"not a message: {error}") from error


def protocol_hash() -> str:
    """Changes whenever a message's code, fields or types change: compared in every handshake."""
    text = ";".join(f"{code}={_describe(cls)}" for code, cls in sorted(MESSAGE_TYPES.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _describe(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Wire):
        hints = typing.get_type_hints(kind)
        return f"{kind.__name__}({','.join(f'{name}:{_describe(hints[name])}' for name in kind.__struct_fields__)})"
    return f"[{_describe(typing.get_args(kind)[0])}]" if typing.get_origin(kind) is list else str(kind)


def _pack_array(array: Any) -> bytes | msgspec.msgpack.Ext:
    data: bytes = array.tobytes()
    return data if array.dtype == INT32 else msgspec.msgpack.Ext(_CODES[array.dtype], data)


def _unpack_array(kind: Any, value: Any) -> Any:
    """In the type that the field has, whichever the sender's array had; but no fractions where integers belong."""
    if type(value) is bytes:
        value = np.frombuffer(value, INT32) if value else NO_INT32
    dtype = INT32 if kind == Int32Array else INT64 if kind == Int64Array else FLOAT32
    return value if value.dtype == dtype else value.astype(dtype, casting="same_kind")


def _unpack_other(code: int, data: memoryview) -> Any:
    return np.frombuffer(data, _DTYPES[code])


_CODES: dict[np.dtype[Any], int] = {INT64: 1, FLOAT32: 2, np.dtype("<f8"): 3, np.dtype("?"): 4}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_pack_array)
_DECODER = msgspec.msgpack.Decoder(Envelope, dec_hook=_unpack_array, ext_hook=_unpack_other)
