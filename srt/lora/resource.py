"""An adapter as a resource of requests: what a frontend sends along with a request, and workers load."""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from srt.protocol.messages import GenerateRequest, Resource

KIND: Final = "adapter"
_FORM: Final = 1  # of what workers make of a folder: change it, and keys change


class AdapterContent(msgspec.Struct, frozen=True):
    """Where an adapter is, and the hash that its files must have."""

    folder: str
    content_hash: str


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(AdapterContent)


def resource_of(adapter: AdapterContent) -> Resource:
    """Return the resource for an adapter. Its key depends on the files' content alone, not on their place or name."""
    key = hashlib.blake2b(f"{KIND} {_FORM} {adapter.content_hash}".encode(), digest_size=16).hexdigest()
    return Resource(KIND, key, _ENCODER.encode(adapter))


def read_content(content: bytes) -> AdapterContent:
    """Return what `resource_of` has written."""
    return _DECODER.decode(content)


def with_adapter(request: GenerateRequest, adapter: Resource | None) -> GenerateRequest:
    """Return the request of a server that has adapters, with its own one, if any.

    Its namespace of the prefix cache begins with the adapter's key, because keys and values are of use to this adapter alone. That of a
    request without an adapter is empty or begins with a colon, so that no client can name another one's.
    """
    key = "" if adapter is None else adapter.key
    salt = f"{key}:{request.cache_salt}" if key or request.cache_salt else ""
    return msgspec.structs.replace(request, adapter=adapter, cache_salt=salt)
