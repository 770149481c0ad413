"""The supervisor's end of a Runtime's lifeline: it receives the options, and reports a failed start."""

from __future__ import annotations

import contextlib
import socket

from srt.protocol.link_errors import PeerGone
from srt.protocol.messages import EngineStart, Failed
from srt.protocol.stream import MessageStream
from srt.utils.errors import StartError


def open_lifeline(number: int) -> tuple[MessageStream, EngineStart]:
    """Open the link on an inherited descriptor, and receive the Runtime's EngineStart on it."""
    sock = socket.socket(fileno=number)
    sock.set_inheritable(False)
    lifeline = MessageStream(sock, generation=None)
    order = lifeline.receive_blocking()
    if not isinstance(order, EngineStart):
        raise StartError(f"A Runtime's first message must be EngineStart, not {type(order).__name__}.")
    return lifeline, order


def say_failed(lifeline: MessageStream, sentence: str) -> None:
    with contextlib.suppress(PeerGone):  # the Runtime has ended
        lifeline.send(Failed(sentence))
