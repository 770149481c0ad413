"""The parent of all processes of a server: one thread, one selector. The Replacer decides what follows from an event.

It loads no torch, HTTP or model code. As PID 1 of a container it also reaps orphans of its children.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable
from typing import assert_never

from msgspec.structs import replace

from srt.managers.process.child_process import ChildKey, ChildProcess, reap
from srt.managers.process.heartbeats import HeartbeatWriter
from srt.managers.process.runtime_switches import ControlWords
from srt.managers.process.startup_report import STARTUP_FILE, StartupReport
from srt.managers.process.watchdog import OVERSLEPT_S, longest_step_s
from srt.managers.supervisor.events import (
    BecameReady,
    ChildExited,
    ChildSpoke,
    Effect,
    Event,
    Finish,
    HostLost,
    Kill,
    LinkLost,
    SaveReport,
    ServesAgain,
    Start,
    StopAsked,
    Stopping,
    Tell,
    TellRuntime,
)
from srt.managers.supervisor.hosts import ChildSaid, Hosts
from srt.managers.supervisor.preflight import ServerPlan
from srt.managers.supervisor.progress_display import REFRESH_S, ProgressDisplay
from srt.managers.supervisor.replacer import Replacer, State
from srt.managers.supervisor.run_dir import ADDRESS_FILE, RunDir, must_be_written
from srt.managers.supervisor.signal_pipe import STOP_SIGNALS, SignalPipe
from srt.managers.supervisor.systemd import ServiceManager
from srt.protocol.engine_work import EngineLedger
from srt.protocol.link_errors import LinkBroken, PeerGone
from srt.protocol.messages import (
    ChildStart,
    EngineLost,
    EngineReplaced,
    EngineStarted,
    Failed,
    FromChild,
    Progress,
    RecordLedger,
    ServerReady,
    Stop,
)
from srt.protocol.stream import MessageStream
from srt.utils.checkpoint import version_of
from srt.utils.errors import StartError
from srt.utils.host import is_exiting

GRACE_S = 25.0  # for running requests when the server is asked to stop; containers usually get 30 s or less
UNBORN_S = 2.0  # wait after a failed start: the processes or memory that it lacked may be free again by then


class Supervisor:
    """Parent of a server's processes, from their start until all of them have ended."""

    def __init__(
        self,
        plan: ServerPlan,
        run_dir: RunDir,
        children: list[ChildProcess],
        spawn: Callable[[ChildKey], ChildProcess],
        signals: SignalPipe,
        display: ProgressDisplay,
        service_manager: ServiceManager,
        started_s: float,
        lifeline: MessageStream | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        """Adopt `children`, which were just started. Those of other `hosts` are started by `run`."""
        self._plan = plan
        self._hosts = hosts
        self._run_dir = run_dir
        self._signals = signals
        self._display = display
        self._service_manager = service_manager
        self._lifeline = lifeline
        self._spawn = spawn
        self._children: dict[ChildKey, ChildProcess] = {}
        self._streams: dict[ChildKey, MessageStream] = {}
        self._by_pid: dict[int, ChildKey] = {}
        # Children that could not be started: when the Replacer is told, and why.
        self._unborn: dict[ChildKey, tuple[float, str]] = {}
        spawned_s = {child.key: child.spawned_s for child in children}
        spawned_s |= dict.fromkeys(() if hosts is None else hosts.children, time.monotonic())
        args = plan.args
        self._replacer = Replacer(
            list(spawned_s),
            started_s,
            longest_step_s(args),
            args.max_replacements,
            shares_experts=args.enable_dp_attention,
        )
        self._report = StartupReport(started_s, spawned_s)
        self._selector = selectors.DefaultSelector()
        self._heartbeat = HeartbeatWriter(run_dir.path, "supervisor")
        self._checkpoint_version = version_of(plan.model_folder)
        with must_be_written(run_dir.path):
            ControlWords.create(run_dir.path, plan.args)
        self._ledgers: dict[int, EngineLedger] = {}  # by replica: what its engine was told
        self._exit_code: int | None = None
        self._runtime_asked_to_stop = False
        for child in children:
            self._adopt(child, self._replacer.generation_of(child.key))

    def run(self) -> int:
        """Supervise the server until nothing of it is left. Returns the exit code."""
        self._selector.register(self._signals, selectors.EVENT_READ)
        if self._lifeline:
            self._selector.register(self._lifeline, selectors.EVENT_READ)
        if self._plan.url is not None:
            with contextlib.suppress(OSError):  # without the file, `srt health` does not find this server
                (self._run_dir.path / ADDRESS_FILE).write_text(self._plan.url, "ascii")
        for key in self._streams:
            self._send_start(key, self._replacer.generation_of(key))
        if self._hosts is not None:
            self._selector.register(self._hosts, selectors.EVENT_READ)
            for key in self._hosts.children:
                self._start_elsewhere(self._hosts, key, self._replacer.generation_of(key))
        self._notify_runtime(
            EngineStarted(
                str(self._run_dir.path),
                self._replacer.generations,
                str(self._plan.model_folder),
                self._plan.num_http_frontends,
                self._plan.url,
            )
        )
        # Handle what came before the selector was set up.
        self._reap()
        self._hear_runtime()
        self._hear_hosts()
        while self._exit_code is None:
            self._wait_and_handle()
        return self._exit_code

    def _adopt(self, child: ChildProcess, generation: int) -> None:
        """Register this process under its key, and listen to it."""
        self._children[child.key] = child
        self._by_pid[child.popen.pid] = child.key
        stream = self._streams[child.key] = MessageStream(child.socket, generation)
        self._selector.register(stream, selectors.EVENT_READ, child.key)

    def _send_start(self, key: ChildKey, generation: int) -> None:
        start = ChildStart(
            role=key.role,
            index=key.index,
            generation=generation,
            run_dir=str(self._run_dir.path),
            model_folder=str(self._plan.model_folder),
            num_frontends=self._num_frontends,
            args=self._plan.args,
            num_tokens=self._num_tokens(key),
            checkpoint_version=self._checkpoint_version,
            replica=key.replica,
            engines=self._replacer.generations if key.role == "frontend" else [],
            ledger=self._ledgers.get(key.replica, EngineLedger()),
            meeting=None if self._hosts is None else self._hosts.meeting(key),
        )
        with contextlib.suppress(PeerGone):  # its exit is noticed like any other
            self._streams[key].send(start)

    @property
    def _num_frontends(self) -> int:
        return self._plan.num_http_frontends + (self._lifeline is not None)

    def _start_elsewhere(self, hosts: Hosts, key: ChildKey, generation: int) -> None:
        ledger = self._ledgers.get(key.replica, EngineLedger())
        hosts.start(key, generation, self._num_frontends, self._num_tokens(key), ledger)

    def _num_tokens(self, key: ChildKey) -> int:
        """Return the KV tokens of the worker that this one replaces; 0 if it replaces none."""
        num_tokens = self._report.value(key, "max_total_num_tokens") if key.role == "worker" else None
        return num_tokens if isinstance(num_tokens, int) else 0

    def _wait_and_handle(self) -> None:
        now_s = time.monotonic()
        self._heartbeat.beat(now_s)
        self._service_manager.beat(now_s)
        # Handle messages before deaths: a child's last message explains why it ended.
        timeout_s, asleep_since_s = self._timeout_s(), time.monotonic()
        ready = self._selector.select(timeout_s)
        if timeout_s is not None and time.monotonic() - asleep_since_s > timeout_s + OVERSLEPT_S:
            self._replacer.excuse(time.monotonic())
            if self._hosts is not None:
                self._hosts.excuse(time.monotonic())
        for selected, _ in ready:
            if isinstance(selected.data, ChildKey):
                self._hear(selected.data)
        for selected, _ in ready:
            if selected.fileobj is self._signals:
                self._handle_signals()
            elif selected.fileobj is self._lifeline:
                self._hear_runtime()
            elif selected.fileobj is self._hosts:
                self._hear_hosts()
        if self._hosts is not None:
            for event in self._hosts.tend(time.monotonic()):
                self._handle_host(event)
        self._bury_unborn()
        self._apply(self._replacer.tick(time.monotonic()))
        if self._replacer.state is State.STARTING:
            self._display.update(self._report, None, time.monotonic())

    def _timeout_s(self) -> float | None:
        times = [due_s for due_s, _ in self._unborn.values()]
        if (next_tick_s := self._replacer.next_tick_s()) is not None:
            times.append(next_tick_s)
        timeout_s = max(0.0, min(times) - time.monotonic()) if times else None
        if self._replacer.state is State.STARTING:
            return REFRESH_S if timeout_s is None else min(REFRESH_S, timeout_s)
        return timeout_s

    # ---- What comes in

    def _hear(self, key: ChildKey) -> None:
        """Handle all messages that this child has sent."""
        stream = self._streams.get(key)
        while stream is not None and stream is self._streams.get(key):
            try:
                message = stream.receive()
            except PeerGone:
                self._drop_stream(key)
                self._handle(LinkLost(key, None))
                return
            except LinkBroken as error:
                self._drop_stream(key)
                self._handle(LinkLost(key, str(error)))
                return
            if message is None:
                return
            if not isinstance(message, FromChild):
                self._drop_stream(key)
                self._handle(LinkLost(key, f"unexpected {type(message).__name__}"))
                return
            self._heard(key, message)

    def _heard(self, key: ChildKey, message: FromChild) -> None:
        if isinstance(message, RecordLedger):
            self._ledgers[key.replica] = message.ledger
            return
        now_s = time.monotonic()
        if self._replacer.state is State.STARTING and self._report.record(key, message, now_s):
            self._display.update(self._report, key, now_s)
        self._handle(ChildSpoke(key, message))

    def _hear_hosts(self) -> None:
        """Handle what other hosts and their processes say."""
        for news in () if self._hosts is None else self._hosts.receive():
            if isinstance(news, str):
                self._display.say(news)
            elif not isinstance(news, ChildSaid):
                self._handle_host(news)
            elif isinstance(news.message, FromChild):
                # Each host has a clock of its own.
                now_s = time.monotonic()
                message = news.message
                self._heard(news.child, replace(message, at_s=now_s) if isinstance(message, Progress) else message)

    def _handle_host(self, event: Event) -> None:
        self._handle(event)
        if isinstance(event, HostLost) and self._replacer.state is State.READY:  # otherwise it is the reason of the end
            self._display.error(f"{event.sentence} What ran there is started again when it is back.")

    def _drop_stream(self, key: ChildKey) -> None:
        stream = self._streams.pop(key)
        self._selector.unregister(stream)
        stream.close()

    def _handle_signals(self) -> None:
        for number in self._signals.drain():
            if number in STOP_SIGNALS:
                self._handle(StopAsked(GRACE_S))
        self._reap()

    def _reap(self) -> None:
        for pid, status in reap():
            key = self._by_pid.pop(pid, None)
            if key is not None:
                returncode = self._children[key].bury(status)
                self._hear(key)
                self._handle(ChildExited(key, returncode))

    def _hear_runtime(self) -> None:
        """Handle the Runtime's request to stop, by a message or by the end of the lifeline; only the first one counts."""
        if self._lifeline is None or self._runtime_asked_to_stop:
            return
        try:
            while (message := self._lifeline.receive()) is not None:
                if isinstance(message, Stop):
                    self._stop_for_runtime(self._lifeline, message.grace_s)
                    return
        except (PeerGone, LinkBroken):
            self._stop_for_runtime(self._lifeline, 0.0)

    def _stop_for_runtime(self, lifeline: MessageStream, grace_s: float) -> None:
        self._runtime_asked_to_stop = True
        self._selector.unregister(lifeline)
        self._handle(StopAsked(grace_s))

    # ---- What goes out

    def _handle(self, event: Event) -> None:
        self._apply(self._replacer.handle(event, time.monotonic()))

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Tell(child, message):
                    self._tell(child, message)
                case TellRuntime(message):
                    self._notify_runtime(message)
                case Kill(child):
                    self._kill(child)
                case SaveReport():
                    self._save_report()
                case BecameReady():
                    self._announce_ready()
                case Start(children, generation, reason):
                    self._start(children, generation, reason)
                case ServesAgain(children, after_s):
                    self._display.say(f"{_names(children)} at work again after {after_s:.1f} s.")
                case Stopping(grace_s):
                    self._service_manager.stopping()
                    if self._lifeline is None:  # a Runtime's program knows what it does
                        self._display.say(
                            f"Stopping; running requests have {grace_s:.0f} s to finish (press Ctrl-C again to stop at once)."
                        )
                case Finish(exit_code, reason):
                    self._finish(exit_code, reason)
                case _:
                    assert_never(effect)

    def _tell(self, child: ChildKey, message: ServerReady | EngineReplaced | EngineLost | Stop) -> None:
        if self._hosts is not None and self._hosts.owns(child):
            self._hosts.tell(child, message)
        elif child in self._streams:
            if self._hosts is not None and isinstance(message, EngineReplaced):
                message = replace(message, address=self._hosts.frontend_address(message.replica))
            with contextlib.suppress(PeerGone):
                self._streams[child].send(message)

    def _start(self, keys: tuple[ChildKey, ...], generation: int, reason: str) -> None:
        self._display.error(f"{reason} {_names(keys)} replaced.")
        for key in keys:
            if self._hosts is not None and self._hosts.owns(key):
                self._start_elsewhere(self._hosts, key, generation)
                self._heartbeat.count_replacement()
                continue
            if key in self._streams:  # a process that the old child started still holds the other end
                self._drop_stream(key)
            try:
                self._adopt(self._spawn(key), generation)
            except StartError as error:
                self._unborn[key] = time.monotonic() + UNBORN_S, str(error)
                continue
            self._heartbeat.count_replacement()
            self._send_start(key, generation)

    def _bury_unborn(self) -> None:
        """Report children that could not be started as ended, each with its reason."""
        now_s = time.monotonic()
        for key in [key for key, (due_s, _) in self._unborn.items() if due_s <= now_s]:
            _, sentence = self._unborn.pop(key)
            self._handle(ChildSpoke(key, Failed(sentence)))
            self._handle(ChildExited(key, 1))

    def _kill(self, key: ChildKey) -> None:
        """Kill the child's whole process group: a helper that it started must not outlive it."""
        if self._hosts is not None and self._hosts.owns(key):
            self._hosts.kill(key)
            return
        pid = self._children[key].popen.pid
        if self._by_pid.get(pid) == key:  # not reaped yet, so the pid is still its own
            if is_exiting(pid):
                self._replacer.was_dying(key)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _save_report(self) -> None:
        path = self._run_dir.path / STARTUP_FILE
        with must_be_written(path):
            self._report.write(path, time.monotonic())

    def _announce_ready(self) -> None:
        took_s = time.monotonic() - self._report.started_s
        if self._plan.args.log_level == "debug":
            self._display.say(self._report.table())
        where = f" at {self._plan.url}" if self._plan.url else ""
        self._display.say(f"Ready{where} after {took_s:.1f} s.")
        self._service_manager.ready(f"Ready{where}")
        self._notify_runtime(ServerReady(took_s))

    def _finish(self, exit_code: int, reason: str | None) -> None:
        if reason is not None:
            self._notify_runtime(Failed(reason))
            self._service_manager.failed(reason)
            self._display.error(reason)
        if self._hosts is not None:
            self._hosts.close(reason or "")
        self._exit_code = exit_code

    def _notify_runtime(self, message: EngineStarted | ServerReady | EngineReplaced | EngineLost | Failed) -> None:
        if self._lifeline:
            with contextlib.suppress(PeerGone):
                self._lifeline.send(message)


def _names(keys: tuple[ChildKey, ...]) -> str:
    names = [str(key) for key in keys]
    text = f"{', '.join(names[:-1])} and {names[-1]} are" if len(names) > 1 else f"{names[0]} is"
    return text.capitalize()
