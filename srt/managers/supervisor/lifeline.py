"""The supervisor's end of a Runtime's lifeline: the order comes in, a refusal goes out."""

from __future__ import annotations

import contextlib
import socket

from srt.protocol.link_errors import PeerGone
from srt.protocol.messages import EngineStart, Failed
from srt.protocol.stream import MessageStream
from srt.utils.errors import StartError


def open_lifeline(number: int) -> tuple[MessageStream, EngineStart]:
    """The link behind an inherited descriptor, and the Runtime's order on it."""
    sock = socket.socket(fileno=number)
    sock.set_inheritable(False)
    lifeline = MessageStream(sock, generation=None)
    order = lifeline.receive_blocking()
    if not isinstance(order, EngineStart):
        raise StartError(f"A Runtime's first message was {type(order).__name__}.")
    return lifeline, order


def say_failed(lifeline: MessageStream, sentence: str) -> None:
    with contextlib.suppress(PeerGone):  # nobody is left to be told
        lifeline.send(Failed(sentence))
