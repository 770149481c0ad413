"""srt: a serving runtime for large language models.

Importing this package is cheap: torch and the code of the processes are loaded only when used.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from srt.utils.compiled import install_finder
from srt.version import __version__

if TYPE_CHECKING:
    from srt.managers.tokenizer_manager.api_types import EngineDied, RequestError
    from srt.runtime import Engine, Runtime
    from srt.server_args import ArgumentError
    from srt.utils.errors import StartError

__all__ = ["ArgumentError", "Engine", "EngineDied", "RequestError", "Runtime", "StartError", "__version__"]

_HOME: Mapping[str, str] = MappingProxyType(
    {
        "ArgumentError": "srt.server_args",
        "Engine": "srt.runtime",
        "EngineDied": "srt.managers.tokenizer_manager.api_types",
        "RequestError": "srt.managers.tokenizer_manager.api_types",
        "Runtime": "srt.runtime",
        "StartError": "srt.utils.errors",
    }
)

install_finder()


def __getattr__(name: str) -> Any:
    """Load `Runtime` and its errors at their first use, so that `import srt` does not load the engine."""
    # Imported by name: with an import statement every module would depend on Runtime, since each imports this package.
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
