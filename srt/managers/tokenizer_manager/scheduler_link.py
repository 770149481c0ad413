"""A frontend's socket to the scheduler, read by an event loop. Says when the other end has gone."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from srt.protocol.codec import protocol_hash
from srt.protocol.link_errors import LinkBroken
from srt.protocol.links import DealerLink, frontend_path
from srt.protocol.messages import FromFrontend, FrontendHello, Message

_MESSAGES_PER_TURN = 32  # then others on the loop have theirs
_LAST_WORDS_MS = 200

logger = logging.getLogger(__name__)


class SchedulerLink:
    """Calls `on_message` for every message in order, and `on_idle` when there is none left for now. At its end, once: `on_lost` when the
    scheduler is gone, `on_broken` when what it sent cannot be relied upon."""

    def __init__(
        self,
        *,
        index: int,
        generation: int,
        run_dir: str,
        on_message: Callable[[Message], None],
        on_idle: Callable[[], None],
        on_lost: Callable[[], None],
        on_broken: Callable[[str], None],
    ) -> None:
        """Connect and say hello; whether anybody is there shows when the answer comes. Must run in the loop's thread."""
        self._on_message = on_message
        self._on_idle = on_idle
        self._on_lost = on_lost
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # A frontend that starts anew under its number must not be taken for its predecessor.
        identity = f"f{index}.{secrets.token_hex(4)}".encode()
        self._link = DealerLink(self._context, frontend_path(run_dir, generation), generation, identity)
        self._monitor: Any = self._link.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._is_open = True
        self._is_turn_due = False
        self._fd, self._monitor_fd = int(self._link.socket.FD), int(self._monitor.FD)
        self._loop.add_reader(self._fd, self._read)
        self._loop.add_reader(self._monitor_fd, self._read_monitor)
        self.send(FrontendHello(index, protocol_hash()))
        self._read_monitor()

    @property
    def is_open(self) -> bool:
        return self._is_open

    def send(self, message: FromFrontend) -> None:
        """Queue the message; nothing after the end of the link."""
        if not self._is_open:
            return
        self._link.send(message)
        self._look_again()

    def close(self) -> None:
        """Send what is queued if that goes at once, and let go. Nothing is called any more."""
        self._end(_LAST_WORDS_MS)

    def drop(self) -> None:
        """The same where nobody is there to be told anything."""
        self._end(0)

    def _look_again(self) -> None:
        """The socket's descriptor tells of changes, not of states, and a send may swallow one: so look, in the loop's next turn."""
        if not self._is_turn_due:
            self._is_turn_due = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._is_turn_due = False
        if self._take_messages(_MESSAGES_PER_TURN) == _MESSAGES_PER_TURN:
            self._look_again()
        elif self._is_open:
            self._on_idle()

    def _read_monitor(self) -> None:
        while self._is_open:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._take_messages()  # what had arrived before the end still counts
                if self._is_open:
                    self._end(0)
                    self._on_lost()

    def _take_messages(self, most: int | None = None) -> int:
        """Hand on what has arrived; returns how many messages."""
        count = 0
        try:
            while self._is_open and count != most and (message := self._link.receive()) is not None:
                self._on_message(message)
                count += 1
        except LinkBroken as error:
            self._break(str(error))
        except Exception as error:  # state that a half-handled message left behind cannot be trusted
            logger.exception("A message from the scheduler could not be handled.")
            self._break(f"internal error: {type(error).__name__} {error}")
        return count

    def _break(self, reason: str) -> None:
        if self._is_open:
            logger.debug("The link to the scheduler is broken: %s.", reason)
            self._end(0)
            self._on_broken(reason)

    def _end(self, linger_ms: int) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._fd)
        self._loop.remove_reader(self._monitor_fd)
        self._link.socket.disable_monitor()
        self._monitor.close(0)
        self._link.close(linger_ms)
        self._context.term()  # waits for the last words, if there is somebody to hear them
