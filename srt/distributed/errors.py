"""What can go wrong between ranks. Apart from the collectives, so that who only handles it need not load torch."""

from __future__ import annotations


class CollectiveError(RuntimeError):
    """The ranks could not finish an operation together: one of them is gone, or did not come in time."""
