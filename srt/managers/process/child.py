"""A child's link to the supervisor: it receives its role, reports its progress, and ends with a reason.

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
from srt.managers.process.watchdog import OVERSLEPT_S
from srt.protocol.engine_work import WeightsSource
from srt.protocol.link_errors import LinkBroken, PeerGone
from srt.protocol.messages import (
    ChildStart,
    EngineLost,
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
from srt.utils.errors import CheckpointChanged, StartError, WeightsChanged
from srt.utils.logs import set_up_logging

TENDINGS = 4  # calls of the tracer's `tend` between two heartbeats
_PR_SET_PDEATHSIG = 1

logger = logging.getLogger(__name__)


class SupervisorGone(Exception):
    """Raised when the supervisor has ended, so this process must end too."""


class Child:
    """A child process's link to its supervisor. `send` and `report_*` may be called by any thread."""

    def __init__(self, stream: MessageStream, start: ChildStart, http_fd: int | None) -> None:
        self.start = start
        self.http_fd = http_fd
        self._stream = stream
        self.control = ControlWords.open(start.run_dir, start.args)
        self.tracer = Tracer(self.name, start.run_dir, self.control, replica=start.replica)

    @classmethod
    def from_environment(cls) -> Child:
        """Build the link from the environment that the supervisor set. Ends the process if the supervisor is gone already."""
        number, parent_pid = os.environ.pop(CHILD_FD, None), os.environ.pop(PARENT_PID, None)
        if number is None or parent_pid is None:
            raise StartError("This module is a part of the server: run `python -m srt.launch_server` instead.")
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
        """Return a descriptor that is readable when a message has come; then call `receive` until it returns None."""
        return self._stream.fileno()

    def receive(self) -> ServerReady | EngineReplaced | EngineLost | Stop | None:
        """Return the supervisor's next message, or None, without waiting. SupervisorGone when it has ended."""
        try:
            message = self._stream.receive()
        except (PeerGone, LinkBroken) as error:
            raise SupervisorGone(str(error)) from error
        if message is None or isinstance(message, (ServerReady, EngineReplaced, EngineLost, Stop)):
            return message
        raise SupervisorGone(f"the supervisor sent an unexpected {type(message).__name__}")

    def send(self, message: FromChild) -> None:
        try:
            self._stream.send(message)
        except PeerGone as error:
            raise SupervisorGone(str(error)) from error

    def report_phase(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Report that `phase` begins, or its progress: a word for the display, and an entry of the start-up report."""
        self.send(Progress(phase, done, total, time.monotonic()))

    def report_ready(self, values: dict[str, Scalar] | None = None) -> None:
        """Report that this process is ready for work. `values` appear in the start-up report and /server_info."""
        self.send(Ready(values or {}))

    def start_heartbeats(
        self, progress_age_s: Callable[[], float] = lambda: 0.0, is_overdue: Callable[[], bool] = lambda: False
    ) -> None:
        """Start a thread that sends a Heartbeat every second and writes it where `/health` reads it, until the process ends.

        From the first one on, the supervisor treats a long silence as the end of this process. `is_overdue`: this process waits for
        another one that should have answered.
        """
        heartbeat = HeartbeatWriter(self.start.run_dir, self.name)
        heartbeat.beat(time.monotonic())  # at once: a ready process must not be shown with its predecessor's pid
        words = heartbeat, progress_age_s, is_overdue
        threading.Thread(target=self._beat, args=words, name="heartbeat", daemon=True).start()

    def _beat(
        self, heartbeat: HeartbeatWriter, progress_age_s: Callable[[], float], is_overdue: Callable[[], bool]
    ) -> None:
        gc_freezes = self.control.gc_freezes
        awake = AwakeTime(time.monotonic())
        while True:
            now_s = time.monotonic()
            # No thread makes progress while the whole process is stopped, so that time does not count.
            age_s = min(progress_age_s(), awake.seconds(now_s))
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
    """Time that a process has run since it was last stopped from outside (a paused container, SIGSTOP); infinite until the first stop."""

    def __init__(self, now_s: float) -> None:
        self._since_s = float("-inf")
        self._last_s = now_s

    def seconds(self, now_s: float) -> float:
        """Return the seconds since the last stop. Call this every HEARTBEAT_S: a much later call shows that the process was stopped."""
        if now_s - self._last_s > HEARTBEAT_S + OVERSLEPT_S:
            self._since_s = now_s
        self._last_s = now_s
        return now_s - self._since_s


def run_child(main: Callable[[Child], None]) -> NoReturn:
    """Run a child process: exit code 0 when `main` returns; if it raises, the supervisor is told why.

    SIGINT and SIGTERM are ignored: a terminal or a service manager may send them to a whole group of processes, and the supervisor
    decides in which order these end. It sends Stop, and kills a child that does not follow.
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
        _say_last_word(child, str(error), is_final=isinstance(error, CheckpointChanged | WeightsChanged))
        _exit(1)
    except BaseException as error:  # the last place that can report an error: none may be lost
        if isinstance(error, SystemExit) and not error.code:
            _exit(0)
        logger.exception("This process ends because of an internal error.")
        _say_last_word(child, f"Internal error in {child.name}: {type(error).__name__}: {error}")
        _exit(1)
    _exit(0)


def _check_checkpoint(start: ChildStart) -> None:
    """Raise CheckpointChanged or WeightsChanged, after which nothing is replaced any more, if files are not what its predecessor read."""
    weights = start.ledger.weights
    if weights is not None and start.role == "worker" and not _are_unchanged(weights):
        raise WeightsChanged(weights.folder)
    # Where the weights came from another folder, this one still has the tokenizer and the configuration.
    is_replaced = weights is not None and weights.folder == start.model_folder
    if start.checkpoint_version and not is_replaced and version_of(start.model_folder) != start.checkpoint_version:
        raise CheckpointChanged(start.model_folder)


def _are_unchanged(weights: WeightsSource) -> bool:
    return bool(weights.folder) and version_of(weights.folder) == weights.files


def _say_last_word(child: Child, sentence: str, is_final: bool = False) -> None:
    try:
        child.send(Failed(sentence, is_final))
    except SupervisorGone:
        logger.exception("The supervisor has ended and could not be told: %s", sentence)


def _exit(code: int) -> NoReturn:
    """End the process at once, so that no forgotten thread or library holds it back."""
    with contextlib.suppress(OSError):  # the other end may be closed
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
