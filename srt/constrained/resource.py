"""A grammar as a resource of requests: what a frontend sends along with a request, and workers prepare."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from typing import Final

import msgspec

from srt.constrained.compiler import Grammar
from srt.protocol.messages import Resource

KIND: Final = "grammar"


class GrammarContent(msgspec.Struct, frozen=True):
    """`text` is what the grammar library compiles. The answer follows it from the first token behind one of `begins_after` on.

    With an empty `begins_after`, it does so from its beginning.
    """

    text: str
    begins_after: list[int] = []


_LIBRARY_VERSION: Final = version("llguidance")
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(GrammarContent)


def resource_of(grammar: Grammar, begins_after: list[int] | None = None) -> Resource:
    """Return the resource for a grammar. Its key is a hash of the content and of the library's version, which gives it its meaning."""
    content = _ENCODER.encode(GrammarContent(grammar.text, begins_after or []))
    digest = hashlib.blake2b(f"{KIND} {_LIBRARY_VERSION} ".encode(), digest_size=16)
    digest.update(content)
    return Resource(KIND, digest.hexdigest(), content)


def read_content(content: bytes) -> GrammarContent:
    """Return what `resource_of` has written."""
    return _DECODER.decode(content)
