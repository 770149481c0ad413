"""Named numbers that one process writes and any other of the same host reads, in a file that both have mapped.

Writing one is a store to memory and reading one a load: nobody waits, whatever the other is doing, or if it has stopped.
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
    """float64 each, all 0 at first. Names are fixed when the file is made."""

    def __init__(self, names: Sequence[str], memory: mmap.mmap, start: int) -> None:
        """Use `fresh`, `create`, `open` or `private`."""
        self.names = tuple(names)
        self.cells = memoryview(memory)[start : start + _WORD * len(self.names)].cast("d")
        self._places = {name: place for place, name in enumerate(self.names)}

    @classmethod
    def fresh(cls, path: Path, names: Iterable[str]) -> SharedNumbers:
        """`create`. Where there is no room for a new file, the one of the process whose place this one takes, if it has the same names:
        all others would go on reading that. Else nobody else sees them."""
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
        """A new file, or one that takes the place of an older one: whoever has that open goes on reading its last values. OSError, and
        nothing new, if there is no room for it."""
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
        """None if there is no such file."""
        try:
            with path.open("r+b") as file:
                memory = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError):
            return None
        names, start = _read_head(memory)
        return cls(names, memory, start)

    @classmethod
    def private(cls, names: Iterable[str]) -> SharedNumbers:
        """The same for nobody else."""
        names = tuple(names)
        return cls(names, mmap.mmap(-1, max(_WORD, _WORD * len(names))), 0)

    def place(self, name: str) -> int:
        """Where in `cells` it is."""
        return self._places[name]

    def get(self, name: str, default: float = 0.0) -> float:
        place = self._places.get(name)
        return default if place is None else self.cells[place]

    def set(self, name: str, value: float) -> None:
        self.cells[self._places[name]] = value

    def values(self) -> dict[str, float]:
        return dict(zip(self.names, self.cells.tolist(), strict=True))


class NumberFiles:
    """All files of a folder whose names begin alike. One that was replaced is opened anew; one that was deleted, by who tidies up the
    folder of temporary files, is read on: its process goes on writing it."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self._folder = folder
        self._prefix = prefix
        self._open: dict[str, tuple[int, SharedNumbers]] = {}  # inode

    def read(self) -> dict[str, dict[str, float]]:
        """By what follows the prefix in the file's name, in order."""
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
        raise ValueError("this is no file of shared numbers")
    end = start + int.from_bytes(memory[len(_MAGIC) : start], "little")
    return json.loads(memory[start:end]), end
