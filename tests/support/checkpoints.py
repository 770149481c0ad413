"""Random checkpoints for tests: each is written once and shared by whoever asks for the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.random_checkpoint import CheckpointSpec, write_random_checkpoint

SMALL: dict[str, Any] = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 512}
"""The shape unless a test says otherwise: large enough for grouped queries and two ranks, small enough to be quick."""


class CheckpointFactory:
    """Called with a family and fields of `CheckpointSpec`; equal calls return the same folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._written: dict[str, Path] = {}

    def __call__(self, family: str = "qwen3", **fields: Any) -> Path:
        spec = CheckpointSpec(family=family, **{**SMALL, **fields})
        key = repr(spec)
        if key not in self._written:
            folder = self._root / f"{family}-{len(self._written)}"
            write_random_checkpoint(folder, spec)
            self._written[key] = folder
        return self._written[key]
