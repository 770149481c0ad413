"""The options of a server as actors on other nodes can use them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from srt.server_args import SECRETS, ServerArgs

# What only the process with the HTTP port needs: it must not travel.
OF_HTTP = (*SECRETS, "ssl_certfile", "ssl_keyfile")
PATHS = ("model_path", "tokenizer_path", "speculative_draft_model_path", "quantization_param_path", "download_dir")


def with_whole_paths(args: ServerArgs) -> ServerArgs:
    """Return the options with whole paths of folders and files, because actors have another current folder."""
    given = {name: getattr(args, name) for name in PATHS}
    whole: dict[str, Any] = {
        name: str(Path(path).absolute()) for name, path in given.items() if path and Path(path).exists()
    }
    return replace(args, **whole)


def without_http(args: ServerArgs) -> ServerArgs:
    """Return the options of a host that has no HTTP port: no keys of clients, and no certificate."""
    none: dict[str, Any] = dict.fromkeys(OF_HTTP)
    return replace(args, **none)
