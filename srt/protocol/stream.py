"""Messages over a connected byte stream: a 4-byte length, then the same bytes as on any other link.

For the socketpair between a supervisor and its child, and the lifeline of a Runtime. One numbered sequence in each direction.
"""

from __future__ import annotations

import socket
import struct
import threading

from srt.protocol.codec import DecodeError, decode, encode
from srt.protocol.link_errors import LinkBroken, PeerGone
from srt.protocol.messages import Message

MAX_MESSAGE = 16 << 20  # bytes; what comes here is small, so more than this is garbage
_LENGTH = struct.Struct("<I")


class MessageStream:
    """One end of the stream. `send` may be called by any thread, `receive` by one at a time.

    The end that does not know its generation (None) takes that of the first message it gets.
    """

    def __init__(self, sock: socket.socket, generation: int | None) -> None:
        self._socket = sock
        self._generation = generation
        self._buffer = bytearray()
        self._sent = 0
        self._expected = 0
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Write the whole message; PeerGone if nobody reads any more."""
        with self._sending:
            data = encode(message, self._generation or 0, self._sent)
            try:
                self._socket.sendall(_LENGTH.pack(len(data)) + data)
            except OSError as error:
                raise PeerGone(str(error)) from error
            self._sent += 1

    def receive(self) -> Message | None:
        """The next message that is there in full, or None; does not wait.

        PeerGone when the other end is closed and all that it had sent was returned; LinkBroken on bytes that cannot be trusted.
        """
        message = self._next_in_buffer()
        if message is None and self._read(socket.MSG_DONTWAIT):
            message = self._next_in_buffer()
        return message

    def receive_blocking(self) -> Message:
        """Wait for the next message, and take no byte beyond it: who watches the descriptor from then on sees what follows."""
        while (message := self._next_in_buffer()) is None:
            self._read(0, self._num_missing())
        return message

    def close(self) -> None:
        self._socket.close()

    def _read(self, flags: int, most: int = 1 << 16) -> bool:
        """Take over what is there; False if nothing is."""
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
        """Bytes of the message that the buffer has begun, or of its length."""
        if len(self._buffer) < _LENGTH.size:
            return _LENGTH.size - len(self._buffer)
        (length,) = _LENGTH.unpack_from(self._buffer)
        return _LENGTH.size + int(length) - len(self._buffer)

    def _next_in_buffer(self) -> Message | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_MESSAGE:
            raise LinkBroken(f"a message of {length} bytes was announced")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        data = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return self._in_order(data)

    def _in_order(self, data: bytes) -> Message:
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
