"""Messages over a byte stream, as a supervisor and its child exchange them."""

from __future__ import annotations

import select
import socket
import struct

import pytest

from srt.protocol.codec import encode
from srt.protocol.link_errors import LinkBroken, PeerGone
from srt.protocol.messages import Failed, Heartbeat, Message, Progress, Stop
from srt.protocol.stream import MessageStream


def pair() -> tuple[MessageStream, MessageStream]:
    ours, theirs = socket.socketpair()
    return MessageStream(ours, 4), MessageStream(theirs, None)


def framed(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def test_messages_arrive_in_order_both_ways() -> None:
    ours, theirs = pair()
    sent: list[Message] = [Progress("weights", number, 9, 0.5) for number in range(20)]
    for message in sent:
        ours.send(message)
    assert [theirs.receive() for _ in range(21)] == [*sent, None]
    theirs.send(Heartbeat(1.5))
    assert ours.receive() == Heartbeat(1.5)


def test_a_message_may_come_byte_by_byte() -> None:
    ours, theirs = socket.socketpair()
    stream = MessageStream(theirs, 1)
    for byte in framed(encode(Stop(2.0), 1, 0)):
        assert stream.receive() is None
        ours.send(bytes([byte]))
    assert stream.receive() == Stop(2.0)


def test_what_follows_a_message_that_was_waited_for_can_still_be_watched_for() -> None:
    ours, theirs = pair()
    ours.send(Progress("weights", 1, 9, 0.5))
    ours.send(Heartbeat(1.5))
    assert theirs.receive_blocking() == Progress("weights", 1, 9, 0.5)
    assert select.select([theirs], [], [], 0)[0] == [theirs], "the second message is where no selector sees it"
    assert theirs.receive() == Heartbeat(1.5)


def test_what_was_sent_before_the_end_is_still_read() -> None:
    ours, theirs = pair()
    ours.send(Failed("out of memory"))
    ours.send(Heartbeat(0.0))
    ours.close()
    assert theirs.receive() == Failed("out of memory")
    assert theirs.receive() == Heartbeat(0.0)
    with pytest.raises(PeerGone):
        theirs.receive()


def test_sending_to_a_closed_end_says_so() -> None:
    ours, theirs = pair()
    theirs.close()
    with pytest.raises(PeerGone):
        ours.send(Heartbeat(0.0))


@pytest.mark.parametrize(
    "data",
    [
        framed(b"hello"),
        b"\xff\xff\xff\xff",
        framed(encode(Stop(1.0), 1, 1)),
        framed(encode(Stop(1.0), 2, 0)),
    ],
    ids=["no message", "too long", "a gap", "another generation"],
)
def test_what_cannot_be_trusted_breaks_the_link(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(data)
    with pytest.raises(LinkBroken):
        MessageStream(theirs, 1).receive()
