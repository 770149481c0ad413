"""Choose the folders for what libraries download or compile: their usual ones, unless those are not writable or were moved.

SRT_CACHE_DIR/huggingface   checkpoints (HF_HOME)
SRT_CACHE_DIR/triton        compiled kernels (TRITON_CACHE_DIR)
SRT_CACHE_DIR/inductor      compiled graphs (TORCHINDUCTOR_CACHE_DIR)
SRT_CACHE_DIR/cuda          kernels that the driver compiled (CUDA_CACHE_PATH)
SRT_CACHE_DIR/tokenizers    converted tokenizers (own_folder)
SRT_CACHE_DIR/kernels       compiled CUDA C++ kernels (own_folder)
SRT_CACHE_DIR/bytecode      Python bytecode, if Python keeps none beside its sources (own_folder)
SRT_CACHE_DIR               parent of the folder that flashinfer makes (FLASHINFER_WORKSPACE_BASE)
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from srt.utils.errors import StartError

VARIABLE = "SRT_CACHE_DIR"
FOLDERS = {
    "HF_HOME": "huggingface",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
    "FLASHINFER_WORKSPACE_BASE": ".",
}


def cache_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that move the libraries' caches; empty if the caches may stay where they are.

    A variable that the user has set is left out. StartError if no folder is writable.
    """
    chosen = environment.get(VARIABLE)
    if not chosen and _can_write(Path(environment.get("HOME") or "~").expanduser()):
        return {}
    base = _made(Path(chosen)) if chosen else _temporary()
    return {name: str(base / folder) for name, folder in FOLDERS.items() if name not in environment}


def own_folder(name: str, environment: Mapping[str, str]) -> Path:
    """Return our folder `name` among the caches, chosen by the same rule, and create it if needed. StartError if no folder is writable."""
    if chosen := environment.get(VARIABLE):
        return _made(_made(Path(chosen)) / name)
    home = Path(environment.get("HOME") or "~").expanduser()
    folder = Path(environment.get("XDG_CACHE_HOME") or home / ".cache") / "srt" / name
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK) and folder.stat().st_uid == os.getuid():
            return folder
    return _made(_temporary() / name)


def _can_write(home: Path) -> bool:
    """Return whether the cache folder in `home` is writable, even if it is a mount of its own in a read-only home."""
    cache = home / ".cache"
    return os.access(cache if cache.exists() else home, os.W_OK | os.X_OK)


def _made(base: Path) -> Path:
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(
            f"The folder {base} cannot be made: {error.strerror}. Name another one with {VARIABLE}."
        ) from error
    if not os.access(base, os.W_OK | os.X_OK):
        raise StartError(f"The folder {base} cannot be written to: name another one with {VARIABLE}.")
    return base.resolve()


def _temporary() -> Path:
    """Return the cache folder in /tmp that all servers of this user share; a fresh one if another user has taken its name."""
    base = Path(tempfile.gettempdir()) / f"srt-cache-{os.getuid()}"
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        status = base.lstat()
        is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
        return base if is_ours else Path(tempfile.mkdtemp(prefix=f"{base.name}-"))
    except OSError as error:
        raise StartError(
            f"Neither the home nor {tempfile.gettempdir()} can be written to: name a folder with {VARIABLE}."
        ) from error
