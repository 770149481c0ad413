"""A child's side of the supervisor: what it is told to be, how far it has come, and how it ends.

    if __name__ == "__main__":
        run_child(main)         # main(child: Child) -> None

No child outlives its supervisor: the kernel kills it (parent-death signal), set after exec and checked against the parent's pid.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from srt.managers.process.child_process import CHILD_FD, HTTP_FD, PARENT_PID
from srt.managers.process.heartbeats import BEAT_S as HEARTBEAT_S
from srt.managers.process.heartbeats import HeartbeatWriter
from srt.managers.process.runtime_switches import ControlWords
from srt.managers.process.tracer import Tracer
from srt.protocol.link_errors import LinkBroken, PeerGone
from srt.protocol.messages import (
    ChildStart,
    EngineReplaced,
    Failed,
    FromChild,
    Heartbeat,
    Progress,
    Ready,
    Scalar,
    ServerReady,
    Stop,
)
from srt.protocol.stream import MessageStream
from srt.utils.checkpoint import version_of
from srt.utils.errors import CheckpointChanged, StartError
from srt.utils.logs import set_up_logging

TENDINGS = 4  # of the tracer, between two heartbeats
OVERSLEPT_S = 2.0  # who wakes so much too late was stopped from outside
_PR_SET_PDEATHSIG = 1

logger = logging.getLogger(__name__)


class SupervisorGone(Exception):
    """The supervisor has ended, so this process must too."""


class Child:
    """This process's link to its supervisor. `send` and `report_*` may be called by any thread."""

    def __init__(self, stream: MessageStream, start: ChildStart, http_fd: int | None) -> None:
        self.start = start
        self.http_fd = http_fd
        self._stream = stream
        self.control = ControlWords.open(start.run_dir, start.args)
        self.tracer = Tracer(self.name, start.run_dir, self.control)

    @classmethod
    def from_environment(cls) -> Child:
        """Take over what the supervisor left in the environment. Ends the process if the supervisor is gone already."""
        number, parent_pid = os.environ.pop(CHILD_FD, None), os.environ.pop(PARENT_PID, None)
        if number is None or parent_pid is None:
            raise StartError("This module is a part of the server: start it with `python -m srt.launch_server`.")
        _die_with_parent(int(parent_pid))
        stream = MessageStream(_inherited_socket(int(number)), generation=None)
        try:
            start = stream.receive_blocking()
        except (PeerGone, LinkBroken) as error:
            raise SupervisorGone(str(error)) from error
        if not isinstance(start, ChildStart):
            raise SupervisorGone(f"the first message was {type(start).__name__}")
        http_fd = os.environ.pop(HTTP_FD, None)
        if http_fd is not None:
            os.set_inheritable(int(http_fd), False)
        return cls(stream, start, None if http_fd is None else int(http_fd))

    @property
    def name(self) -> str:
        return f"{self.start.role} {self.start.index}"

    def fileno(self) -> int:
        """Readable when `receive` has something to say. Call it until it returns None."""
        return self._stream.fileno()

    def receive(self) -> ServerReady | EngineReplaced | Stop | None:
        """The supervisor's next word if there is one; does not wait. SupervisorGone when it has ended."""
        try:
            message = self._stream.receive()
        except (PeerGone, LinkBroken) as error:
            raise SupervisorGone(str(error)) from error
        if message is None or isinstance(message, (ServerReady, EngineReplaced, Stop)):
            return message
        raise SupervisorGone(f"unexpected {type(message).__name__} from the supervisor")

    def send(self, message: FromChild) -> None:
        try:
            self._stream.send(message)
        except PeerGone as error:
            raise SupervisorGone(str(error)) from error

    def report_phase(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Say that `phase` begins now (or has come so far): a word for the display, and a line of the start-up report."""
        self.send(Progress(phase, done, total, time.monotonic()))

    def report_ready(self, values: dict[str, Scalar] | None = None) -> None:
        """Say that this process does its work from now on. `values` end up in the start-up report and /server_info."""
        self.send(Ready(values or {}))

    def start_heartbeats(
        self, progress_age_s: Callable[[], float] = lambda: 0.0, is_overdue: Callable[[], bool] = lambda: False
    ) -> None:
        """Send a Heartbeat every second, and leave the same where `/health` looks, from a thread of its own, until the process ends.

        From the first one on, the supervisor takes a long silence for the end of this process. `is_overdue`: this process waits for
        another one that should have answered.
        """
        threading.Thread(target=self._beat, args=(progress_age_s, is_overdue), name="heartbeat", daemon=True).start()

    def _beat(self, progress_age_s: Callable[[], float], is_overdue: Callable[[], bool]) -> None:
        heartbeat = HeartbeatWriter(self.start.run_dir, self.name)
        gc_freezes = self.control.gc_freezes
        awake = AwakeTime(time.monotonic())
        while True:
            now_s = time.monotonic()
            age_s = min(
                progress_age_s(), awake.seconds(now_s)
            )  # nobody makes progress while the whole process is stopped
            heartbeat.beat(now_s, age_s, is_overdue())
            try:
                self.send(Heartbeat(age_s))
            except SupervisorGone:
                return  # the main thread sees it too, and ends
            for _ in range(TENDINGS):
                self.tracer.tend()
                if self.control.gc_freezes != gc_freezes:
                    gc_freezes = self.control.gc_freezes
                    gc.collect()
                    gc.freeze()
                time.sleep(HEARTBEAT_S / TENDINGS)


class AwakeTime:
    """How long a process has run since something outside (a paused container, SIGSTOP) last stopped it: for ever, at first."""

    def __init__(self, now_s: float) -> None:
        self._since_s = float("-inf")
        self._last_s = now_s

    def seconds(self, now_s: float) -> float:
        """To be called every HEARTBEAT_S: a call that comes much later shows that the process was stopped."""
        if now_s - self._last_s > HEARTBEAT_S + OVERSLEPT_S:
            self._since_s = now_s
        self._last_s = now_s
        return now_s - self._since_s


def run_child(main: Callable[[Child], None]) -> NoReturn:
    """Run a child process from its first to its last moment: `main` returns, exit code 0; it raises, the supervisor learns why.

    SIGINT and SIGTERM are ignored: both reach a whole group of processes at times (a terminal, a service manager), and the order
    in which they end is the supervisor's business. It says Stop, and kills who does not listen.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        child = Child.from_environment()
    except SupervisorGone:
        _exit(1)
    except StartError as error:
        print(error, file=sys.stderr)  # noqa: T201 - a person started it by hand
        _exit(1)
    set_up_logging(child.name, child.start.args.log_level, child.start.args.log_format)
    try:
        _check_checkpoint(child.start)
        main(child)
    except SupervisorGone:
        _exit(1)
    except StartError as error:
        _say_last_word(child, str(error), is_final=isinstance(error, CheckpointChanged))
        _exit(1)
    except BaseException as error:  # the one place where everything ends: nothing may be lost
        if isinstance(error, SystemExit) and not error.code:
            _exit(0)
        logger.exception("This process ends.")
        _say_last_word(child, f"Internal error in {child.name}: {type(error).__name__}: {error}")
        _exit(1)
    _exit(0)


def _check_checkpoint(start: ChildStart) -> None:
    if start.checkpoint_version and version_of(start.model_folder) != start.checkpoint_version:
        raise CheckpointChanged(start.model_folder)


def _say_last_word(child: Child, sentence: str, is_final: bool = False) -> None:
    try:
        child.send(Failed(sentence, is_final))
    except SupervisorGone:
        logger.exception("Nobody could be told: %s", sentence)


def _exit(code: int) -> NoReturn:
    """End now: no forgotten thread or library may hold the process back."""
    with contextlib.suppress(OSError):  # nobody reads them any more
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _inherited_socket(number: int) -> socket.socket:
    sock = socket.socket(fileno=number)
    sock.set_inheritable(False)
    sock.setblocking(True)
    return sock


def _die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends; end at once if that has happened already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise StartError(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}.")
    if os.getppid() != parent_pid:
        os._exit(1)
