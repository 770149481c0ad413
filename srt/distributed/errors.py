"""Errors between ranks, in a module that does not load torch, for processes that only handle them."""

from __future__ import annotations


class CollectiveError(RuntimeError):
    """The ranks could not finish an operation together: one of them is gone or did not arrive in time."""
