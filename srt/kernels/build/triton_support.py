"""Check whether Triton can run here.

Importing this module does not import Triton, which is not installed on every host.
"""

from __future__ import annotations

import importlib.util
import os

from srt.utils.errors import StartError


def require_triton(device_type: str) -> None:
    """Raise StartError if Triton cannot run. Call it before importing anything that imports Triton."""
    reason = why_triton_cannot_run(device_type)
    if reason is not None:
        raise StartError(reason)


def why_triton_cannot_run(device_type: str) -> str | None:
    """Return one sentence for the user that says why Triton cannot run on `device_type`; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return (
            "--attention-backend triton needs the Python package triton, which is not installed; "
            "install it, or choose --attention-backend torch_native"
        )
    if device_type not in ("cpu", "cuda"):
        return f"--attention-backend triton runs on CUDA devices, not on {device_type!r}"
    if device_type == "cpu" and not is_interpreter_requested():
        return (
            "--attention-backend triton needs a CUDA device; on a CPU it runs only in Triton's interpreter, for tests "
            "(TRITON_INTERPRET=1): choose --attention-backend torch_native"
        )
    return None


def is_interpreter_requested() -> bool:
    """Return whether the environment asks for Triton's interpreter, which must be set before Triton is first imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
