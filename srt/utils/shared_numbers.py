"""Named numbers that one process writes and other processes of the host read, in a memory-mapped file.

A write is one store to memory and a read is one load: neither process waits for the other, even if the other has stopped.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

_MAGIC = b"srtnum1\n"
_WORD = 8


class SharedNumbers:
    """Named float64 values, initially 0. The names are fixed when the file is created."""

    def __init__(self, names: Sequence[str], memory: mmap.mmap, start: int) -> None:
        """Store the fields; call `fresh`, `create`, `open` or `private` instead."""
        self.names = tuple(names)
        self.cells = memoryview(memory)[start : start + _WORD * len(self.names)].cast("d")
        self._places = {name: place for place, name in enumerate(self.names)}

    @classmethod
    def fresh(cls, path: Path, names: Iterable[str]) -> SharedNumbers:
        """Create the file, or reuse the existing one if there is no room for a new file and it has the same names.

        The existing file belongs to the process that this one replaces, and readers continue to read it. If neither is possible, the
        numbers are private to this process.
        """
        names = tuple(names)
        try:
            return cls.create(path, names)
        except OSError:
            older = cls.open(path)
            if older is None or older.names != names:
                return cls.private(names)
            for place in range(len(names)):
                older.cells[place] = 0.0
            return older

    @classmethod
    def create(cls, path: Path, names: Iterable[str]) -> SharedNumbers:
        """Create the file, replacing an older one; processes that have the older one open continue to read its last values.

        Raises OSError and leaves no new file if there is no room for it.
        """
        names = tuple(names)
        head = _head(names)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            part.write_bytes(head + bytes(_WORD * len(names)))
            with part.open("r+b") as file:
                memory = mmap.mmap(file.fileno(), 0)
            part.rename(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        return cls(names, memory, len(head))

    @classmethod
    def open(cls, path: Path) -> SharedNumbers | None:
        """Return the numbers in this file; None if it does not exist."""
        try:
            with path.open("r+b") as file:
                memory = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError):
            return None
        names, start = _read_head(memory)
        return cls(names, memory, start)

    @classmethod
    def private(cls, names: Iterable[str]) -> SharedNumbers:
        """Return numbers that only this process sees."""
        names = tuple(names)
        return cls(names, mmap.mmap(-1, max(_WORD, _WORD * len(names))), 0)

    def place(self, name: str) -> int:
        """Return the index of `name` in `cells`."""
        return self._places[name]

    def get(self, name: str, default: float = 0.0) -> float:
        place = self._places.get(name)
        return default if place is None else self.cells[place]

    def set(self, name: str, value: float) -> None:
        self.cells[self._places[name]] = value

    def values(self) -> dict[str, float]:
        return dict(zip(self.names, self.cells.tolist(), strict=True))


class NumberFiles:
    """The shared numbers of all files in a folder whose names begin with `prefix`.

    A file that was replaced is opened again. A file that was deleted, for instance by a clean-up of the temporary folder, is still read,
    because its process continues to write it.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self._folder = folder
        self._prefix = prefix
        self._open: dict[str, tuple[int, SharedNumbers]] = {}  # inode

    def read(self) -> dict[str, dict[str, float]]:
        """Return the values of each file by the part of its name after the prefix, in order."""
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.startswith(self._prefix) and not entry.name.endswith(".part"):
                    name, inode = entry.name.removeprefix(self._prefix), entry.inode()
                    known = self._open.get(name)
                    is_new = known is None or known[0] != inode
                    if is_new and (numbers := SharedNumbers.open(Path(entry.path))) is not None:
                        self._open[name] = (inode, numbers)
        return {name: numbers.values() for name, (_, numbers) in sorted(self._open.items())}


def _head(names: tuple[str, ...]) -> bytes:
    text = json.dumps(names).encode()
    text += b" " * (-(len(_MAGIC) + _WORD + len(text)) % _WORD)  # so that the numbers are aligned
    return _MAGIC + len(text).to_bytes(_WORD, "little") + text


def _read_head(memory: mmap.mmap) -> tuple[list[str], int]:
    start = len(_MAGIC) + _WORD
    if memory[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"not a file of shared numbers: it begins with {memory[: len(_MAGIC)]!r}, not {_MAGIC!r}")
    end = start + int.from_bytes(memory[len(_MAGIC) : start], "little")
    return json.loads(memory[start:end]), end
