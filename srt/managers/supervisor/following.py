"""The supervisor of a host that does not lead: it starts and ends processes as host 0 orders, and passes on what they say.

It decides nothing. When host 0 is gone, all of its processes end, and so does it.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
import time
from collections.abc import Callable

from srt.managers.process.child_process import ChildKey, ChildProcess, reap
from srt.managers.process.heartbeats import HeartbeatWriter
from srt.managers.process.run_files import ENGINE_STATE_PREFIX
from srt.managers.process.runtime_switches import ControlWords
from srt.managers.supervisor.hosts import BEAT_S, SILENT_S
from srt.managers.supervisor.lifeline import say_failed
from srt.managers.supervisor.preflight import ServerPlan
from srt.managers.supervisor.progress_display import ProgressDisplay
from srt.managers.supervisor.run_dir import RunDir, must_be_written
from srt.managers.supervisor.signal_pipe import STOP_SIGNALS, SignalPipe
from srt.managers.supervisor.systemd import ServiceManager
from srt.protocol.cluster_key import secret_of_run
from srt.protocol.codec import DecodeError, decode, encode
from srt.protocol.host_link import VersionsDiffer, open_link, use_with_selector
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
from srt.protocol.messages import ChildStart, Failed, FromChild, Message, ServerReady, ToChild
from srt.protocol.stream import MessageStream
from srt.server_args import ServerArgs
from srt.utils.checkpoint import version_of
from srt.utils.errors import StartError
from srt.utils.shared_numbers import NumberFiles

CONNECT_S = 10.0
RETRY_S = 0.25
ANSWER_S = 60.0  # for host 0 to accept this one: it may be busy with a start
ENDING_S = 3.0  # for killed processes to be gone


def join(
    args: ServerArgs,
    hello: HostHello,
    secret: bytes,
    say: Callable[[str], None],
    lifeline: MessageStream | None = None,
) -> tuple[socket.socket, MessageStream]:
    """Join the server of host 0, which is tried for --dist-timeout seconds. StartError with a sentence if that is not possible."""
    host, port = args.leader_address()
    where = f"host 0 at {host}:{port}"
    sock = _connect(host, port, args.dist_timeout, say, lifeline)
    try:
        stream = open_link(sock, secret, leads=False)
        sock.settimeout(ANSWER_S)
        stream.send(hello)
        answer = stream.receive_blocking()
        use_with_selector(sock)
    except VersionsDiffer as error:
        raise StartError(f"This host cannot join {where}: {error}. Install the same version on both.") from error
    except (OSError, PeerGone, LinkBroken) as error:
        raise StartError(
            f"This host cannot join {where} ({error}): are --dist-init-addr and the secret in --cluster-key-file those of host 0?"
        ) from error
    if isinstance(answer, HostRefused):
        raise StartError(f"This host cannot join {where}: {answer.sentence}")
    if not isinstance(answer, HostAccepted):
        raise StartError(f"This host cannot join {where}, which sent an unexpected {type(answer).__name__}.")
    return sock, stream


def _connect(
    host: str, port: int, timeout_s: float, say: Callable[[str], None], lifeline: MessageStream | None
) -> socket.socket:
    deadline_s, has_said = time.monotonic() + timeout_s, False
    while True:
        try:
            return socket.create_connection((host, port), CONNECT_S)
        except socket.gaierror as error:
            raise StartError(f"The host of --dist-init-addr {host}:{port} is not known ({error.strerror}).") from error
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise StartError(
                    f"Host 0 cannot be reached at {host}:{port} ({error.strerror or error}): is the server started there, and is that"
                    " its --dist-init-addr?"
                ) from error
        if not has_said:
            say(f"Waiting for host 0 at {host}:{port}.")
            has_said = True
        if select.select([lifeline] if lifeline else [], [], [], RETRY_S)[0]:
            raise StartError("The process that started this host has ended.")


class FollowingSupervisor:
    """Parent of the processes of one host, from the moment it has joined until all of them have ended."""

    def __init__(
        self,
        plan: ServerPlan,
        run_dir: RunDir,
        sock: socket.socket,
        leader: MessageStream,
        secret: bytes,
        spawn: Callable[[ChildKey], ChildProcess],
        signals: SignalPipe,
        display: ProgressDisplay,
        service_manager: ServiceManager,
        lifeline: MessageStream | None = None,
    ) -> None:
        """`lifeline` leads to the process that started this one, if this host must end with that."""
        self._lifeline = lifeline
        self._plan, self._run_dir = plan, run_dir
        self._leader, self._secret, self._address = leader, secret, sock.getsockname()[0]
        self._spawn, self._signals = spawn, signals
        self._display, self._service_manager = display, service_manager
        self._children: dict[ChildKey, ChildProcess] = {}  # that have not been reaped
        self._streams: dict[ChildKey, MessageStream] = {}
        self._by_name: dict[tuple[str, int], ChildKey] = {}
        self._selector = selectors.DefaultSelector()
        self._heartbeat = HeartbeatWriter(run_dir.path, "supervisor")
        self._engines = NumberFiles(run_dir.path, ENGINE_STATE_PREFIX)
        self._checkpoint_version = version_of(plan.model_folder)
        with must_be_written(run_dir.path):
            ControlWords.create(run_dir.path, plan.args)
        self._beat_s = self._heard_s = time.monotonic()
        self._is_ready = False
        self._end: tuple[int, str] | None = None  # exit code and reason

    def run(self) -> int:
        """Serve host 0 until one of the two ends. Returns the exit code."""
        self._selector.register(self._signals, selectors.EVENT_READ)
        self._selector.register(self._leader, selectors.EVENT_READ)
        if self._lifeline is not None:
            self._selector.register(self._lifeline, selectors.EVENT_READ)
        self._hear_leader()  # what came with the answer
        while self._end is None:
            asleep_since_s = time.monotonic()
            ready = self._selector.select(BEAT_S)
            if time.monotonic() - asleep_since_s > 2 * BEAT_S:  # this process was stopped for a while
                self._heard_s = time.monotonic()
            for selected, _ in ready:
                if isinstance(selected.data, ChildKey):
                    self._hear(selected.data)
            for selected, _ in ready:
                if selected.fileobj is self._signals:
                    self._handle_signals()
                elif selected.fileobj is self._leader:
                    self._hear_leader()
                elif selected.fileobj is self._lifeline:  # asked to stop, or closed
                    self._end = self._end or (0, "")
            self._tend(time.monotonic())
        exit_code, reason = self._end
        self._leader.close()
        self._end_children()
        self._service_manager.stopping()
        if reason:
            self._display.error(reason)
            if self._lifeline is not None:
                say_failed(self._lifeline, reason)
        return exit_code

    def _tend(self, now_s: float) -> None:
        self._service_manager.beat(now_s)
        if now_s - self._beat_s >= BEAT_S:
            self._beat_s = now_s
            self._heartbeat.beat(now_s)
            self._send(HostBeat(self._engines.read()))
        if now_s - self._heard_s > SILENT_S:
            self._lose_leader(f"has given no sign of life for {SILENT_S:.0f} s")

    # ---- Orders

    def _hear_leader(self) -> None:
        try:
            while self._end is None and (message := self._leader.receive()) is not None:
                self._heard_s = time.monotonic()
                self._obey(message)
        except PeerGone:
            self._lose_leader("is gone")
        except (LinkBroken, DecodeError) as error:
            self._lose_leader(f"sent what cannot be read ({error})")

    def _lose_leader(self, reason: str) -> None:
        self._end = self._end or (1, f"Host 0 {reason}: the processes of this host end.")

    def _obey(self, message: Message) -> None:
        match message:
            case HostBeat():
                pass
            case HostSpawn():
                self._start(message)
            case HostTell(role, index, data):
                self._tell((role, index), decode(data).message)
            case HostKill(role, index):
                self._kill(self._by_name.get((role, index)))
            case HostEnd(reason):
                self._end = (1 if reason else 0), f"Host 0 has ended: {reason}" if reason else ""
            case _:
                raise LinkBroken(f"unexpected {type(message).__name__}")

    def _start(self, order: HostSpawn) -> None:
        key = ChildKey(order.role, order.index, order.replica)
        self._by_name[key.role, key.index] = key
        self._drop_stream(key)  # a process that the old child started still holds the other end
        try:
            child = self._spawn(key)
        except StartError as error:
            self._pass_on(key, Failed(str(error)))
            self._send(HostExited(key.role, key.index, 1))
            return
        self._children[key] = child
        stream = self._streams[key] = MessageStream(child.socket, order.generation)
        self._selector.register(stream, selectors.EVENT_READ, key)
        start = ChildStart(
            role=key.role,
            index=key.index,
            generation=order.generation,
            run_dir=str(self._run_dir.path),
            model_folder=str(self._plan.model_folder),
            num_frontends=order.num_frontends,
            args=self._plan.args,
            num_tokens=order.num_tokens,
            checkpoint_version=self._checkpoint_version,
            replica=key.replica,
            ledger=order.ledger,
            meeting=MeetingPoints(
                secret_of_run(self._secret, order.run), self._address, order.frontends, order.workers, order.ranks
            ),
        )
        with contextlib.suppress(PeerGone):  # its exit is noticed like any other
            stream.send(start)

    def _tell(self, name: tuple[str, int], message: Message) -> None:
        if isinstance(message, ServerReady) and not self._is_ready:
            self._is_ready = True
            self._display.say(f"Ready: host {self._plan.args.node_rank} serves for {self._plan.args.dist_init_addr}.")
            self._service_manager.ready("Ready")
        stream = self._streams.get(self._by_name.get(name, ChildKey(*name)))
        if stream is not None and isinstance(message, ToChild):
            with contextlib.suppress(PeerGone):
                stream.send(message)

    def _kill(self, key: ChildKey | None) -> None:
        """Kill the child's whole process group, if it has not been reaped: until then the pid is its own."""
        if key in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._children[key].popen.pid, signal.SIGKILL)

    # ---- Reports

    def _hear(self, key: ChildKey) -> None:
        """Pass on all that this child has sent."""
        while (stream := self._streams.get(key)) is not None:
            try:
                message = stream.receive()
            except (PeerGone, LinkBroken) as error:
                self._drop_stream(key)
                reason = str(error) if isinstance(error, LinkBroken) else None
                self._send(HostLinkLost(key.role, key.index, reason))
                return
            if message is None:
                return
            if isinstance(message, FromChild):
                self._pass_on(key, message)

    def _pass_on(self, key: ChildKey, message: FromChild) -> None:
        self._send(HostHeard(key.role, key.index, encode(message, 0, 0)))

    def _send(self, message: Message) -> None:
        try:
            self._leader.send(message)
        except PeerGone:
            self._lose_leader("is gone")

    def _drop_stream(self, key: ChildKey) -> None:
        stream = self._streams.pop(key, None)
        if stream is not None:
            self._selector.unregister(stream)
            stream.close()

    def _handle_signals(self) -> None:
        for number in self._signals.drain():
            if number in STOP_SIGNALS:
                self._end = self._end or (0, "")
        self._reap()

    def _reap(self) -> None:
        for pid, status in reap():
            key = next((key for key, child in self._children.items() if child.popen.pid == pid), None)
            if key is not None:
                returncode = self._children.pop(key).bury(status)
                self._hear(key)
                self._send(HostExited(key.role, key.index, returncode))

    def _end_children(self) -> None:
        """Kill all processes of this host, and wait until they are gone."""
        for key in self._children:
            self._kill(key)
        deadline_s = time.monotonic() + ENDING_S
        while self._children and (left_s := deadline_s - time.monotonic()) > 0:
            self._selector.select(left_s)
            self._signals.drain()
            for key in list(self._streams):
                self._drop_stream(key)
            for link in (self._leader, self._lifeline):
                if link is not None:
                    with contextlib.suppress(KeyError, ValueError):
                        self._selector.unregister(link)
            self._reap()
