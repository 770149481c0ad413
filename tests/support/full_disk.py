"""A disk on which there is no room any more."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on files can be made, and nothing can be written to them."""

    def write_bytes(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
