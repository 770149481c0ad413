"""The error raised by all code that reads a model: its configuration, its checkpoint, its path."""

from __future__ import annotations

from srt.utils.errors import StartError


class ModelError(StartError):
    """The model cannot be served as asked. The message is one sentence for the user that names the file, key or tensor."""
