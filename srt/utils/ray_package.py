"""Whether the package of Ray, which only some servers need, is there; it is not imported for that."""

from __future__ import annotations

import importlib.util

from srt.utils.errors import StartError


def check_ray_installed() -> None:
    """Raise StartError with the command that installs Ray, if it is missing."""
    spec = importlib.util.find_spec("ray")
    if spec is None or spec.origin is None:  # a mere folder of that name, as Ray itself makes one in /tmp
        raise StartError("Ray is not installed: run pip install 'srt-serve[ray]', on every node of the cluster.")
