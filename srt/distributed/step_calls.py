"""Calls between workers that run steps together: one that begins a step calls the others, which may be idle.

Each worker listens at a Unix socket of its own in the run folder, and a thread of it hears calls at any time. A call is the number of a
step. Late calls are harmless, because all workers count steps alike.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from srt.distributed.errors import CollectiveError

CALL_BYTES: Final = 8


class StepCalls:
    """The calls that this worker makes and hears."""

    def __init__(self, own_path: str, timeout_s: float) -> None:
        """Listen at `own_path`. A worker that does not hear a call for `timeout_s` counts as lost."""
        self.latest = -1
        """The number of the last step that another worker has begun, as far as this one has heard."""
        self._on_call: Callable[[], None] = lambda: None
        self._path = Path(own_path)
        self._path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(own_path)
        self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sender.settimeout(timeout_s)
        self._thread = threading.Thread(target=self._listen, name="calls to steps", daemon=True)
        self._thread.start()

    def notify(self, on_call: Callable[[], None]) -> None:
        """Let a thread call `on_call` after each call that it hears, and once now, for calls that came before."""
        self._on_call = on_call
        on_call()

    def call(self, step: int, paths: Sequence[str]) -> None:
        """Tell the workers that listen at these paths that this one begins a step. CollectiveError if one of them has ended."""
        for path in paths:
            try:
                self._sender.sendto(step.to_bytes(CALL_BYTES, "little"), path)
            except OSError as error:
                reason = error.strerror or error  # a time-out has no strerror
                raise CollectiveError(f"{Path(path).name} does not hear calls to steps: {reason}") from error

    def close(self) -> None:
        """Hear no more calls. May be called twice."""
        self._path.unlink(missing_ok=True)
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
        self._thread.join()
        self._socket.close()
        self._sender.close()

    def _listen(self) -> None:
        while said := self._socket.recv(CALL_BYTES):
            self.latest = max(self.latest, int.from_bytes(said, "little"))
            self._on_call()
