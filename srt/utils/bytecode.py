"""Keep Python's bytecode where Python itself would keep none: compiling torch's sources takes 2 to 3 s of each start."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from srt.utils.cache_folders import own_folder

OFF, MOVED = "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"
HEAVIEST = "torch"  # the imported package with the most sources


def bytecode_environment(environment: Mapping[str, str], package: str = HEAVIEST) -> dict[str, str]:
    """Return the variables that make processes started from now on keep bytecode in our cache folder.

    Empty if the installation already has bytecode or Python may write it, because Python would not look for it elsewhere any more;
    and empty if the user has already moved the bytecode.
    """
    spec = importlib.util.find_spec(package)
    if MOVED in environment or spec is None or spec.origin is None:
        return {}
    is_compiled = Path(importlib.util.cache_from_source(spec.origin)).exists()
    if is_compiled or (not environment.get(OFF) and os.access(Path(spec.origin).parent, os.W_OK)):
        return {}
    return {MOVED: str(own_folder("bytecode", environment)), OFF: ""}
