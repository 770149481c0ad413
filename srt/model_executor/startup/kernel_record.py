"""Record for which configurations all kernels are in the caches, so that a later start need not look for missing ones.

Importing this module imports Triton.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from functools import cache
from pathlib import Path

import torch
import triton
from triton import knobs

import srt
from srt.server_args import MEMORY, SPECULATION, ServerArgs
from srt.utils.cache_folders import own_folder
from srt.utils.errors import StartError
from srt.utils.lora_options import LORA
from srt.utils.rank_options import DEVICE

SOURCES = (".py", ".cu", ".cuh", ".h")
ELSEWHERE = (  # options that do not change the kernels
    "base_gpu_id",
    "random_seed",
    "speculative_draft_model_path",
    "speculative_ngram_min_match_window_size",
)


class KernelRecord:
    """An empty file in each folder of kernels, for each configuration whose kernels were all compiled from the present sources.

    If a record is wrong, the missing kernels are compiled at their first launch.
    """

    def __init__(self, args: ServerArgs, model: object, rank: int, device: torch.device) -> None:
        options = [
            (field.name, getattr(args, field.name))
            for field in dataclasses.fields(args)
            if field.metadata["group"] in (MEMORY, SPECULATION, DEVICE, LORA) and field.name not in ELSEWHERE
        ]
        self._key = repr((options, model, rank, _name_of(device), torch.__version__, triton.__version__))

    @property
    def is_complete(self) -> bool:
        with contextlib.suppress(OSError, StartError):
            return all(path.exists() for path in self._paths)
        return False

    def record_complete(self) -> None:
        with contextlib.suppress(OSError, StartError):
            for path in self._paths:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()

    @property
    def _paths(self) -> list[Path]:
        """One file in each folder, so that removing or moving a folder of kernels removes the record too."""
        name = hashlib.sha256(f"{self._key} {_sources()}".encode()).hexdigest()[:32]
        return [folder / f"{name}.complete" for folder in (Path(knobs.cache.dir), own_folder("kernels", os.environ))]


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@cache
def _sources() -> str:
    """Return a hash of all our sources: layers and models decide which kernels are launched, and with which arguments."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in srt.__path__ for path in Path(folder).rglob("*") if path.suffix in SOURCES):
        digest.update(path.read_bytes())
    return digest.hexdigest()
