"""The ZeroMQ sockets between processes: the scheduler binds, the others connect; each message has a generation and a sequence number.

Sockets between hosts are TCP with CURVE, with keys from the secret of --cluster-key-file: encrypted, and open to holders of it alone.

ZeroMQ drops nothing: the high-water marks are 0, and a ROUTER refuses to send to a peer that it does not know (`PeerGone`). A
sequence number that is not the expected one means that a message was lost; a worker or scheduler does not survive that.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from srt.protocol.cluster_key import LinkKeys
from srt.protocol.codec import DecodeError, Envelope, EnvelopeView, decode, encode
from srt.protocol.host_messages import MeetingPoints
from srt.protocol.link_errors import LinkBroken as LinkBroken
from srt.protocol.link_errors import PeerGone as PeerGone
from srt.protocol.messages import Message
from srt.protocol.views import RequestView
from srt.utils.errors import StartError

MAX_SOCKET_PATH = 107  # bytes: the kernel's limit
_SCHEME = "ipc://"
# Between hosts: a peer that was silent for so long is gone, though its host may not have said so. The supervisors notice it before.
_HEARTBEAT_MS, _SILENT_MS = 5000, 40_000


@dataclass(frozen=True, slots=True)
class Received:
    peer: bytes
    message: Message | RequestView


@dataclass(frozen=True, slots=True)
class Broken:
    """A message from this peer that could not be accepted; `reason` says why."""

    peer: bytes
    reason: str


def frontend_path(run_dir: str, generation: int) -> str:
    return _ipc(run_dir, f"f{generation}")


def worker_path(run_dir: str, generation: int) -> str:
    return _ipc(run_dir, f"w{generation}")


def calls_path(run_dir: str, worker: int, number: int) -> str:
    """Return where a worker hears that another attention group begins a step. `number` counts its engines."""
    return _ipc(run_dir, f"c{number}-{worker}").removeprefix(_SCHEME)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where two ends of a link meet; `keys` if others can reach that place."""

    path: str
    keys: LinkKeys | None = None


def frontend_endpoint(run_dir: str, generation: int, address: str, meeting: MeetingPoints | None) -> Endpoint:
    """Return where frontends meet the scheduler of this generation: at `address`, or in the run folder if that is empty."""
    if not address or meeting is None:
        return Endpoint(frontend_path(run_dir, generation))
    return Endpoint(f"tcp://{address}", LinkKeys.of(meeting.secret, "frontends", generation))


def worker_endpoint(run_dir: str, generation: int, meeting: MeetingPoints | None) -> Endpoint:
    """Return where the workers of this generation meet their scheduler."""
    if meeting is None or not meeting.workers:
        return Endpoint(worker_path(run_dir, generation))
    return Endpoint(f"tcp://{meeting.workers}", LinkKeys.of(meeting.secret, "workers", generation))


def _protect(socket: zmq.Socket[bytes], keys: LinkKeys, *, binds: bool) -> None:
    """Set what a socket between hosts needs before it binds or connects."""
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENT_MS)
    binding, connecting = z85.encode(keys.binding), z85.encode(keys.connecting)
    own = binding if binds else connecting
    socket.setsockopt(zmq.CURVE_SECRETKEY, own)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(own))
    if binds:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
    else:
        socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(binding))


class Gatekeeper:
    """A thread that lets only peers with the right key connect to the sockets of this context that other hosts can reach."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoints: Iterable[Endpoint]) -> None:
        self._public = {zmq.curve_public(z85.encode(one.keys.connecting)) for one in endpoints if one.keys is not None}
        self._thread: Any = None
        if self._public:
            from zmq.auth.thread import ThreadAuthenticator  # here, since most servers do not use it

            self._thread = ThreadAuthenticator(context)
            self._thread.start()
            self._thread.configure_curve_callback("*", self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether the holder of this key may connect. ZeroMQ's authentication calls this."""
        return key in self._public

    def close(self) -> None:
        if self._thread is not None:
            self._thread.stop()


def remove_sockets(run_dir: str, generation: int) -> None:
    """Delete the sockets of an engine that has ended: nothing else does. A peer that is still connecting to them keeps trying."""
    for path in (frontend_path(run_dir, generation), worker_path(run_dir, generation)):
        with contextlib.suppress(OSError):
            Path(path.removeprefix(_SCHEME)).unlink()


def _ipc(run_dir: str, name: str) -> str:
    path = str(Path(run_dir) / name)
    if len(path.encode()) > MAX_SOCKET_PATH:
        raise ValueError(
            f"socket path {path} is longer than {MAX_SOCKET_PATH} bytes: choose a shorter temporary folder"
        )
    return _SCHEME + path


class RouterLink:
    """The binding end, with one numbered stream to and from every peer. `read` decodes what arrives."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        generation: int,
        read: Callable[[bytes], Envelope | EnvelopeView] = decode,
        keys: LinkKeys | None = None,
    ) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if keys is not None:
            _protect(self._socket, keys, binds=True)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise StartError(f"The socket {endpoint} cannot be created: {error}.") from error
        self._generation = generation
        self._read = read
        self._sent: defaultdict[bytes, int] = defaultdict(int)
        self._expected: defaultdict[bytes, int] = defaultdict(int)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        return self._socket

    def send(self, peer: bytes, message: Message) -> None:
        """Queue the message for this peer; PeerGone if it is not connected."""
        try:
            self._socket.send_multipart((peer, encode(message, self._generation, self._sent[peer])), copy=True)
        except zmq.ZMQError as error:
            raise PeerGone(peer.decode(errors="replace")) from error
        self._sent[peer] += 1

    def receive(self) -> Received | Broken | None:
        """Return the next message that has arrived, or None. A peer that was replaced starts again at sequence number 0."""
        try:
            peer, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        try:
            if len(parts) != 1:
                raise DecodeError(f"it has {len(parts)} parts, but must have one")
            envelope = self._read(parts[0])
        except DecodeError as error:
            self._expected[peer] += 1  # it had a sequence number, though unreadable
            return Broken(peer, str(error))
        return self._in_order(peer, envelope)

    def _in_order(self, peer: bytes, envelope: Envelope | EnvelopeView) -> Received | Broken:
        if envelope.generation != self._generation:
            return Broken(
                peer,
                f"the message is of generation {envelope.generation}, but this link is of generation {self._generation}",
            )
        if envelope.sequence == 0 and self._expected[peer] != 0:
            self._expected[peer] = self._sent[peer] = 0  # the peer was replaced: both streams start again
        expected = self._expected[peer]
        self._expected[peer] = envelope.sequence + 1
        if envelope.sequence != expected:
            return Broken(peer, f"message {envelope.sequence} came where {expected} was expected")
        return Received(peer, envelope.message)

    def forget(self, peer: bytes) -> None:
        self._sent.pop(peer, None)
        self._expected.pop(peer, None)

    def close(self) -> None:
        self._socket.close(0)


class DealerLink:
    """A connecting end: one numbered stream in each direction."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        generation: int,
        identity: bytes,
        keys: LinkKeys | None = None,
    ) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        if keys is not None:
            _protect(self._socket, keys, binds=False)
        self._socket.connect(endpoint)
        self._generation = generation
        self._sent = 0
        self._expected = 0

    @property
    def socket(self) -> zmq.Socket[bytes]:
        return self._socket

    def send(self, message: Message) -> None:
        self._socket.send(encode(message, self._generation, self._sent), copy=True)
        self._sent += 1

    def receive(self) -> Message | None:
        """Return the next message that has arrived, or None. LinkBroken if the stream has a gap or bytes that are no message."""
        try:
            data = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        try:
            envelope = decode(data)
        except DecodeError as error:
            raise LinkBroken(str(error)) from error
        if envelope.generation != self._generation or envelope.sequence != self._expected:
            raise LinkBroken(
                f"message {envelope.generation}:{envelope.sequence} came where {self._generation}:{self._expected} was expected"
            )
        self._expected += 1
        return envelope.message

    def close(self, linger_ms: int = 0) -> None:
        self._socket.close(linger_ms)
