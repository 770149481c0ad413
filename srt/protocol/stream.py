"""Messages over a connected byte stream: a 4-byte length, then the same bytes as on any other link.

Used for the socketpair between the supervisor and a child, for a Runtime's lifeline and, with signatures, between the supervisors of
several hosts. Each direction has its own sequence numbers.
"""

from __future__ import annotations

import socket
import struct
import threading
import time

from srt.protocol.cluster_key import Signatures
from srt.protocol.codec import DecodeError, decode, encode
from srt.protocol.link_errors import LinkBroken, PeerGone
from srt.protocol.messages import Message

MAX_MESSAGE = 16 << 20  # bytes; messages here are small, so a larger length is garbage
_LENGTH = struct.Struct("<I")


class MessageStream:
    """A process's end of the stream. `send` may be called by any thread, `receive` by one at a time.

    An end created without a generation (None) takes that of the first message it receives.
    """

    def __init__(self, sock: socket.socket, generation: int | None, signatures: Signatures | None = None) -> None:
        self._socket = sock
        self._signatures = signatures
        self._generation = generation
        self._buffer = bytearray()
        self._sent = 0
        self._expected = 0
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Write the whole message; PeerGone if the other end is closed."""
        with self._sending:
            data = encode(message, self._generation or 0, self._sent)
            if self._signatures is not None:
                data = self._signatures.sign(data)
            try:
                self._socket.sendall(_LENGTH.pack(len(data)) + data)
            except OSError as error:
                raise PeerGone(str(error)) from error
            self._sent += 1

    def receive(self) -> Message | None:
        """Return the next complete message, or None, without waiting.

        PeerGone once the other end is closed and everything that it sent was returned; LinkBroken on bytes that cannot be trusted.
        """
        message = self._next_in_buffer()
        if message is None and self._read(socket.MSG_DONTWAIT):
            message = self._next_in_buffer()
        return message

    def receive_blocking(self, within_s: float | None = None) -> Message:
        """Wait for the next message, and read no byte beyond it, so that a selector on the descriptor notices the one that follows.

        PeerGone if it has not come whole within `within_s`.
        """
        until_s = None if within_s is None else time.monotonic() + within_s
        while (message := self._next_in_buffer()) is None:
            if until_s is not None:
                set_timeout(self._socket, until_s)
            self._read(0, self._num_missing())
        return message

    def close(self) -> None:
        self._socket.close()

    def _read(self, flags: int, most: int = 1 << 16) -> bool:
        """Read the bytes that have arrived into the buffer; False if there are none."""
        try:
            data = self._socket.recv(most, flags)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise PeerGone(str(error)) from error
        if not data:
            raise PeerGone("the other end was closed")
        self._buffer += data
        return True

    def _num_missing(self) -> int:
        """Return the number of bytes still missing of the message in the buffer, or of its length field."""
        if len(self._buffer) < _LENGTH.size:
            return _LENGTH.size - len(self._buffer)
        (length,) = _LENGTH.unpack_from(self._buffer)
        return _LENGTH.size + int(length) - len(self._buffer)

    def _next_in_buffer(self) -> Message | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_MESSAGE:
            raise LinkBroken(f"a message of {length} bytes was announced, more than the limit of {MAX_MESSAGE}")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        data = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return self._in_order(data)

    def _in_order(self, data: bytes) -> Message:
        if self._signatures is not None:
            data = self._signatures.checked(data)
        try:
            envelope = decode(data)
        except DecodeError as error:
            raise LinkBroken(str(error)) from error
        if self._generation is None:
            self._generation = envelope.generation
        if (envelope.generation, envelope.sequence) != (self._generation, self._expected):
            raise LinkBroken(
                f"message {envelope.generation}:{envelope.sequence} came where {self._generation}:{self._expected} was expected"
            )
        self._expected += 1
        return envelope.message


def set_timeout(sock: socket.socket, until_s: float) -> None:
    """Let the next operation wait until then; PeerGone if that time has come. A peer that sends byte by byte gains nothing."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise PeerGone("what it sends takes too long")
    sock.settimeout(left_s)
