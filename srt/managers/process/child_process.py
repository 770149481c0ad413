"""Start of a child process: it runs a Python module and inherits one end of a socketpair (frontends also the listening socket).

`environment_of` also sets how many threads a worker's operations use on a CPU.

Free of the wire format, so that the children are starting before the supervisor has loaded it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from srt.utils.errors import StartError
from srt.utils.python_command import module_path, python_command

# Environment variables of a child.
CHILD_FD = "SRT_CHILD_FD"  # its end of the socketpair
PARENT_PID = "SRT_PARENT_PID"
HTTP_FD = "SRT_HTTP_FD"  # the listening socket, for frontends
# Environment variable of a supervisor that a Runtime started: its end of the lifeline.
LIFELINE_FD = "SRT_LIFELINE_FD"

MODULES = {
    "frontend": "srt.entrypoints.http_server",
    "scheduler": "srt.managers.scheduler",
    "worker": "srt.managers.tp_worker",
}


FEW_CORES = 4  # a rank with fewer computes on all of them


@dataclass(frozen=True, slots=True)
class ChildKey:
    """A place in the server: `worker` 1, `frontend` 0, `scheduler` 0."""

    role: str
    index: int
    replica: int = 0  # that it is a part of; a frontend serves all of them, and has 0 here

    def __str__(self) -> str:
        return f"{self.role} {self.index}"


@dataclass(frozen=True, slots=True)
class ChildProcess:
    """A started child, and the supervisor's end of its link."""

    key: ChildKey
    popen: subprocess.Popen[bytes]
    socket: socket.socket
    spawned_s: float  # CLOCK_MONOTONIC

    def bury(self, status: int) -> int:
        """Record how this process has ended, which was reaped with `status`, and end the helpers it started. Return the exit code."""
        self.popen.returncode = os.waitstatus_to_exitcode(status)  # so that Popen does not wait for it as well
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        return self.popen.returncode


def reap() -> Iterator[tuple[int, int]]:
    """Reap every process that has ended, unknown ones too, because PID 1 inherits orphans: yield its pid and status."""
    with contextlib.suppress(ChildProcessError):  # there is no child
        while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
            yield ended


def spawn(key: ChildKey, module: str, environment: Mapping[str, str], listener: socket.socket | None) -> ChildProcess:
    """Start the child's module. Call from the main thread only: the parent-death signal fires when the thread that started a child ends.

    The child gets a session of its own, so a terminal's Ctrl-C does not reach it.
    """
    variables = {**environment, PARENT_PID: str(os.getpid())}
    if listener:
        variables[HTTP_FD] = str(listener.fileno())
    spawned_s = time.monotonic()
    inherited = [listener.fileno()] if listener else []
    popen, link = start_linked(f"The {key}", module, CHILD_FD, variables, inherited, sys.stderr.fileno())
    return ChildProcess(key, popen, link, spawned_s)


def start_linked(
    name: str,
    module: str,
    link_variable: str,
    environment: Mapping[str, str] = MappingProxyType({}),
    inherited: Sequence[int] = (),
    stdout: int | None = None,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a module in a session of its own, with one end of a socketpair, whose number is in `link_variable`. Return our end too.

    StartError that begins with `name` if that is not possible.
    """
    try:
        ours, theirs = socket.socketpair()
    except OSError as error:
        raise StartError(f"{name} could not be started: {error.strerror}.") from error
    try:
        popen = subprocess.Popen(
            python_command(module),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            env={**os.environ, **module_path(), **environment, link_variable: str(theirs.fileno())},
            pass_fds=[theirs.fileno(), *inherited],
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        raise StartError(f"{name} could not be started: {error.strerror}.") from error
    finally:
        theirs.close()
    return popen, ours


def _torch_threads(cores: int) -> int:
    """Return the number of torch threads for a rank with `cores` cores: one core stays free for other threads, if it can be spared."""
    return max(1, cores if cores < FEW_CORES else cores - 1)


def environment_of(role: str, num_workers: int, num_processes: int, cores: int) -> dict[str, str]:
    """Return the variables that must be set before the child's libraries are loaded, except those that the user has set."""
    wanted = {
        "OPENBLAS_NUM_THREADS": "1"
    }  # numpy's pool of threads costs start-up time, and we multiply nothing with it
    if role == "worker":
        wanted["OMP_NUM_THREADS"] = str(_torch_threads(cores // num_workers))
        if cores < num_processes + 2 and "OMP_WAIT_POLICY" not in os.environ:
            wanted["OMP_WAIT_POLICY"] = "PASSIVE"  # a thread that spins takes the core of a process that has work
            wanted["GOMP_SPINCOUNT"] = "10000"  # but it may for 0.1 ms, about what waking it takes
    return {name: value for name, value in wanted.items() if name not in os.environ}
