"""Which requests a client means by a name."""

from __future__ import annotations


def is_meant(label: str, name: str) -> bool:
    """All by the empty name; else this label, or a batch of which it is a part."""
    batch, _, number = label.rpartition("_")
    return name in ("", label) or (name == batch and number.isdigit())
