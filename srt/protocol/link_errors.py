"""Errors that end a link to another process. Apart from `links.py`, so that modules without sockets need not load ZeroMQ."""

from __future__ import annotations


class PeerGone(Exception):
    """Raised when the peer's end of the link is gone."""


class LinkBroken(Exception):
    """Raised when a message was lost or cannot be read: the stream from this peer cannot be trusted any more."""
