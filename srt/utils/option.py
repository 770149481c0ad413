"""One option of the server: a field of a dataclass, with its help text, and the error for a value that the user must change."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


class ArgumentError(ValueError):
    """Raised for an option that the user must change. The text is one sentence that names it."""


def option(
    default: Any, help_text: str, *, group: str, choices: Sequence[str] = (), aliases: Sequence[str] = ()
) -> Any:
    return dataclasses.field(
        default=default,
        metadata={"help": help_text, "group": group, "choices": tuple(choices), "aliases": tuple(aliases)},
    )
