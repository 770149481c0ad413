"""Signals as bytes on a socket, so that one selector waits for them and for everything else."""

from __future__ import annotations

import signal
import socket
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class SignalPipe:
    """A pipe of received signals. Once it is made, stop signals and SIGCHLD only appear here. Main thread only."""

    def __init__(self) -> None:
        self._read, write = socket.socketpair()
        self._write = write
        self._read.setblocking(False)
        write.setblocking(False)
        signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            # nohup starts us with SIGHUP ignored: leave it so.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, _do_nothing)

    def fileno(self) -> int:
        return self._read.fileno()

    def drain(self) -> list[signal.Signals]:
        """Return the signals that came since the last call."""
        try:
            return [signal.Signals(number) for number in self._read.recv(4096)]
        except BlockingIOError:
            return []


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing: a handler must exist for the wake-up byte to be written."""
