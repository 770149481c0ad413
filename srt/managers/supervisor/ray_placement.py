"""Hosts that Ray starts, as the supervisor of host 0 asks for them: by a child process, so that the supervisor itself loads no Ray.

The child is `srt.ray_cluster.placer`. It ends with its lifeline, and the hosts that it started end with it.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import subprocess
from dataclasses import replace
from typing import Self

from srt.managers.process.child_process import LIFELINE_FD, start_linked
from srt.protocol.host_messages import RayReached
from srt.protocol.link_errors import LinkBroken, PeerGone
from srt.protocol.messages import EngineStart, Failed, Message, ServerReady
from srt.protocol.stream import MessageStream
from srt.server_args import ServerArgs
from srt.utils.errors import StartError
from srt.utils.host_options import PORTS_PER_REPLICA
from srt.utils.ray_package import check_ray_installed

PLACER = "srt.ray_cluster.placer"
SECRET_BYTES = 32
FIRST_PORT, NUM_PORTS = 20_000, 10_000  # below those that Linux gives to connections
ENDING_S = 15.0  # for the placer to let its actors end


class RayPlacement:
    """The placer's process and its lifeline, for the length of a with-block. Entering it connects to the Ray cluster."""

    def __init__(self, args: ServerArgs) -> None:
        """Take the options as the user gave them; StartError if Ray is not installed."""
        check_ray_installed()
        self.secret = secrets.token_hex(SECRET_BYTES).encode()
        self._args = args

    def __enter__(self) -> Self:
        self._popen, link = start_linked("The process that talks to Ray", PLACER, LIFELINE_FD)
        self._link = MessageStream(link, generation=0)
        try:
            self._address = self._wait_reached()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._link.close()
        try:
            self._popen.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `check` has something to raise."""
        return self._link.fileno()

    def _wait_reached(self) -> str:
        try:
            message = self._link.receive_blocking()
        except (PeerGone, LinkBroken) as error:
            raise StartError("The process that talks to Ray has ended.") from error
        if not isinstance(message, RayReached):
            raise _failure(message)
        return message.address

    def led(self, args: ServerArgs) -> ServerArgs:
        """Return these options of host 0, with what all hosts must know to meet."""
        if self._args.dist_init_addr is None:
            port = _free_ports(self._address, 1 + PORTS_PER_REPLICA * args.dp_size)
            where = f"[{self._address}]:{port}" if ":" in self._address else f"{self._address}:{port}"
            self._args = replace(self._args, dist_init_addr=where)
        self._args = replace(self._args, nnodes=1 + args.dp_size)
        return replace(args, nnodes=self._args.nnodes, dist_init_addr=self._args.dist_init_addr)

    def place(self) -> None:
        """Have Ray start a host for each replica. They join host 0 when there is room for them."""
        with contextlib.suppress(PeerGone):  # `check` reports it
            self._link.send(EngineStart(self._args, False, self.secret))

    def check(self) -> None:
        """Raise StartError if a host could not be started."""
        try:
            message = self._link.receive()
        except (PeerGone, LinkBroken) as error:
            raise StartError("The process that talks to Ray has ended.") from error
        if message is not None:
            raise _failure(message)

    def confirm(self) -> None:
        """Have hosts started again from now on when they end; until now, that ends the start."""
        with contextlib.suppress(PeerGone):
            self._link.send(ServerReady(0.0))


def _failure(message: Message) -> StartError:
    return StartError(
        message.message if isinstance(message, Failed) else f"Unexpected {type(message).__name__} from the placer."
    )


def _free_ports(address: str, count: int) -> int:
    """Return the first of `count` ports in a row that are free at this address. StartError if there are none."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for _ in range(100):
        first = FIRST_PORT + secrets.randbelow(NUM_PORTS)
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server((address, port), family=family))
            except OSError:
                continue
        return first
    raise StartError(f"There are no {count} free ports in a row at {address}: give HOST:PORT with --dist-init-addr.")
