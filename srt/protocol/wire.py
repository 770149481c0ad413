"""The base of all messages and of their parts."""

from __future__ import annotations

from msgspec import Struct


class Wire(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A message (numbered by `tag`) or a part of one. Its fields travel as a list, in this order; none may be missing."""
