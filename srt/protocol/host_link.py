"""The link between the supervisors of two hosts: TCP, on which each end proves that it has the secret by signing what it sends.

Both ends first send their version and a random number, from which the keys of the signatures are derived together with the secret.
Messages are not encrypted: they say which processes start and end, and hold no prompts, tokens or options that are secret.
"""

from __future__ import annotations

import secrets
import socket
import struct
import time

from srt.protocol.cluster_key import Signatures, derived
from srt.protocol.codec import protocol_hash
from srt.protocol.link_errors import LinkBroken, PeerGone
from srt.protocol.stream import MessageStream, set_timeout
from srt.version import __version__

HANDSHAKE_S = 5.0
HELLO_S = 5.0  # for the first message of a host
SEND_S = 5  # after which a peer that reads nothing counts as gone
UNHEARD_MS = 20_000  # likewise a host whose kernel confirms nothing of what was sent; something is, every second
_MAGIC = b"srt-host"
_GREETING = struct.Struct("8s16s32s32s")  # magic, hash of the protocol, version, random


class VersionsDiffer(LinkBroken):
    """Raised when the other end has another version of the protocol."""


def open_link(sock: socket.socket, secret: bytes, *, leads: bool) -> MessageStream:
    """Exchange greetings, within HANDSHAKE_S.

    LinkBroken if the other end is something else, or of another version; PeerGone if it closes or is silent.
    """
    ours = _GREETING.pack(_MAGIC, protocol_hash().encode(), __version__.encode()[:32], secrets.token_bytes(32))
    until_s = time.monotonic() + HANDSHAKE_S
    sock.settimeout(HANDSHAKE_S)
    try:
        sock.sendall(ours)
        theirs = _receive(sock, _GREETING.size, until_s)
    except OSError as error:
        raise PeerGone(str(error)) from error
    magic, their_hash, their_version, _ = _GREETING.unpack(theirs)
    if magic != _MAGIC:
        raise LinkBroken("what answers is not a host of a server")
    if their_hash.rstrip(b"\0").decode(errors="replace") != protocol_hash():
        # It has proved nothing yet, and what it says is shown on a terminal.
        version = "".join(char if char.isprintable() else "?" for char in their_version.rstrip(b"\0").decode("latin-1"))
        raise VersionsDiffer(
            f"it runs srt {version} and this host srt {__version__}, and they do not speak the same protocol"
        )
    both = (ours + theirs if leads else theirs + ours).hex()
    keys = [derived(secret, f"{end} {both}") for end in ("leading", "following")]
    return MessageStream(sock, 0, Signatures(*(keys if leads else reversed(keys))))


def use_with_selector(sock: socket.socket) -> None:
    """Prepare the socket of a link for a process that waits for several things, after the first messages.

    Small messages leave at once, and the kernel notices a host that was switched off.
    """
    sock.settimeout(None)
    # Not settimeout: Python would wait for readable bytes, although MessageStream asks it not to.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNHEARD_MS)


def _receive(sock: socket.socket, size: int, until_s: float) -> bytes:
    data = b""
    while len(data) < size:
        set_timeout(sock, until_s)
        part = sock.recv(size - len(data))
        if not part:
            raise PeerGone("the other end was closed")
        data += part
    return data
