"""The clients' names for requests. A batch has one name, its prompts have numbers behind it."""

from __future__ import annotations


def numbered(name: str, count: int) -> list[str]:
    """Labels for the prompts of a batch that a client has named."""
    return [f"{name}_{i}" for i in range(count)]


def is_named(label: str, name: str) -> bool:
    """Whether a client means this label by `name`: as it is written, or as that of the whole batch. The empty name means all."""
    if not name or label == name:
        return True
    return label.startswith(f"{name}_") and label[len(name) + 1 :].isdecimal()
