"""State that all routes share: the options, the engine once it has started, and whether requests are accepted."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import orjson

from srt.entrypoints.health_probe import HealthProbe
from srt.entrypoints.live_feed import LiveFeed, Snapshot, memory_shares
from srt.entrypoints.openai.responses.store import ResponseStore
from srt.entrypoints.profiler import Profiler
from srt.managers.process.heartbeats import STUCK_S, HeartbeatReader, ProcessStatus
from srt.managers.process.replica_layout import ReplicaLayout, layouts_of
from srt.managers.process.run_files import ENGINE_STATE_PREFIX
from srt.managers.process.runtime_switches import ControlWords
from srt.managers.process.startup_report import STARTUP_FILE
from srt.managers.process.tracer import Tracer
from srt.managers.process.watchdog import longest_step_s
from srt.managers.tokenizer_manager.api_types import RequestError
from srt.managers.tokenizer_manager.frontend_metrics import FRONTEND_PREFIX, NAMES, FrontendMetrics
from srt.managers.tokenizer_manager.replica_counters import combined
from srt.managers.tokenizer_manager.tokenizer_manager import TokenizerManager
from srt.server_args import ServerArgs
from srt.utils.shared_numbers import NumberFiles

STARTING, READY, DRAINING = "starting", "ready", "draining"
ANSWER_S = 3.0  # the scheduler handles messages between steps: a longer wait means that a step hangs


class Service:
    """The frontend's shared state: starting, then ready, then draining. Only the process's main loop advances it."""

    def __init__(
        self, args: ServerArgs, index: int = 0, run_dir: Path | None = None, tracer: Tracer | None = None
    ) -> None:
        """Create the service of frontend `index`. The server's processes share their state in files in `run_dir`."""
        self.args = args
        self.index = index
        self.run_dir = run_dir
        self.tracer = tracer or Tracer()
        self.metrics = FrontendMetrics(run_dir, index)
        self.control = ControlWords.open(run_dir or "", args)
        self._frontend_files = None if run_dir is None else NumberFiles(run_dir, FRONTEND_PREFIX)
        self._engine_files = None if run_dir is None else NumberFiles(run_dir, ENGINE_STATE_PREFIX)
        self._heartbeats = None if run_dir is None else HeartbeatReader(run_dir, longest_step_s(args) * 2 / 3)
        self.status = STARTING
        self.startup_s: float | None = None
        self._engine: TokenizerManager | None = None
        self._draining = asyncio.Event()
        self.feed = LiveFeed(self.snapshot, self.wait_draining)
        self.probe = HealthProbe()
        self.responses = ResponseStore() if args.enable_response_store else None
        self.profiler = Profiler(
            run_dir, self.control, lambda: [status for status in self.process_statuses() if status.pid]
        )  # those of other hosts write no traces here

    def begin(self, engine: TokenizerManager, startup_s: float) -> None:
        """Accept requests from now on, because the whole server is ready."""
        self._engine = engine
        self.startup_s = startup_s
        if self.status == STARTING:
            self.status = READY

    def drain(self) -> None:
        """Accept no more requests; running ones may finish."""
        self.status = DRAINING
        self._draining.set()

    async def wait_draining(self) -> None:
        """Wait until no more requests are accepted."""
        await self._draining.wait()

    def startup_report(self) -> Any:
        """Return when each phase of each process began; None if the supervisor has not written it yet."""
        if self.run_dir is None:
            return None
        try:
            return orjson.loads((self.run_dir / STARTUP_FILE).read_bytes())
        except (OSError, orjson.JSONDecodeError):
            return None

    def process_statuses(self) -> list[ProcessStatus]:
        """Return when each process last sent a heartbeat and last made progress, from shared memory without waiting."""
        return [] if self._heartbeats is None else self._heartbeats.read(time.monotonic())

    def trouble(self, statuses: list[ProcessStatus]) -> str | None:
        """Return why the engine cannot serve now, judged without asking it; None if no trouble is known."""
        if self.has_lost_engine:
            return self._why_lost
        if self._heartbeats is None:
            return None
        troubles = [self._trouble_with(layout, self._heartbeats, statuses) for layout in layouts_of(self.args)]
        return None if None in troubles else troubles[0]  # one replica that works is enough

    def _trouble_with(
        self, layout: ReplicaLayout, heartbeats: HeartbeatReader, statuses: list[ProcessStatus]
    ) -> str | None:
        """Return why the server cannot serve now if this replica must do it; None if no trouble is known."""
        members = [str(layout.scheduler), *map(str, layout.workers)]
        others = ("scheduler", "worker")
        own = [one for one in statuses if one.process in members or not one.process.startswith(others)]
        expected = [] if self.status == STARTING else ["supervisor", *members]
        return heartbeats.trouble(own, f"frontend {self.index}", expected)

    def process_trouble(self, status: ProcessStatus) -> str | None:
        """Return why one process, of this frontend's siblings too, cannot serve now; None if no trouble is known."""
        if self.has_lost_engine and status.process.startswith(("scheduler", "worker")):
            return self._why_lost
        return status.trouble(STUCK_S) if self._heartbeats is None else self._heartbeats.trouble_of(status)

    def frontend_numbers(self) -> dict[str, float]:
        """Return the metrics summed over all frontends."""
        if self._frontend_files is None:
            return self.metrics.numbers.values()
        all_of_them = self._frontend_files.read().values()
        return {name: sum(one.get(name, 0.0) for one in all_of_them) for name in NAMES}

    def engine_numbers(self) -> dict[int, dict[str, float]]:
        """Return the counters that each replica's scheduler published last; nothing of those that have published none."""
        found = {} if self._engine_files is None else self._engine_files.read()
        return {int(replica): numbers for replica, numbers in found.items()}

    @property
    def is_ready(self) -> bool:
        return self.status == READY and self._engine is not None and self._engine.is_ready

    @property
    def has_lost_engine(self) -> bool:
        """True if there was an engine and it is gone; also while its replacement has not answered yet."""
        return self._engine is not None and not self._engine.is_ready

    @property
    def _why_lost(self) -> str:
        return (
            "The engine has ended." if self._engine is None or self._engine.is_dead else "The engine is being replaced."
        )

    def engine(self) -> TokenizerManager:
        """Return the engine for a new request; raise RequestError (503) if there is none. While it is being replaced, requests wait in
        it."""
        if self.status == DRAINING:
            raise RequestError(503, "The server is shutting down.", retry_after_s=5)
        if self._engine is None:
            raise RequestError(503, "The server is starting.", retry_after_s=2)
        if self._engine.is_dead:
            raise RequestError(503, "The engine is not available at the moment.", retry_after_s=2)
        return self._engine

    async def snapshot(self) -> Snapshot:
        """Return the server's present state. `engine` holds the scheduler's counters, or None while it does not answer."""
        values: Snapshot = {
            "model": self.args.model_names()[0],
            "health": self.status,
            "is_paused": False,
            "num_running": None,
            "num_waiting": None,
            "engine": None,
            "memory": None,
            "frontend": {"index": self.index, "live_requests": 0},
        }
        with contextlib.suppress(RequestError):  # the engine has not started yet, or has ended
            values |= await _engine_values(self.engine(), self.index)
        if values["health"] == READY:
            values["health"] = "connected"
        statuses = self.process_statuses()
        trouble = self.trouble(statuses)
        if self.has_lost_engine:
            values["health"] = "lost"
        elif trouble is not None and values["health"] == "connected":
            values["health"] = "stuck"
        processes = [self._process(status) for status in statuses]
        return values | {"time": time.monotonic(), "trouble": trouble, "processes": processes}

    def _process(self, status: ProcessStatus) -> dict[str, Any]:
        trouble = self.process_trouble(status)
        return {
            "name": status.process,
            "pid": status.pid,
            "is_well": trouble is None,
            "words": trouble or ("at work" if status.age_s > 0 else "well"),
        }


async def _engine_values(engine: TokenizerManager, frontend: int) -> Snapshot:
    values: Snapshot = {"frontend": {"index": frontend, **engine.stats()}}
    if engine.load is not None:
        values |= {"num_running": engine.load.num_running, "num_waiting": engine.load.num_waiting}
    try:
        async with asyncio.timeout(ANSWER_S):
            states = await engine.get_states(is_own=True)
    except (TimeoutError, RequestError):
        return values | {"health": "not answering"}
    counters = combined([one.values for one in states.values()])
    return values | {
        **({"replicas": list(states)} if len(states) > 1 else {}),
        "is_paused": counters.get("is_paused", False),
        "num_running": counters["num_running"],
        "num_waiting": counters["num_waiting"],
        "engine": counters,
        "memory": memory_shares(counters),
    }
