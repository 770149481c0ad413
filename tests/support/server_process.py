"""A server as tests see it from outside: its output, its processes and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

END_S = 60.0  # far more than any end takes; reached only when something hangs
ROOT = Path(__file__).resolve().parents[2]


class ServerProcess:
    """`python -m MODULE WORDS…`, with its own temporary folder. Leaves nothing behind when the block ends.

    It sees this process's environment and `environment`; with `is_alone` nothing but the latter.
    """

    def __init__(
        self,
        module: str,
        words: Sequence[str],
        tmp: Path,
        environment: Mapping[str, str] | None = None,
        *,
        cwd: Path = ROOT,
        is_alone: bool = False,
        python: Path = Path(sys.executable),
    ) -> None:
        self.tmp = tmp
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._ended = False
        self.popen = subprocess.Popen(
            [str(python), "-m", module, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd,
            env={**({} if is_alone else os.environ), "TMPDIR": str(tmp), **(environment or {})},
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def lines(self) -> list[str]:
        return list(self._lines)

    def wait_for(self, text: str, number: int = 1) -> str:
        """The first line of output that holds `text`, or the one of that number; an error if the server ends without it."""
        with self._news:
            self._news.wait_for(lambda: self._ended or len(self.lines_with(text)) >= number, END_S)
            found = self.lines_with(text)
            if len(found) >= number:
                return found[number - 1]
        raise AssertionError(f"no {text!r} in:\n" + "\n".join(self._lines))

    def lines_with(self, text: str) -> list[str]:
        return [line for line in self._lines if text in line]

    def wait_ready(self) -> str:
        """The URL of the server, when it is ready."""
        return self.wait_for("Ready at ").split("Ready at ")[1].split()[0]

    def children(self) -> list[psutil.Process]:
        children: list[psutil.Process] = psutil.Process(self.pid).children(recursive=True)
        return children

    def started(self) -> list[psutil.Process]:
        """Its own children. One of them that forks looks like two for a moment, and frontends start others."""
        started: list[psutil.Process] = psutil.Process(self.pid).children()
        return started

    def left_behind(self) -> list[Path]:
        """In the temporary folder; but for the last log lines, which are kept on purpose."""
        return [path for path in self.tmp.glob("*srt-*") if not path.name.startswith("srt-logs-")]

    def send(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def wait(self) -> int:
        """The exit code; all output is in `lines` then."""
        code = self.popen.wait(END_S)
        self._reader.join(END_S)  # the pipe closes with the last process that holds it
        assert not self._reader.is_alive(), "a process of the server still holds its output"
        return code

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        if self.popen.poll() is None:
            left = self.children()
            self.popen.kill()
            assert all_gone(left)
        self.popen.wait(END_S)
        self._reader.join(END_S)
        assert self.popen.stdout is not None
        self.popen.stdout.close()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            with self._news:
                self._lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()


def all_gone(processes: Sequence[psutil.Process]) -> bool:
    """Whether all of them end; waits for it."""
    _, alive = psutil.wait_procs(processes, timeout=END_S)
    return not alive
