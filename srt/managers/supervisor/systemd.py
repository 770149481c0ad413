"""Notifications to systemd (sd_notify): ready, stopping, alive. Without `NOTIFY_SOCKET` nothing is sent."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import MutableMapping


class ServiceManager:
    """Sender to `NOTIFY_SOCKET`. It removes systemd's variables from the environment, so that children do not notify."""

    def __init__(self, environment: MutableMapping[str, str] | None = None) -> None:
        environment = os.environ if environment is None else environment
        address = environment.pop("NOTIFY_SOCKET", "")
        usec, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        is_for_us = usec.isdigit() and pid in ("", str(os.getpid()))
        self._beat_s = int(usec) / 2e6 if is_for_us else None
        self._next_beat_s = float("-inf")

    def ready(self, status: str) -> None:
        self._notify(f"READY=1\nSTATUS={status}")

    def stopping(self) -> None:
        self._notify("STOPPING=1\nSTATUS=Stopping")

    def failed(self, sentence: str) -> None:
        self._notify(f"STATUS={sentence}")

    def beat(self, now_s: float) -> None:
        """Send a sign of life when one is due. Call this more often than every half of systemd's watchdog time."""
        if self._beat_s is not None and now_s >= self._next_beat_s:
            self._next_beat_s = now_s + self._beat_s / 2
            self._notify("WATCHDOG=1")

    def _notify(self, state: str) -> None:
        if self._address:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.sendto(state.encode(), self._address)
