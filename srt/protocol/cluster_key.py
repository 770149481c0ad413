"""What the secret of several hosts is used for: keys of sockets between them, and signatures on what their supervisors say."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path

from srt.protocol.link_errors import LinkBroken
from srt.utils.errors import StartError

LEAST_SECRET = 32  # bytes
MOST_SECRET = 1 << 16
SIGNATURE = 16  # bytes


def read_secret(path: str) -> bytes:
    """Return the secret in the file of --cluster-key-file; StartError if it cannot be one."""
    try:
        with Path(path).open("rb") as file:
            secret = file.read(MOST_SECRET).strip()
    except OSError as error:
        raise StartError(f"--cluster-key-file {path} cannot be read ({error.strerror}).") from error
    if len(secret) < LEAST_SECRET:
        raise StartError(
            f"--cluster-key-file {path} has {len(secret)} bytes: use at least {LEAST_SECRET}"
            f" (umask 077; openssl rand -hex 32 > {path})."
        )
    return secret


def derived(secret: bytes, purpose: str) -> bytes:
    """Return 32 bytes that only holders of the secret can know, others for each purpose."""
    return hmac.digest(secret, purpose.encode(), "sha256")


def secret_of_run(secret: bytes, run: str) -> bytes:
    """Return what the processes of one run of a server have in place of the secret."""
    return derived(secret, f"run {run}")


@dataclass(frozen=True, slots=True)
class LinkKeys:
    """Secret halves of the CURVE keys of a socket's two ends, 32 bytes each."""

    binding: bytes
    connecting: bytes

    @classmethod
    def of(cls, secret: bytes, link: str, generation: int) -> LinkKeys:
        """Derive the keys of one link of one generation of an engine: processes of another generation cannot connect."""
        return cls(*(derived(secret, f"{link} {generation} {end}") for end in ("binding", "connecting")))


class Signatures:
    """Signatures on one connection, other ones in each direction. That no message is left out or repeated, its number shows."""

    def __init__(self, sending: bytes, receiving: bytes) -> None:
        self._sending, self._receiving = sending, receiving

    def sign(self, data: bytes) -> bytes:
        return data + _signature(self._sending, data)

    def checked(self, signed: bytes) -> bytes:
        """Return the data without its signature; LinkBroken if that is wrong."""
        data, signature = signed[:-SIGNATURE], signed[-SIGNATURE:]
        if not hmac.compare_digest(signature, _signature(self._receiving, data)):
            raise LinkBroken("a message has a wrong signature")
        return data


def _signature(key: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, key=key, digest_size=SIGNATURE).digest()
