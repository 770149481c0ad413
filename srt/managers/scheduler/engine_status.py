"""Publication of the scheduler's counters in shared memory, and the status lines of the log."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from srt.managers.process.run_files import ENGINE_STATE_PREFIX
from srt.managers.scheduler.counters import Histogram
from srt.protocol.messages import Scalar
from srt.utils.logs import fields
from srt.utils.shared_numbers import SharedNumbers

PUBLISH_S = 0.25
STEP_MS = (1, 2, 3, 5, 7.5, 10, 15, 20, 30, 50, 75, 100, 200, 500, 1000, 2000, 5000, 10_000, 30_000)
STATUS_S = 10.0  # between two status lines, while steps run
RATE_S = 5.0  # period of the tokens per second

logger = logging.getLogger(__name__)


class EngineStatus:
    """Publishes the Scheduler's counters, at most every PUBLISH_S, and logs status lines."""

    def __init__(self, run_dir: str | Path, decode_log_interval: int | None, replica: int = 0) -> None:
        """Log a line every `decode_log_interval` steps, if that is given, whatever --log-level says."""
        if decode_log_interval is not None:
            logger.setLevel(logging.INFO)
        self._path = Path(run_dir) / f"{ENGINE_STATE_PREFIX}{replica}"
        self._log_interval = decode_log_interval
        self._numbers: SharedNumbers | None = None
        self._published_s = float("-inf")
        self._recent: deque[tuple[float, Mapping[str, float]]] = deque()
        self._step_ms = Histogram(*STEP_MS)
        self._step_us = 0
        self._last_throughput = 0.0
        self._hit_rate = 0.0
        self._values: Mapping[str, float] = {}  # the latest
        self._before: Mapping[str, float] = {}  # the next line reports changes since then
        self._before_s = 0.0
        self._logged_s = float("-inf")

    def is_due(self, now_s: float) -> bool:
        return now_s >= self._published_s + PUBLISH_S

    @property
    def due_s(self) -> float:
        """Time from which new values may be published."""
        return self._published_s + PUBLISH_S

    def record_step(self, step_us: int) -> None:
        """Record the duration of a step, as a worker reported it."""
        self._step_ms.record(step_us / 1000)
        self._step_us += step_us

    def publish(self, counters: Mapping[str, Scalar], now_s: float) -> None:
        values = {name: float(value) for name, value in counters.items() if isinstance(value, (int, float))}
        values |= {name: float(count) for name, count in self._step_ms.values("step_ms").items()}  # type: ignore[arg-type]
        values |= {"step_ms_sum": self._step_us / 1000, **self._rates(values, now_s)}
        if self._numbers is None or self._numbers.names != tuple(values):
            self._numbers = SharedNumbers.fresh(self._path, values)
        for place, value in enumerate(values.values()):
            self._numbers.cells[place] = value
        if not self._values.get("num_running"):  # idle time does not count
            self._before, self._before_s = self._values or values, max(self._published_s, now_s - PUBLISH_S)
        self._values, self._published_s = values, now_s
        self._log(values, now_s)

    def _rates(self, values: Mapping[str, float], now_s: float) -> dict[str, float]:
        """Return the rates of the last RATE_S seconds. Tokens per second are 0 when nothing runs."""
        recent = self._recent
        recent.append((now_s, values))
        while now_s - recent[0][0] > RATE_S:
            recent.popleft()
        before_s, before = recent[0]
        seconds = now_s - before_s if values["num_running"] else 0.0

        def added(name: str) -> float:
            return values[name] - before[name]

        generated = added("num_generated_tokens") / seconds if seconds else 0.0
        self._last_throughput = generated or self._last_throughput
        if added("num_prompt_tokens"):
            self._hit_rate = added("num_cached_tokens") / added("num_prompt_tokens")
        return {
            "gen_throughput": generated,
            "last_gen_throughput": self._last_throughput,
            "prompt_throughput": added("num_computed_prompt_tokens") / seconds if seconds else 0.0,
            "cache_hit_rate": self._hit_rate,
            "num_recently_preempted": added("num_preempted"),
        }

    def _log(self, values: Mapping[str, float], now_s: float) -> None:
        steps = values["num_steps"] - self._before["num_steps"]
        if self._log_interval is None:
            is_over = now_s - self._before_s >= STATUS_S or not values["num_running"]
            is_due = steps > 0 and is_over and now_s - self._logged_s >= STATUS_S
        else:
            is_due = steps >= self._log_interval
        if is_due:
            sentence, numbers = _status(self._before, values, now_s - self._before_s)
            logger.info("%s", sentence, extra=fields(**numbers))
            self._before, self._before_s, self._logged_s = values, now_s, now_s


def _status(before: Mapping[str, float], now: Mapping[str, float], seconds: float) -> tuple[str, dict[str, float]]:
    """Return a sentence and numbers about the changes from `before` to `now`."""

    def added(name: str) -> float:
        return now[name] - before[name]

    def share(part: float, whole: float) -> float:
        return part / whole if whole else 0.0

    steps, pages = added("num_steps"), now["num_total_pages"]
    in_use = pages - now["num_free_pages"] - (now["num_cached_pages"] - now["num_pinned"])
    numbers = {
        "num_running": now["num_running"],
        "num_waiting": now["num_waiting"],
        "gen_throughput": round(share(added("num_generated_tokens"), seconds), 1),
        "prompt_throughput": round(share(added("num_computed_prompt_tokens"), seconds), 1),
        "token_usage": round(share(in_use, pages), 4),
        "cache_hit_rate": round(share(added("num_cached_tokens"), added("num_prompt_tokens")), 4),
        "step_ms": round(share(added("step_us"), steps) / 1000, 2),
        "rows_per_step": round(share(added("num_rows"), steps), 1),
        "num_steps": steps,
    }
    sentence = (
        "{num_running:.0f} running, {num_waiting:.0f} waiting; {gen_throughput:.1f} tokens/s generated, {prompt_throughput:.1f}"
        " of prompts; KV memory {token_usage:.0%} in use, prefix hits {cache_hit_rate:.0%}; {num_steps:.0f} steps of"
        " {step_ms:.2f} ms with {rows_per_step:.1f} rows."
    )
    return sentence.format(**numbers), numbers
