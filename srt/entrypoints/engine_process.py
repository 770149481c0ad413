"""A Runtime's end of the engine: the supervisor that it started, and the lifeline whose end-of-file ends it.

Not a parent-death signal: that would fire when the thread that made the Runtime ends. The engine is in a session of its own, so a
Ctrl-C in the user's terminal reaches the user's program alone.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import weakref

from srt.managers.process.child_process import LIFELINE_FD, module_path, python_command
from srt.protocol.link_errors import LinkBroken, PeerGone
from srt.protocol.messages import EngineReplaced, EngineStart, EngineStarted, Failed, ServerReady, Stop
from srt.protocol.stream import MessageStream
from srt.server_args import ServerArgs
from srt.utils.errors import StartError

STOP_GRACE_S = 1.0
STOP_WAIT_S = 15.0  # the supervisor's own deadlines are shorter
ENDED = "The engine has ended."


class EngineProcess:
    """Started on construction. Any thread may call; `receive` one at a time."""

    def __init__(self, args: ServerArgs, *, http: bool) -> None:
        ours, theirs = socket.socketpair()
        self._lifeline = MessageStream(ours, generation=0)
        self._owner_pid = os.getpid()
        try:
            self._popen = subprocess.Popen(
                python_command("srt.launch_server"),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **module_path(), LIFELINE_FD: str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise StartError(f"The engine could not be started: {error.strerror}.") from error
        finally:
            theirs.close()
        _close_in_forks(ours)
        with contextlib.suppress(PeerGone):  # whoever reads next learns it
            self._lifeline.send(EngineStart(args, http))

    @property
    def is_ours(self) -> bool:
        """False in a fork of the process that started the engine: it has neither the loop's thread nor the lifeline."""
        return os.getpid() == self._owner_pid

    @property
    def pid(self) -> int:
        return self._popen.pid

    def fileno(self) -> int:
        return self._lifeline.fileno()

    def wait_started(self, timeout_s: float | None = None) -> EngineStarted | None:
        """Where the engine is to be found; None if that is not known in time. StartError with its sentence if it cannot start."""
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

    def receive(self) -> ServerReady | EngineReplaced | Failed | None:
        """The supervisor's next word if there is one; does not wait. Its end is a Failed too."""
        try:
            message = self._lifeline.receive()
        except (PeerGone, LinkBroken):
            return Failed(ENDED)
        if message is None or isinstance(message, (ServerReady, EngineReplaced, Failed)):
            return message
        return Failed(ENDED)

    def stop(self) -> None:
        """End the engine and wait until it is gone. Nothing happens the second time, or in a fork of its owner."""
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
    """A process that the user's program forks must not keep the lifeline open."""
    reference = weakref.ref(sock)

    def close() -> None:
        if (inherited := reference()) is not None:
            inherited.close()

    os.register_at_fork(after_in_child=close)
