"""The compiled forms of Python's sources, where Python would keep none: to compile those of torch takes 2 to 3 s of each start."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from srt.utils.cache_folders import own_folder

OFF, MOVED = "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"
HEAVIEST = "torch"  # of what is imported


def bytecode_environment(environment: Mapping[str, str], package: str = HEAVIEST) -> dict[str, str]:
    """The variables by which processes that are started from now on keep them among our caches. None where an installation has left
    them, or Python may write them: elsewhere it finds none then. What the user has moved stays."""
    spec = importlib.util.find_spec(package)
    if MOVED in environment or spec is None or spec.origin is None:
        return {}
    is_compiled = Path(importlib.util.cache_from_source(spec.origin)).exists()
    if is_compiled or (not environment.get(OFF) and os.access(Path(spec.origin).parent, os.W_OK)):
        return {}
    return {MOVED: str(own_folder("bytecode", environment)), OFF: ""}
