"""Real ZeroMQ sockets: order, gaps, broken bytes, generations, replaced and missing peers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from srt.protocol.codec import encode
from srt.protocol.links import (
    Broken,
    DealerLink,
    LinkBroken,
    PeerGone,
    Received,
    RouterLink,
    frontend_path,
    remove_sockets,
    worker_path,
)
from srt.protocol.messages import Abort, FlushCache, Load, Message
from srt.utils.errors import StartError

WAIT_MS = 60_000
HELLO = FlushCache(0)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


class Peer:
    """A bare socket with a name: it sends whatever bytes a test wants."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, name: bytes) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, name)
        self._socket.connect(endpoint)

    def send(self, *parts: bytes) -> None:
        self._socket.send_multipart(parts)

    def close(self) -> None:
        self._socket.close(0)


def wait(link: RouterLink | DealerLink) -> None:
    assert link.socket.poll(WAIT_MS), "nothing came"


def next_of(router: RouterLink) -> Received | Broken:
    wait(router)
    received = router.receive()
    assert received is not None
    return received


def reason_of(received: Received | Broken) -> str:
    assert isinstance(received, Broken)
    return received.reason


def message_of(dealer: DealerLink) -> Message | None:
    wait(dealer)
    return dealer.receive()


def test_messages_arrive_in_order_both_ways(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
    router = RouterLink(context, endpoint, 3)
    dealer = DealerLink(context, endpoint, 3, b"f0")
    for number in range(50):
        dealer.send(Abort(number, 0))
    assert [next_of(router) for _ in range(50)] == [Received(b"f0", Abort(number, 0)) for number in range(50)]
    for number in range(50):
        router.send(b"f0", Load(number, 0, 0, 0))
    assert [message_of(dealer) for _ in range(50)] == [Load(number, 0, 0, 0) for number in range(50)]
    assert router.receive() is None
    assert dealer.receive() is None


def test_each_peer_has_its_own_numbers(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
    router = RouterLink(context, endpoint, 1)
    dealers = {name: DealerLink(context, endpoint, 1, name) for name in (b"f0", b"f1")}
    for name, dealer in dealers.items():
        dealer.send(HELLO)
        assert next_of(router) == Received(name, HELLO)
    for name, dealer in dealers.items():
        router.send(name, Load(1, 2, 3, 4))
        assert message_of(dealer) == Load(1, 2, 3, 4)


def test_a_gap_is_noticed_by_the_binding_end(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
    router = RouterLink(context, endpoint, 1)
    peer = Peer(context, endpoint, b"w0")
    peer.send(encode(HELLO, 1, 0))
    peer.send(encode(HELLO, 1, 2))
    peer.send(encode(HELLO, 1, 3))
    assert next_of(router) == Received(b"w0", HELLO)
    assert "message 2 came where 1 was expected" in reason_of(next_of(router))
    assert next_of(router) == Received(b"w0", HELLO)


def test_a_message_that_comes_twice_is_noticed(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
    router = RouterLink(context, endpoint, 1)
    peer = Peer(context, endpoint, b"w0")
    for sequence in (0, 1, 1):
        peer.send(encode(HELLO, 1, sequence))
    next_of(router)
    next_of(router)
    assert "message 1 came where 2 was expected" in reason_of(next_of(router))


def test_a_gap_is_noticed_by_the_connecting_end(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
    router = context.socket(zmq.ROUTER)
    router.bind(endpoint)
    dealer = DealerLink(context, endpoint, 1, b"w0")
    dealer.send(HELLO)
    assert router.poll(WAIT_MS)
    router.send_multipart((router.recv_multipart()[0], encode(HELLO, 1, 1)))
    wait(dealer)
    with pytest.raises(LinkBroken, match="1:1 came where 1:0 was expected"):
        dealer.receive()


@pytest.mark.parametrize("data", [b"", b"\x93", b"\xc1", b"hello", encode(HELLO, 1, 0)[:-1]])
def test_bytes_that_are_no_message_break_a_connecting_end(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, data: bytes
) -> None:
    router = context.socket(zmq.ROUTER)
    router.bind(endpoint)
    dealer = DealerLink(context, endpoint, 1, b"w0")
    dealer.send(HELLO)
    assert router.poll(WAIT_MS)
    router.send_multipart((router.recv_multipart()[0], data))
    wait(dealer)
    with pytest.raises(LinkBroken):
        dealer.receive()


def test_bytes_that_are_no_message_count_as_one_and_the_stream_goes_on(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str
) -> None:
    router = RouterLink(context, endpoint, 1)
    peer = Peer(context, endpoint, b"f0")
    peer.send(encode(HELLO, 1, 0))
    peer.send(b"\xc1")
    peer.send(b"one", b"two")
    peer.send(encode(HELLO, 1, 3))
    assert next_of(router) == Received(b"f0", HELLO)
    assert "not a message" in reason_of(next_of(router))
    assert "2 parts" in reason_of(next_of(router))
    assert next_of(router) == Received(b"f0", HELLO)


def test_another_generation_is_refused(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
    router = RouterLink(context, endpoint, 2)
    dealer = DealerLink(context, endpoint, 1, b"w0")
    dealer.send(HELLO)
    assert "of generation 1, but this link is of generation 2" in reason_of(next_of(router))


def test_a_peer_that_was_replaced_begins_anew(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
    router = RouterLink(context, endpoint, 1)
    old = DealerLink(context, endpoint, 1, b"f0")
    for _ in range(3):
        old.send(HELLO)
        next_of(router)
        router.send(b"f0", Load(1, 1, 1, 1))
    old.close()
    new = DealerLink(context, endpoint, 1, b"f0")
    new.send(HELLO)
    assert next_of(router) == Received(b"f0", HELLO)
    router.send(b"f0", Load(2, 2, 2, 2))
    assert message_of(new) == Load(2, 2, 2, 2)
    new.send(Abort(1, 1))
    assert next_of(router) == Received(b"f0", Abort(1, 1))


def test_sending_to_a_peer_that_never_came_says_so(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
    router = RouterLink(context, endpoint, 1)
    with pytest.raises(PeerGone, match="w3"):
        router.send(b"w3", HELLO)


def test_a_link_connects_before_the_other_end_exists(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
    dealer = DealerLink(context, endpoint, 1, b"w0")
    dealer.send(HELLO)
    router = RouterLink(context, endpoint, 1)
    assert next_of(router) == Received(b"w0", HELLO)


def test_nothing_is_dropped_when_nobody_reads(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
    router = RouterLink(context, endpoint, 1)
    dealer = DealerLink(context, endpoint, 1, b"f0")
    for number in range(5000):
        dealer.send(Abort(number, 0))
    for number in range(5000):
        assert next_of(router) == Received(b"f0", Abort(number, 0))


def test_socket_paths_are_the_generations_and_short() -> None:
    assert frontend_path("/tmp/srt-x", 4) != worker_path("/tmp/srt-x", 4)
    assert worker_path("/tmp/srt-x", 4) != worker_path("/tmp/srt-x", 5)
    with pytest.raises(ValueError, match="shorter"):
        frontend_path("/tmp/" + "x" * 100, 1)


def test_sockets_of_an_engine_of_which_nothing_is_left_are_removed(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    run_dir = str(tmp_path)
    for generation in (1, 2):
        remove_sockets(run_dir, generation - 1)
        for path in (frontend_path(run_dir, generation), worker_path(run_dir, generation)):
            RouterLink(context, path, generation)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f2", "w2"]


def test_a_path_that_cannot_be_bound_is_one_sentence(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    with pytest.raises(
        StartError, match=r"^The socket ipc://.*/missing/w1 cannot be created: No such file or directory"
    ):
        RouterLink(context, worker_path(str(tmp_path / "missing"), 1), 1)
