"""Labels: the names that clients give their requests. A batch has one name; its prompts append `_0`, `_1`, …"""

from __future__ import annotations


def numbered(name: str, count: int) -> list[str]:
    """Return labels for the prompts of a batch that a client has named."""
    return [f"{name}_{i}" for i in range(count)]


def is_named(label: str, name: str) -> bool:
    """Return whether `name` means this label: the label itself, or the batch that it belongs to. The empty name means every label."""
    if not name or label == name:
        return True
    return label.startswith(f"{name}_") and label[len(name) + 1 :].isdecimal()
