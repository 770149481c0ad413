"""`GET /metrics`: the whole server's metrics in Prometheus' text format, under SGLang's name where SGLang has the metric.

Everything is read from memory that the processes share: any frontend can answer for all of them, even while the engine hangs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from srt.entrypoints.exchange import Exchange
from srt.entrypoints.service import Service
from srt.managers.tokenizer_manager.frontend_metrics import COUNTERS, HISTOGRAMS, STATUS_CLASSES, histogram_names
from srt.version import __version__

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

Numbers = Mapping[str, float]
Labels = Mapping[str, str]

_COUNTER_HELP = {
    "prompt_tokens": "Prompt tokens.",
    "generation_tokens": "Generated tokens.",
    "cached_tokens": "Prompt tokens whose keys and values came from the prefix cache.",
    "num_requests": "Requests sent to the engine.",
    "num_aborted_requests": "Requests that ended because the client left or aborted them.",
    "num_failed_requests": "Requests that ended with an error.",
    "num_refused_requests": "Requests that the engine refused, such as those beyond a full queue.",
}
_HISTOGRAM_HELP = {
    "time_to_first_token": "Seconds from a request's arrival to its first token.",
    "inter_token_latency": "Seconds between two tokens of a request.",
    "e2e_request_latency": "Seconds from a request's arrival to its end.",
}


async def metrics(exchange: Exchange, service: Service) -> None:
    """Return counters, gauges and histograms of the whole server in Prometheus' text format."""
    await exchange.send(200, render(service).encode(), [(b"content-type", CONTENT_TYPE)])


def render(service: Service) -> str:
    page = Page({"model_name": service.args.model_names()[0]})
    _frontends(page, service.frontend_numbers())
    engine = service.engine_numbers()
    if engine:
        _engine(page, engine)
    _processes(page, service)
    return page.text()


class Page:
    """A page of metrics, in the order in which they are added."""

    def __init__(self, labels: Labels) -> None:
        """Start an empty page; every sample gets `labels`."""
        self._labels = labels
        self._lines: list[str] = []

    def counter(self, name: str, text: str, samples: Iterable[tuple[Labels, float]]) -> None:
        """Add a counter; its name must end with _total."""
        self._family(name, "counter", text)
        for labels, value in samples:
            self._sample(name, labels, value)

    def gauge(self, name: str, text: str, samples: Iterable[tuple[Labels, float]]) -> None:
        self._family(name, "gauge", text)
        for labels, value in samples:
            self._sample(name, labels, value)

    def histogram(
        self, name: str, text: str, buckets: Iterable[tuple[float, float]], above: float, total: float
    ) -> None:
        """Add a histogram.

        buckets: pairs of a bound and the number of values at most that and above the bound before.
        above: number of values above all bounds.
        total: sum of all values.
        """
        self._family(name, "histogram", text)
        count = 0.0
        for bound, one in buckets:
            count += one
            self._sample(f"{name}_bucket", {"le": f"{bound:g}"}, count)
        self._sample(f"{name}_bucket", {"le": "+Inf"}, count + above)
        self._sample(f"{name}_sum", {}, total)
        self._sample(f"{name}_count", {}, count + above)

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def _family(self, name: str, kind: str, text: str) -> None:
        self._lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]

    def _sample(self, name: str, labels: Labels, value: float) -> None:
        shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in {**self._labels, **labels}.items())
        self._lines.append(f"{name}{{{shown}}} {int(value) if value == int(value) else value}")


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _frontends(page: Page, numbers: Numbers) -> None:
    for name in COUNTERS:
        page.counter(f"sglang:{name}_total", _COUNTER_HELP[name], [({}, numbers[name])])
    for name, bounds in HISTOGRAMS.items():
        *buckets, above, total = (numbers[one] for one in histogram_names(name))
        text = _HISTOGRAM_HELP[name]
        page.histogram(f"sglang:{name}_seconds", text, zip(bounds, buckets, strict=True), above, total)
    responses = [({"status": status}, numbers[f"http_{status}"]) for status in STATUS_CLASSES]
    page.counter("srt:http_responses_total", "HTTP responses, by the class of their status.", responses)


def _engine(page: Page, engine: Numbers) -> None:
    size, pages = engine["page_size"], engine["num_total_pages"]
    cached = engine["num_cached_pages"] - engine["num_pinned"]
    in_use = pages - engine["num_free_pages"] - cached
    gauges = [
        ("sglang:num_running_reqs", "Running requests.", engine["num_running"]),
        ("sglang:num_queue_reqs", "Waiting requests.", engine["num_waiting"]),
        ("sglang:num_used_tokens", "Tokens of KV memory used by running requests.", in_use * size),
        ("sglang:token_usage", "Share of the KV memory used by running requests.", in_use / pages),
        ("sglang:max_total_num_tokens", "Capacity of the KV memory in tokens.", pages * size),
        (
            "sglang:gen_throughput",
            "Generated tokens per second, over the last seconds.",
            engine["gen_throughput"],
        ),
        (
            "sglang:cache_hit_rate",
            "Share of the latest prompts' tokens found in the prefix cache.",
            engine["cache_hit_rate"],
        ),
        (
            "sglang:num_retracted_reqs",
            "Preemptions in the last seconds: requests that lost their slots to others.",
            engine["num_recently_preempted"],
        ),
        (
            "srt:prompt_throughput",
            "Computed prompt tokens per second, over the last seconds.",
            engine["prompt_throughput"],
        ),
    ]
    for name, text, value in gauges:
        page.gauge(name, text, [({}, value)])
    states = {"free": engine["num_free_pages"], "running": in_use, "cached": cached}
    page.gauge("srt:kv_pages", "Pages of KV memory by state.", [({"state": s}, n) for s, n in states.items()])
    page.counter("srt:steps_total", "Steps of the model.", [({}, engine["num_steps"])])
    page.counter(
        "srt:retractions_total",
        "Preemptions: requests that lost their slots to others.",
        [({}, engine["num_preempted"])],
    )
    _engine_histogram(
        page, engine, "sglang:queue_time_seconds", "Seconds from a request's arrival to its slot.", "queue_ms"
    )
    _engine_histogram(
        page, engine, "srt:step_time_seconds", "Seconds that a step took, as the workers report it.", "step_ms"
    )


def _engine_histogram(page: Page, engine: Numbers, name: str, text: str, key: str) -> None:
    prefix = f"{key}_to_"
    bounds = [
        (float(one.removeprefix(prefix)) / 1000, value) for one, value in engine.items() if one.startswith(prefix)
    ]
    total = engine["queue_us"] / 1e6 if key == "queue_ms" else engine[f"{key}_sum"] / 1000
    page.histogram(name, text, bounds, engine[f"{key}_above"], total)


def _processes(page: Page, service: Service) -> None:
    statuses = service.process_statuses()
    is_healthy = service.trouble(statuses) is None
    page.gauge(
        "srt:is_ready",
        "1 if requests are accepted and the processes that serve them work, else 0.",
        [({}, service.is_ready and is_healthy)],
    )
    page.counter(
        "srt:replaced_processes_total",
        "Processes that ended and were replaced.",
        [({}, sum(status.num_replaced for status in statuses))],
    )
    page.gauge(
        "srt:process_silent_seconds",
        "Seconds since a process's last heartbeat.",
        [({"process": status.process}, round(status.silent_s, 3)) for status in statuses],
    )
    page.gauge(
        "srt:process_progress_age_seconds",
        "Seconds since a process last made progress.",
        [({"process": status.process}, round(status.age_s, 3)) for status in statuses],
    )
    page.gauge("srt:info", "Always 1; the label is the version.", [({"version": __version__}, 1)])
