"""How a link to another process ends. Apart from `links.py`, so that who has no ZeroMQ socket need not load it."""

from __future__ import annotations


class PeerGone(Exception):
    """The peer's end of the link is not there any more."""


class LinkBroken(Exception):
    """A message was lost, or is not one of ours: the stream from this peer cannot be trusted any more."""
