"""What a frontend and its compile process say to each other: a length in four bytes, little-endian, and a struct in MessagePack."""

from __future__ import annotations

from typing import ClassVar, Final

from msgspec import Struct

MAX_FRAME_BYTES: Final = 1 << 20


class Setup(Struct, frozen=True, array_like=True):
    """Frontend -> process: the first message."""

    tokenizer_folder: str
    vocab_size: int
    eos_ids: list[int]


class Job(Struct, frozen=True, array_like=True):
    """Frontend -> process: try this constraint."""

    number: int
    kind: str
    content: str


class Answer(Struct, frozen=True):
    """Process -> frontend: the answer to a job, or to Setup under the number SETUP. At most one of the texts is set."""

    SETUP: ClassVar[int] = -1

    number: int
    grammar: str = ""
    refusal: str = ""  # the rest of a sentence: the same constraint would be refused again
    busy: str = ""  # a sentence: the same constraint may be accepted later
