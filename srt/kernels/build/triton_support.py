"""What the kernels need to know about Triton: whether it can run here, and in which arithmetic.

Importing this module does not import Triton, which is not there on every host.
"""

from __future__ import annotations

import importlib.util
import os

from srt.utils.errors import StartError


def require_triton(device_type: str) -> None:
    """Raise StartError where Triton cannot run. To be asked before anything that imports Triton is imported."""
    reason = why_triton_cannot_run(device_type)
    if reason is not None:
        raise StartError(reason)


def why_triton_cannot_run(device_type: str) -> str | None:
    """One sentence for the user who asked for Triton on `device_type` where it cannot run; None where it can."""
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
    """Whether the environment asks for Triton's interpreter. It counts from before Triton is first imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
