"""The adapters that a server knows by name, in a file of its run folder.

All frontends read and write this file, so it outlives any of them. Engines need not know it: a request carries its adapter's folder and
hash, and so a replaced worker loads what the requests that go on bring.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from srt.lora.adapter_files import AdapterLimits, content_hash, read_adapter
from srt.lora.resource import AdapterContent, resource_of
from srt.protocol.messages import PinResources, Resource
from srt.server_args import ServerArgs
from srt.utils.model_config import ModelConfig
from srt.utils.model_error import ModelError

FILE: Final = "adapters.json"
MOST_NAME_CHARS: Final = 256


class KnownAdapter(msgspec.Struct, frozen=True):
    """An adapter under one name."""

    folder: str
    content_hash: str
    created: int
    """Seconds since the epoch."""
    is_pinned: bool = False
    """Whether the workers hold it always."""

    @property
    def resource(self) -> Resource:
        return resource_of(AdapterContent(self.folder, self.content_hash))


class _Content(msgspec.Struct):
    adapters: dict[str, KnownAdapter] = {}
    version: int = 0
    """The number of changes."""


class AdapterNames:
    """The names of one server. Every frontend has an object for the same file."""

    def __init__(
        self, run_dir: str | Path, limits: AdapterLimits, now: Callable[[], float], most_pinned: int = 0
    ) -> None:
        self._file = Path(run_dir, FILE)
        self._limits = limits
        self._now = now
        self._most_pinned = most_pinned
        self._state: tuple[int, int] | None = None  # of the file as it was read last
        self._content = _Content()
        self._resources: dict[str, Resource] = {}
        self._lock = threading.Lock()  # changes of one frontend: the file's lock belongs to the whole process

    def begin(self, folders: dict[str, str]) -> None:
        """Write the adapters that are served from the start, unless another frontend, or an earlier one, has done so."""
        with self._changing() as content:
            if not self._file.exists():
                for name, folder in folders.items():
                    content.adapters[name] = self._read(folder)

    def all(self) -> dict[str, KnownAdapter]:
        """Return all adapters by name, in the order in which they came."""
        self._refresh()
        return dict(self._content.adapters)

    def find(self, name: str) -> Resource | None:
        """Return what requests for this adapter need on the workers; None if the name is not known."""
        self._refresh()
        resource = self._resources.get(name)
        if resource is None and (known := self._content.adapters.get(name)) is not None:
            resource = self._resources[name] = known.resource
        return resource

    def pinned(self) -> PinResources:
        """Return what tells a scheduler which adapters are pinned."""
        self._refresh()
        adapters = self._content.adapters.values()
        return PinResources(self._content.version, [known.resource for known in adapters if known.is_pinned])

    def add(self, name: str, folder: str, *, is_pinned: bool = False) -> None:
        """Read, check and add an adapter; under a name that is known, it replaces the other one for later requests.

        Reads all of its files. ModelError, with a sentence, if it cannot be served.
        """
        if not name or len(name) > MOST_NAME_CHARS or not name.isprintable():
            raise ModelError(f"The name of an adapter must have 1 to {MOST_NAME_CHARS} printable characters.")
        known = msgspec.structs.replace(self._read(folder), is_pinned=is_pinned)
        with self._changing() as content:
            others = {other for other, one in content.adapters.items() if one.is_pinned and other != name}
            if is_pinned and len(others) >= self._most_pinned:
                raise ModelError(
                    f"{len(others)} adapters are pinned, and one of the {self._most_pinned + 1} places (--max-loras-per-batch) must"
                    " stay free for others: unload one of them, or load it again without pinned."
                )
            content.adapters.pop(name, None)
            content.adapters[name] = known

    def remove(self, name: str) -> bool:
        """Forget a name, and return whether it was known. Requests that run go on."""
        with self._changing() as content:
            return content.adapters.pop(name, None) is not None

    def _read(self, folder: str) -> KnownAdapter:
        path = Path(folder).expanduser().absolute()
        read_adapter(path, self._limits)
        return KnownAdapter(str(path), content_hash(path), int(self._now()))

    @contextmanager
    def _changing(self) -> Iterator[_Content]:
        """Let the caller change the content, and write it, while nobody else does."""
        with self._lock, self._file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            content = self._load()
            content.version += 1
            yield content
            new = self._file.with_suffix(".new")
            new.write_bytes(msgspec.json.encode(content))
            new.replace(self._file)

    def _load(self) -> _Content:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=_Content)
        except FileNotFoundError:
            return _Content()

    def _refresh(self) -> None:
        """Read the file again if it has changed: each change makes a new file."""
        try:
            stat = os.stat(self._file)
        except FileNotFoundError:
            return
        state = stat.st_ino, stat.st_mtime_ns
        if state != self._state:
            self._state, self._content, self._resources = state, self._load(), {}


def open_names(run_dir: str, model_folder: str, args: ServerArgs) -> AdapterNames | None:
    """Return the adapters of a server, which are read and checked by the first of its frontends; None if it serves none."""
    limits = AdapterLimits.of(args, ModelConfig.served_from(model_folder, args)) if args.serves_adapters else None
    if limits is None:
        return None
    names = AdapterNames(run_dir, limits, time.time, args.max_loras_per_batch - 1)
    names.begin(args.adapter_paths())
    return names
