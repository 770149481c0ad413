"""Process that asks Ray for a host for each replica, and for another one when a host is lost. It ends with its lifeline to host 0.

Each replica has a placement group of its own, and in it an actor that owns the host's supervisor. Requests, tokens and orders do not
pass through Ray: the supervisors meet over the links of `--nnodes`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import time
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from srt.managers.process.child_process import LIFELINE_FD
from srt.protocol.codec import encode
from srt.protocol.host_messages import RayReached
from srt.protocol.link_errors import LinkBroken, PeerGone
from srt.protocol.messages import EngineStart, Failed, ServerReady
from srt.protocol.stream import MessageStream
from srt.ray_cluster.options import with_whole_paths, without_http
from srt.ray_cluster.supervisor_actor import SupervisorActor
from srt.server_args import ServerArgs
from srt.utils.errors import StartError
from srt.utils.logs import json_line

POLL_S = 0.25
CONNECT_S = 10.0
AGAIN_S = 3.0  # between the end of a host and the next attempt to start it
ENDING_S = 8.0  # for hosts to end by themselves


def main() -> int:
    """Serve host 0 until its end of the lifeline is closed."""
    sock = socket.socket(fileno=int(os.environ.pop(LIFELINE_FD)))
    sock.set_inheritable(False)
    link = MessageStream(sock, generation=None)
    try:
        link.send(RayReached(connect()))
        order = link.receive_blocking()
        assert isinstance(order, EngineStart) and order.secret is not None
        Placer(link, order.args, order.secret).run()
    except (StartError, RayError) as error:  # the hosts that it has started end with it
        with contextlib.suppress(PeerGone):
            link.send(Failed(str(error) if isinstance(error, StartError) else f"Ray has failed: {_first_line(error)}."))
        return 1
    except (PeerGone, LinkBroken):  # host 0 has ended
        return 0
    return 0


def connect() -> str:
    """Connect to the cluster that RAY_ADDRESS names, or to that of this machine. Returns this machine's address in it."""
    address = os.environ.get("RAY_ADDRESS", "auto")
    if address.startswith("ray://"):
        raise StartError(
            f"RAY_ADDRESS is {address}, but --use-ray runs on a node of the cluster only: start the server there."
        )
    try:
        if address not in ("auto", "local"):
            _try_address(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise StartError(
            f"No Ray cluster can be used at {address} ({_first_line(error)}): start one with ray start --head, or set RAY_ADDRESS."
        ) from error
    # After Ray, which sets handlers. A service manager signals all processes, but host 0 says when this one ends.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return str(ray.util.get_node_ip_address())


class PlacedHost:
    """A replica's host in the cluster: its placement group, its actor, and the actor's only call."""

    def __init__(self, order: bytes, num_cpus: int) -> None:
        """Ask Ray for a place, and for the actor there; waits for neither."""
        self._group: Any = placement_group([{"CPU": num_cpus}], strategy="STRICT_PACK")
        place = PlacementGroupSchedulingStrategy(self._group)
        remote: Any = ray.remote(SupervisorActor)
        self._actor = remote.options(num_cpus=num_cpus, max_restarts=0, scheduling_strategy=place).remote(order)
        self.call = self._actor.run.remote()

    def reason(self) -> str:
        """Return why its call has ended."""
        try:
            return str(ray.get(self.call))
        except RayTaskError as error:  # its last line is that of the exception in the actor
            return str(error).strip().splitlines()[-1]
        except RayError as error:
            return _first_line(error)

    def release(self) -> None:
        """Give its place back."""
        with contextlib.suppress(RayError, ValueError):
            ray.kill(self._actor)
        with contextlib.suppress(RayError, ValueError):
            remove_placement_group(self._group)


class Placer:
    """Owner of the hosts that Ray starts."""

    def __init__(self, link: MessageStream, args: ServerArgs, secret: bytes) -> None:
        self._link, self._args = link, without_http(with_whole_paths(args))
        self._secret = secret
        self._num_cpus = args.ray_num_cpus or args.num_ranks
        self._hosts: dict[int, PlacedHost] = {}
        self._again_s: dict[int, float] = {}  # when a replica without a place is to get one
        self._has_started = False

    def run(self) -> None:
        """Keep all replicas placed until host 0 ends. StartError if one ends before the server has started."""
        for number in range(self._args.dp_size):
            self._place(number)
        with contextlib.suppress(PeerGone, LinkBroken):
            while True:
                select.select([self._link], [], [], POLL_S)
                if isinstance(self._link.receive(), ServerReady):
                    self._has_started = True
                self._replace_ended()
        self._end()

    def _place(self, number: int) -> None:
        args = replace(self._args, node_rank=number + 1)
        self._hosts[number] = PlacedHost(encode(EngineStart(args, False, self._secret), 0, 0), self._num_cpus)

    def _replace_ended(self) -> None:
        calls = {host.call: number for number, host in self._hosts.items()}
        ended, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0) if calls else ([], [])
        for call in ended:
            number = calls[call]
            host = self._hosts.pop(number)
            sentence = f"The host that Ray started for replica {number} has ended: {host.reason()}"
            host.release()
            if not self._has_started:
                raise StartError(sentence)
            self._say(f"{sentence.rstrip('.')}. Ray is asked for another one.")
            self._again_s[number] = time.monotonic() + AGAIN_S
        for number in [number for number, again_s in self._again_s.items() if again_s <= time.monotonic()]:
            del self._again_s[number]
            self._place(number)

    def _say(self, sentence: str) -> None:
        as_json = self._args.log_format == "json"
        sys.stderr.write((json_line(time.time(), "error", "placer", sentence) if as_json else sentence) + "\n")

    def _end(self) -> None:
        """Wait until the hosts, which host 0 has told to end, have done so; those that have not end with this process."""
        calls = [host.call for host in self._hosts.values()]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=ENDING_S)
        for host in self._hosts.values():
            host.release()


def _try_address(address: str) -> None:
    """Raise an error if nobody listens at HOST:PORT, for which Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


if __name__ == "__main__":
    sys.exit(main())
