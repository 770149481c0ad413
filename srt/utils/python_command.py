"""The command that starts one of our modules as a process."""

from __future__ import annotations

import os
import site
import sys
from pathlib import Path


def python_command(module: str) -> list[str]:
    """Return the command that runs one of our modules. -P: a file in the user's folder named like a library must not be imported."""
    return [sys.executable, "-P", "-m", module]


def module_path() -> dict[str, str]:
    """Return the PYTHONPATH with which `python_command` finds this package if it runs from a folder without being installed."""
    root = str(Path(__file__).resolve().parents[2])
    if root in site.getsitepackages():
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), root]))}
