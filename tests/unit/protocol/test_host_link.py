"""Links between hosts: who has the secret is believed, and nobody else is."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from srt.protocol import host_link
from srt.protocol.cluster_key import LinkKeys, Signatures, read_secret
from srt.protocol.codec import encode
from srt.protocol.host_link import VersionsDiffer, open_link, use_with_selector
from srt.protocol.host_messages import HostBeat, HostKill, MeetingPoints
from srt.protocol.link_errors import LinkBroken, PeerGone
from srt.protocol.links import DealerLink, Gatekeeper, RouterLink, frontend_endpoint, worker_endpoint
from srt.protocol.messages import FlushCache
from srt.protocol.stream import MessageStream
from srt.utils.errors import StartError

WAIT_MS = 60_000
SECRET = b"s" * 32


def linked(leading: bytes = SECRET, following: bytes = SECRET) -> tuple[MessageStream, MessageStream]:
    """Both ends of a link, with these secrets."""
    ours, theirs = tcp_pair()
    found: list[MessageStream] = []
    thread = threading.Thread(target=lambda: found.append(open_link(theirs, following, leads=False)))
    thread.start()
    leader = open_link(ours, leading, leads=True)
    thread.join()
    for one in (ours, theirs):
        use_with_selector(one)
    return leader, found[0]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


def test_both_ends_read_what_the_other_signs() -> None:
    leader, follower = linked()
    for message in (HostKill("worker", 1), HostBeat()):
        leader.send(message)
        assert follower.receive_blocking() == message
    assert follower.receive() is None
    follower.send(HostBeat({"1": {"num_running": 2.0}}))
    assert leader.receive_blocking() == HostBeat({"1": {"num_running": 2.0}})
    follower.close()
    with pytest.raises(PeerGone):
        leader.receive()


def test_another_secret_is_found_out_by_the_first_message() -> None:
    leader, follower = linked(following=b"t" * 32)
    for one, other in ((leader, follower), (follower, leader)):
        one.send(HostBeat())
        with pytest.raises(LinkBroken, match="wrong signature"):
            other.receive_blocking()


def test_a_message_of_another_connection_or_direction_is_refused() -> None:
    ours, theirs = secrets.token_bytes(32), secrets.token_bytes(32)
    data = encode(HostBeat(), 0, 0)
    signed = Signatures(ours, theirs).sign(data)
    assert Signatures(theirs, ours).checked(signed) == data
    with pytest.raises(LinkBroken):
        Signatures(ours, theirs).checked(signed)  # our own message, sent back
    with pytest.raises(LinkBroken):
        Signatures(theirs, ours).checked(bytes([signed[0] ^ 1]) + signed[1:])
    with pytest.raises(LinkBroken):
        Signatures(theirs, ours).checked(b"")


def test_other_versions_and_other_programs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    greeting = host_link._GREETING
    for magic, error, words in ((b"srt-host", VersionsDiffer, "runs srt 9.9"), (b"HTTP/1.1", LinkBroken, "not a host")):
        ours, theirs = tcp_pair()
        theirs.sendall(greeting.pack(magic, b"another protocol", b"9.9", bytes(32)))
        with pytest.raises(error, match=words):
            open_link(ours, SECRET, leads=True)
    ours, theirs = tcp_pair()
    theirs.sendall(greeting.pack(b"srt-host", b"another protocol", b"9\x1b[2J\n\x9b", bytes(32)))
    with pytest.raises(VersionsDiffer) as raised:
        open_link(ours, SECRET, leads=True)
    assert str(raised.value).isprintable()
    monkeypatch.setattr(host_link, "HANDSHAKE_S", 0.05)
    ours, _silent = tcp_pair()
    with pytest.raises(PeerGone):
        open_link(ours, SECRET, leads=True)


def test_a_secret_must_be_long_and_readable(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(StartError, match=r"cannot be read \(No such file"):
        read_secret(str(path))
    path.write_text("short\n")
    with pytest.raises(StartError, match=r"has 5 bytes: use at least 32 \(umask 077; "):
        read_secret(str(path))
    path.write_text("x" * 32 + "\n")
    assert read_secret(str(path)) == b"x" * 32


# ---- Sockets between hosts


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def test_only_this_generation_with_the_secret_connects(context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
    def meeting(secret: bytes) -> MeetingPoints:
        return MeetingPoints(secret, "127.0.0.1", [address], address)

    endpoint = frontend_endpoint("/run", 3, address, meeting(SECRET))
    gatekeeper = Gatekeeper(context, [endpoint])
    router = RouterLink(context, endpoint.path, 3, keys=endpoint.keys)
    with zmq.Context() as others:
        strangers = [
            frontend_endpoint("/run", 3, address, meeting(b"t" * 32)).keys,
            frontend_endpoint("/run", 2, address, meeting(SECRET)).keys,
            worker_endpoint("/run", 3, meeting(SECRET)).keys,
            None,
        ]
        assert endpoint.keys is not None
        # It knows the key of the binding end, but has no key that may connect.
        strangers.append(LinkKeys(endpoint.keys.binding, b"u" * 32))
        refused = [DealerLink(others, endpoint.path, 3, b"stranger", keys) for keys in strangers]
        friend = DealerLink(others, endpoint.path, 3, b"friend", endpoint.keys)
        for link in (*refused, friend):
            link.send(FlushCache(1))
        assert router.socket.poll(WAIT_MS)
        assert router.receive() is not None and router.receive() is None
        router.send(b"friend", FlushCache(2))
        assert friend.socket.poll(WAIT_MS)
        assert friend.receive() == FlushCache(2)
        for link in (*refused, friend):
            link.close()
    router.close()
    gatekeeper.close()
