"""The engine's supervisor as a child process of a Runtime. It ends when its lifeline, a socket to the Runtime, is closed.

A parent-death signal would not do: it fires when the thread that made the Runtime ends. The engine runs in its own session, so a Ctrl-C
in the user's terminal reaches only the user's program.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import weakref

from srt.managers.process.child_process import LIFELINE_FD, start_linked
from srt.protocol.link_errors import LinkBroken, PeerGone
from srt.protocol.messages import EngineLost, EngineReplaced, EngineStart, EngineStarted, Failed, ServerReady, Stop
from srt.protocol.stream import MessageStream
from srt.server_args import ServerArgs
from srt.utils.errors import StartError

STOP_GRACE_S = 1.0
STOP_WAIT_S = 15.0  # the supervisor's own deadlines are shorter
ENDED = "The engine has ended."


class EngineProcess:
    """The supervisor's process and its lifeline; constructing it starts the process.

    Methods may be called from any thread, but `receive` from one at a time.
    """

    def __init__(self, args: ServerArgs, *, http: bool, secret: bytes | None = None) -> None:
        """Start the supervisor. With `secret` it does not lead, but joins host 0 at --dist-init-addr."""
        self._owner_pid = os.getpid()
        self._popen, link = start_linked("The engine", "srt.launch_server", LIFELINE_FD)
        self._lifeline = MessageStream(link, generation=0)
        _close_in_forks(link)
        with contextlib.suppress(PeerGone):  # the next read reports it
            self._lifeline.send(EngineStart(args, http, secret))

    @property
    def is_ours(self) -> bool:
        """True in the process that started the engine, but not in a fork of it, which has neither the loop's thread nor the lifeline."""
        return os.getpid() == self._owner_pid

    @property
    def pid(self) -> int:
        return self._popen.pid

    def fileno(self) -> int:
        return self._lifeline.fileno()

    def wait_started(self, timeout_s: float | None = None) -> EngineStarted | None:
        """Wait for the engine's address; return None on a timeout. Raise StartError with the engine's own message if it cannot start."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        if not poll.poll(None if timeout_s is None else timeout_s * 1e3):
            return None
        try:
            message = self._lifeline.receive_blocking()
        except (PeerGone, LinkBroken) as error:
            raise StartError(ENDED) from error
        if isinstance(message, EngineStarted):
            return message
        raise StartError(message.message if isinstance(message, Failed) else ENDED)

    def receive(self) -> ServerReady | EngineReplaced | EngineLost | Failed | None:
        """Return the supervisor's next message, or None if there is none; does not wait. The supervisor's end is a Failed too."""
        try:
            message = self._lifeline.receive()
        except (PeerGone, LinkBroken):
            return Failed(ENDED)
        if message is None or isinstance(message, (ServerReady, EngineReplaced, EngineLost, Failed)):
            return message
        return Failed(ENDED)

    def stop(self) -> None:
        """End the engine and wait until it is gone. Does nothing the second time, or in a fork of its owner."""
        if not self.is_ours or self._popen.returncode is not None:
            return
        with contextlib.suppress(PeerGone):
            self._lifeline.send(Stop(STOP_GRACE_S))
        try:
            self._popen.wait(STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()  # its children follow it
            self._popen.wait()
        self._lifeline.close()


def _close_in_forks(sock: socket.socket) -> None:
    """Close the lifeline in forks of the user's program: a fork must not keep the engine alive."""
    reference = weakref.ref(sock)

    def close() -> None:
        if (inherited := reference()) is not None:
            inherited.close()

    os.register_at_fork(after_in_child=close)
