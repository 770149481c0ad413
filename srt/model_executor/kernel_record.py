"""Whose kernels are all among the caches: a start like an earlier one need not go through all graphs to look for more."""

from __future__ import annotations

import contextlib
import hashlib
import os
from functools import cache
from pathlib import Path

import torch

import srt.kernels
from srt.utils.cache_folders import own_folder
from srt.utils.errors import StartError


class KernelRecord:
    """An empty file for each configuration whose graphs were all captured here, by these kernels' sources.

    Where it is wrong, kernels are compiled when they are first launched.
    """

    def __init__(self, device: torch.device, configuration: object) -> None:
        self._device = device
        self._configuration = configuration

    @property
    def is_complete(self) -> bool:
        return self._path.exists()

    def note_complete(self) -> None:
        with contextlib.suppress(OSError, StartError):
            self._path.touch()

    @property
    def _path(self) -> Path:
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else self._device.type
        key = repr((self._configuration, name, torch.__version__, _sources()))
        return own_folder("kernels", os.environ) / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.complete"


@cache
def _sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(*srt.kernels.__path__).iterdir()):
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()
