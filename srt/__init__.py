"""srt: a serving runtime for large language models.

Importing this package is cheap: neither torch nor any of the processes' code is loaded before it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from srt.runtime import Runtime

__all__ = ["Runtime", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Load `Runtime` at its first use, so that `import srt` stays free of the engine."""
    if name == "Runtime":
        # By name, not by an import statement: otherwise every module that reads the version would depend on Runtime.
        return importlib.import_module("srt.runtime").Runtime
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
