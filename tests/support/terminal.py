"""A program on a terminal of its own, as a person at a keyboard sees it: Ctrl-C is a key, and what is typed is echoed."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence

import psutil

from tests.support.server_process import ROOT

DEADLINE_S = 60.0
CTRL_D, UP = "\x04", "\x1b[A"
_TAKE_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)  # whoever started the tests may ignore it, as a shell's background jobs do
os.execv(sys.argv[1], sys.argv[1:])
"""
_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """`python -m WORDS…`. Ends with the block at the latest."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._leader, follower = pty.openpty()
        self._seen = ""
        self._read_up_to = 0
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, sys.executable, "-m", *words],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            start_new_session=True,
            cwd=ROOT,
            env={**os.environ, "TERM": "xterm", **(environment or {})},
        )
        os.close(follower)

    def type(self, keys: str) -> None:
        os.write(self._leader, keys.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C when the program waits for something: a moment before, the interpreter takes note of it and still waits."""
        process = psutil.Process(self.process.pid)
        while process.status() != psutil.STATUS_SLEEPING:
            pass
        self.type("\x03")

    def until(self, text: str) -> str:
        """What appears from here up to and with `text`."""
        while (at := self._screen.find(text, self._read_up_to)) < 0:
            if not self._read_more():
                raise AssertionError(f"no {text!r} in {self._screen[self._read_up_to :]!r}")
        before, self._read_up_to = self._read_up_to, at + len(text)
        return self._screen[before : self._read_up_to]

    def end(self) -> int:
        """The exit code, when the program has ended."""
        while self._read_more():
            pass
        return self.process.wait(DEADLINE_S)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_S)
        os.close(self._leader)

    @property
    def _screen(self) -> str:
        return _CODES.sub("", self._seen)

    def _read_more(self) -> bool:
        """False at the end of all output."""
        ready, _, _ = select.select([self._leader], [], [], DEADLINE_S)
        assert ready, f"nothing came after {self._screen!r}"
        try:
            data = os.read(self._leader, 4096)
        except OSError:  # the last process that had the terminal has gone
            return False
        self._seen += data.decode(errors="replace")
        return bool(data)
