"""A grammar as a resource of requests: what a frontend sends along with a request, and workers prepare."""

from __future__ import annotations

import hashlib
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


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(GrammarContent)


def resource_of(grammar: Grammar, begins_after: list[int] | None = None) -> Resource:
    """Return the resource for a grammar. Its key is the grammar's, and another one for each `begins_after`."""
    content = _ENCODER.encode(GrammarContent(grammar.text, begins_after or []))
    key = grammar.key
    if begins_after:
        key = hashlib.blake2b(f"{key} after {begins_after}".encode(), digest_size=16).hexdigest()
    return Resource(KIND, key, content)


def read_content(content: bytes) -> GrammarContent:
    """Return what `resource_of` has written."""
    return _DECODER.decode(content)
