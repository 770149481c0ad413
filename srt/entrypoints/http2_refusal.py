"""One response in HTTP/2, for clients that speak it without having asked: their tools show nothing else of what a server says."""

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
# HPACK (RFC 7541), literals with names of its static table: 8 is :status, 28 content-length, 31 content-type.
_STATUS, _LENGTH, _TYPE = b"\x08", b"\x0f\x0d", b"\x0f\x10"

GREETING = struct.pack(">HBBBI", 0, 0, _SETTINGS, 0, 0)  # no settings; a client may wait for it


def farewell(last_stream: int = 0, error: int = _HTTP_1_1_REQUIRED) -> bytes:
    """The end of a connection, with the sentence where clients log it."""
    return _frame(_GOAWAY, 0, 0, struct.pack(">II", last_stream, error) + SENTENCE.encode())


class Http2Refusal:
    """Fed with what comes behind the preface, until a request's headers are there."""

    def __init__(self) -> None:
        self._unread = b""

    def answer(self, data: bytes) -> bytes:
        """All that is left to send; empty while no request has come."""
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
    """The sentence, and the end. The rest of a body is not read, and no RST_STREAM says so: curl would show it and not the sentence."""
    body = orjson.dumps({"error": {"message": SENTENCE}}) + b"\n"
    fields = ((_STATUS, b"505"), (_TYPE, b"application/json"), (_LENGTH, str(len(body)).encode()))
    head = b"".join(name + bytes((len(value),)) + value for name, value in fields)
    return _frame(_HEADERS, _END_HEADERS, stream, head) + _frame(_DATA, _END_STREAM, stream, body) + farewell(stream)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">BHBBI", len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload
