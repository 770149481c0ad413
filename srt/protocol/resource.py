"""What requests need on the workers, as messages name it."""

from __future__ import annotations

from srt.protocol.wire import Wire


class Resource(Wire, frozen=True):
    """What the rows of a request need on every worker before they may run, such as a compiled grammar.

    `key` is a hash of everything that makes it what it is: kind, content, and the version of the code that reads the content.
    """

    kind: str
    key: str
    content: bytes


class PinResources(Wire, frozen=True, tag=14):
    """Hold these resources from now on, in place of those that were named before, whether requests need them or not.

    Every frontend says so when it is greeted, and one of them when they change. A message with a smaller `version` is outdated.
    """

    version: int
    resources: list[Resource]
