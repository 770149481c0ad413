"""The other hosts of a server, as the supervisor of host 0 knows them: who belongs to it, and what their processes say.

A host joins by connecting to --dist-init-addr and proving that it has the secret. A thread waits for hosts that connect; all else happens
in the supervisor's only thread. A host is gone when its link ends, or when it is silent for long.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from srt.managers.process.child_process import ChildKey
from srt.managers.process.heartbeats import HeartbeatWriter
from srt.managers.process.replica_layout import ReplicaLayout, host_of, layouts_of
from srt.managers.process.run_files import ENGINE_STATE_PREFIX
from srt.managers.supervisor.events import ChildExited, Event, HostBack, HostLost, LinkLost
from srt.managers.supervisor.host_facts import difference
from srt.managers.supervisor.preflight import listen
from srt.protocol.cluster_key import secret_of_run
from srt.protocol.codec import DecodeError, decode, encode
from srt.protocol.engine_work import EngineLedger
from srt.protocol.host_link import HELLO_S, VersionsDiffer, open_link, use_with_selector
from srt.protocol.host_messages import (
    HostAccepted,
    HostBeat,
    HostEnd,
    HostExited,
    HostHeard,
    HostHello,
    HostKill,
    HostLinkLost,
    HostRefused,
    HostSpawn,
    HostTell,
    MeetingPoints,
)
from srt.protocol.link_errors import LinkBroken, PeerGone
from srt.protocol.messages import Heartbeat, Message
from srt.protocol.stream import MessageStream
from srt.server_args import ServerArgs
from srt.utils.errors import StartError
from srt.utils.host_options import PORTS_PER_REPLICA
from srt.utils.shared_numbers import SharedNumbers

BEAT_S = 1.0
SILENT_S = 30.0
ACCEPT_AGAIN_S = 0.1
MOST_GREETINGS = 16  # connections at a time that have not proved anything yet
FRONTENDS, WORKERS, RANKS = 1, 2, 3  # places of a replica's ports behind the one before


@dataclass(frozen=True, slots=True)
class ChildSaid:
    """A message of a child of another host."""

    child: ChildKey
    message: Message


@dataclass(slots=True)
class _Host:
    """A host that has proved that it has the secret."""

    hello: HostHello
    socket: socket.socket
    stream: MessageStream
    address: str
    last_heard_s: float = 0.0

    def send(self, message: Message) -> None:
        """Send; a host that does not read any more is cut off, and noticed as lost like any other."""
        try:
            self.stream.send(message)
        except PeerGone:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)


class Hosts:
    """Owner of the membership, and of the links to the other hosts."""

    def __init__(
        self, args: ServerArgs, children: list[ChildKey], facts: HostHello, secret: bytes, run_dir: Path
    ) -> None:
        """Listen at --dist-init-addr. `children` are the processes of all other hosts. StartError if the address cannot be taken."""
        self.children = tuple(children)
        self._args, self._facts, self._secret, self._run_dir = args, facts, secret, run_dir
        # Generations start again with each run: a process that an earlier one left behind must not be taken for one of this.
        self._run = secrets.token_hex(16)
        host, self._port = args.leader_address()
        self._listener = _listen(host, self._port)
        self._addresses = {0: self._listener.getsockname()[0]}  # by host, the latest
        self._by_name = {(key.role, key.index): key for key in children}
        self._joined: dict[int, _Host] = {}
        self._arrived: queue.SimpleQueue[_Host | str] = queue.SimpleQueue()
        self._greetings = threading.Semaphore(MOST_GREETINGS)
        self._heartbeats: dict[ChildKey, HeartbeatWriter] = {}
        self._counters: dict[str, SharedNumbers] = {}
        self._beat_s = 0.0
        self._is_closed = False
        self._selector = selectors.DefaultSelector()
        self._wake, self._wake_end = socket.socketpair()
        self._wake.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        threading.Thread(target=self._accept, name="hosts", daemon=True).start()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `receive` has something to return."""
        return self._selector.fileno()

    def wait(self, say: Callable[[str], None], check: Callable[[], None] = lambda: None) -> None:
        """Wait until all hosts have joined. StartError after --dist-timeout, or if `check`, which is called often, raises it."""
        deadline_s = time.monotonic() + self._args.dist_timeout
        while missing := [rank for rank in range(1, self._args.nnodes) if rank not in self._joined]:
            self._selector.select(BEAT_S)
            for news in self.receive():
                if isinstance(news, str):
                    say(news)
            self.tend(time.monotonic())
            check()
            if time.monotonic() > deadline_s:
                what = "start the server there with its --node-rank."
                if self._args.use_ray:
                    num_cpus = self._args.ray_num_cpus or self._args.num_ranks
                    what = f"has the Ray cluster {num_cpus} free CPUs of one node for each replica?"
                raise StartError(
                    f"{_hosts(missing)} not joined within {self._args.dist_timeout} s (see --dist-timeout): {what}"
                )

    def owns(self, child: ChildKey) -> bool:
        """Return whether this process runs on another host."""
        return (child.role, child.index) in self._by_name

    # ---- Where processes meet

    def meeting(self, child: ChildKey) -> MeetingPoints:
        """Return where a process of host 0 meets those of other hosts."""
        frontends, workers, ranks = self._places(child)
        return MeetingPoints(secret_of_run(self._secret, self._run), self._addresses[0], frontends, workers, ranks)

    def frontend_address(self, replica: int) -> str:
        """Return where frontends meet the scheduler of a replica; empty if it is on this host."""
        layout = ReplicaLayout.of(self._args, replica)
        return self._place(layout, FRONTENDS) if host_of(layout.scheduler, self._args) else ""

    def _places(self, child: ChildKey) -> tuple[list[str], str, str]:
        frontends = [self.frontend_address(replica) for replica in range(self._args.dp_size)]
        layout = layouts_of(self._args)[child.replica]
        is_divided = len({host_of(worker, self._args) for worker in layout.workers}) > 1
        if child.role == "frontend" or not is_divided:
            return frontends, "", ""
        return frontends, self._place(layout, WORKERS), self._place(layout, RANKS)

    def _place(self, layout: ReplicaLayout, which: int) -> str:
        address = self._addresses.get(host_of(layout.scheduler, self._args), "")
        port = self._port + PORTS_PER_REPLICA * layout.replica + which
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

    # ---- What comes in

    def receive(self) -> list[ChildSaid | Event | str]:
        """Return what has come: what other hosts' processes say, what follows for the Replacer, and sentences for the user."""
        news: list[ChildSaid | Event | str] = []
        ready = self._selector.select(0)
        for selected, _ in ready:  # ends first: a host that was restarted joins again
            if selected.data is not None:
                news += self._hear(selected.data)
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        while not self._arrived.empty():
            arrived = self._arrived.get()
            news += [arrived] if isinstance(arrived, str) else self._admit(arrived)
        return news

    def tend(self, now_s: float) -> list[Event]:
        """Give the other hosts a sign of life, if it is time, and report those that have given none for long."""
        if now_s - self._beat_s < BEAT_S:
            return []
        self._beat_s = now_s
        for host in self._joined.values():
            host.send(HostBeat())
        silent = [rank for rank, host in self._joined.items() if now_s - host.last_heard_s > SILENT_S]
        return [self._lose(rank, f"has given no sign of life for {SILENT_S:.0f} s") for rank in silent]

    def excuse(self, now_s: float) -> None:
        """Forgive all silence so far: this host itself was stopped for a while."""
        for host in self._joined.values():
            host.last_heard_s = now_s

    def _hear(self, rank: int) -> list[ChildSaid | Event | str]:
        news: list[ChildSaid | Event | str] = []
        host = self._joined[rank]
        try:
            while (message := host.stream.receive()) is not None:
                host.last_heard_s = time.monotonic()
                news += self._handle(rank, message)
        except (PeerGone, LinkBroken, DecodeError) as error:
            reason = "is gone" if isinstance(error, PeerGone) else f"sent what cannot be read ({error})"
            news.append(self._lose(rank, reason))
        return news

    def _handle(self, rank: int, message: Message) -> list[ChildSaid | Event]:
        match message:
            case HostBeat(engines):
                for replica, counters in engines.items():
                    self._publish(replica, counters)
                return []
            case HostHeard(role, index, data):
                child, said = self._child(rank, role, index), decode(data).message
                if isinstance(said, Heartbeat):
                    self._beat_for(child, said)
                return [ChildSaid(child, said)]
            case HostExited(role, index, returncode):
                return [ChildExited(self._child(rank, role, index), returncode)]
            case HostLinkLost(role, index, reason):
                return [LinkLost(self._child(rank, role, index), reason)]
            case _:
                raise LinkBroken(f"unexpected {type(message).__name__}")

    def _child(self, rank: int, role: str, index: int) -> ChildKey:
        child = self._by_name.get((role, index))
        if child is None or host_of(child, self._args) != rank:
            raise LinkBroken(f"{role} {index} is not a process of host {rank}")
        return child

    def _beat_for(self, child: ChildKey, heartbeat: Heartbeat) -> None:
        """Write the heartbeat where frontends read those of this host's processes."""
        if child not in self._heartbeats:
            self._heartbeats[child] = HeartbeatWriter(self._run_dir, str(child), is_elsewhere=True)
        self._heartbeats[child].beat(time.monotonic(), heartbeat.progress_age_s)

    def _publish(self, replica: str, counters: dict[str, float]) -> None:
        """Write the counters of another host's scheduler where frontends read them."""
        if not replica.isdigit() or int(replica) >= self._args.dp_size:
            raise LinkBroken(f"{replica[:20]} is no replica")
        known = self._counters.get(replica)
        if known is None or known.names != tuple(counters):
            known = SharedNumbers.fresh(self._run_dir / f"{ENGINE_STATE_PREFIX}{replica}", counters)
            self._counters[replica] = known
        for name, value in counters.items():
            known.set(name, value)

    # ---- Who belongs to the server

    def _admit(self, host: _Host) -> list[ChildSaid | Event | str]:
        rank = host.hello.rank
        reason = difference(self._facts, host.hello)
        if reason is None and not 0 < rank < self._args.nnodes:
            reason = f"--node-rank {rank} is not that of another host: there are {self._args.nnodes} (see --nnodes)."
        if reason is None and rank in self._joined:
            reason = (
                f"Another host has --node-rank {rank} already, at {self._joined[rank].address}: each needs its own."
            )
        if reason is not None:
            host.send(HostRefused(reason))
            host.socket.close()
            return [f"A host at {host.address} cannot join: {reason}"]
        host.last_heard_s = time.monotonic()
        self._joined[rank] = host
        self._addresses[rank] = host.address
        self._selector.register(host.stream, selectors.EVENT_READ, rank)
        host.send(HostAccepted())
        return [f"Host {rank} has joined from {host.address}.", HostBack(self._children_of(rank))]

    def _lose(self, rank: int, reason: str) -> HostLost:
        host = self._joined.pop(rank)
        self._selector.unregister(host.stream)
        host.stream.close()
        return HostLost(self._children_of(rank), f"Host {rank} at {host.address} {reason}.")

    def _children_of(self, rank: int) -> tuple[ChildKey, ...]:
        return tuple(child for child in self.children if host_of(child, self._args) == rank)

    def _accept(self) -> None:
        """Greet all that connect, each in a thread, so that one that says nothing keeps nobody waiting."""
        while True:
            try:
                sock, peer = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(ACCEPT_AGAIN_S)  # who connected has gone, or too many files are open: others may come
                continue
            if self._greetings.acquire(blocking=False):
                threading.Thread(target=self._greet, args=(sock, str(peer[0])), name="greeting", daemon=True).start()
            else:
                sock.close()

    def _greet(self, sock: socket.socket, address: str) -> None:
        try:
            stream = open_link(sock, self._secret, leads=True)
            hello = stream.receive_blocking(HELLO_S)
            if not isinstance(hello, HostHello):
                raise LinkBroken(f"unexpected {type(hello).__name__}")
            use_with_selector(sock)
        except (OSError, PeerGone, LinkBroken) as error:
            sock.close()
            if isinstance(error, VersionsDiffer):
                self._arrive(f"A host at {address} cannot join: {error}.")
            elif isinstance(error, LinkBroken):
                self._arrive(f"A host at {address} cannot join: {error} (is its --cluster-key-file the same?).")
        else:
            self._arrive(_Host(hello, sock, stream, address))
        finally:
            self._greetings.release()

    def _arrive(self, arrived: _Host | str) -> None:
        self._arrived.put(arrived)
        with contextlib.suppress(OSError):  # closed
            self._wake_end.send(b"!")

    # ---- What goes out

    def start(
        self, child: ChildKey, generation: int, num_frontends: int, num_tokens: int, ledger: EngineLedger
    ) -> None:
        """Start a process on its host. Those of a host that is gone are started when it is back, by the Replacer's order."""
        words = (child.role, child.index, child.replica, generation, num_frontends, num_tokens, ledger)
        self._send(child, HostSpawn(*words, *self._places(child), self._run))

    def tell(self, child: ChildKey, message: Message) -> None:
        self._send(child, HostTell(child.role, child.index, encode(message, 0, 0)))

    def kill(self, child: ChildKey) -> None:
        self._send(child, HostKill(child.role, child.index))

    def _send(self, child: ChildKey, message: Message) -> None:
        host = self._joined.get(host_of(child, self._args))
        if host is not None:
            host.send(message)

    def close(self, reason: str) -> None:
        """Tell all hosts that the server has ended, and leave them."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for host in self._joined.values():
            host.send(HostEnd(reason))
            host.stream.close()
        self._joined.clear()


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen(host, port)
    except StartError as error:
        raise StartError(
            f"Host 0 cannot listen at --dist-init-addr {host}:{port}: choose an address of this machine and a free port, with"
            " free ports behind it."
        ) from error


def _hosts(ranks: list[int]) -> str:
    return f"Host {ranks[0]} has" if len(ranks) == 1 else f"Hosts {', '.join(map(str, ranks))} have"
