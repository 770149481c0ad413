"""A minimal HTTP/2 refusal, for clients that speak HTTP/2 without negotiating it: they can only show an answer in HTTP/2."""

from __future__ import annotations

import struct

import orjson

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SENTENCE = "This server speaks HTTP/1.1 and HTTP/1.0, not HTTP/2."

MAX_FRAME_BYTES = 1 << 14
_HEAD_BYTES = 9
_DATA, _HEADERS, _SETTINGS, _GOAWAY = 0, 1, 4, 7
_END_STREAM, _END_HEADERS = 1, 4
_PROTOCOL_ERROR, _HTTP_1_1_REQUIRED = 1, 0xD
# HPACK (RFC 7541): literal fields with names from its static table, where 8 is :status, 28 content-length and 31 content-type.
_STATUS, _LENGTH, _TYPE = b"\x08", b"\x0f\x0d", b"\x0f\x10"

GREETING = struct.pack(">HBBBI", 0, 0, _SETTINGS, 0, 0)  # an empty SETTINGS frame, which a client may wait for


def farewell(last_stream: int = 0, error: int = _HTTP_1_1_REQUIRED) -> bytes:
    """Return the GOAWAY frame that ends a connection. Its debug data, which clients log, is the sentence."""
    return _frame(_GOAWAY, 0, 0, struct.pack(">II", last_stream, error) + SENTENCE.encode())


class Http2Refusal:
    """A parser of what a client sends behind the preface, which waits for a request's headers."""

    def __init__(self) -> None:
        self._unread = b""

    def answer(self, data: bytes) -> bytes:
        """Add received bytes; return the refusal once a request's headers have begun, and nothing before."""
        self._unread += data
        begin = 0
        while len(self._unread) - begin >= _HEAD_BYTES:
            high, low, kind, _, stream = struct.unpack_from(">BHBBI", self._unread, begin)
            size = high << 16 | low
            if size > MAX_FRAME_BYTES:
                return farewell(error=_PROTOCOL_ERROR)
            if kind == _HEADERS:
                return _response(stream & 0x7FFFFFFF)
            if len(self._unread) - begin < _HEAD_BYTES + size:
                break
            begin += _HEAD_BYTES + size
        self._unread = self._unread[begin:]
        return b""


def _response(stream: int) -> bytes:
    """Return the refusal of a stream, and the end of the connection. A body is left unread without an RST_STREAM: curl would report
    that in place of the sentence."""
    body = orjson.dumps({"error": {"message": SENTENCE}}) + b"\n"
    fields = ((_STATUS, b"505"), (_TYPE, b"application/json"), (_LENGTH, str(len(body)).encode()))
    head = b"".join(name + bytes((len(value),)) + value for name, value in fields)
    return _frame(_HEADERS, _END_HEADERS, stream, head) + _frame(_DATA, _END_STREAM, stream, body) + farewell(stream)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">BHBBI", len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload
