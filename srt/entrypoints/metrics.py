"""`GET /metrics`: the whole server's metrics in Prometheus' text format, under SGLang's name where SGLang has the metric.

Everything is read from memory that the processes share: any frontend can answer for all of them, even while the engine hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

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
    engines = service.engine_numbers()
    if engines:
        has_one = service.args.dp_size == 1
        _engines(page, [({} if has_one else {"dp_rank": str(one)}, numbers) for one, numbers in engines.items()])
    _processes(page, service)
    return page.text()


class Histogram(NamedTuple):
    """The values of a histogram."""

    buckets: list[tuple[float, float]]  # a bound, and the number of values at most that and above the bound before
    above: float  # number of values above all bounds
    total: float  # sum of all values


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

    def histogram(self, name: str, text: str, samples: Iterable[tuple[Labels, Histogram]]) -> None:
        self._family(name, "histogram", text)
        for labels, histogram in samples:
            count = 0.0
            for bound, one in histogram.buckets:
                count += one
                self._sample(f"{name}_bucket", {**labels, "le": f"{bound:g}"}, count)
            count += histogram.above
            self._sample(f"{name}_bucket", {**labels, "le": "+Inf"}, count)
            self._sample(f"{name}_sum", labels, histogram.total)
            self._sample(f"{name}_count", labels, count)

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
        histogram = Histogram(list(zip(bounds, buckets, strict=True)), above, total)
        page.histogram(f"sglang:{name}_seconds", text, [({}, histogram)])
    responses = [({"status": status}, numbers[f"http_{status}"]) for status in STATUS_CLASSES]
    page.counter("srt:http_responses_total", "HTTP responses, by the class of their status.", responses)


# Gauges of a replica: name, help, and the value from the counters that its scheduler publishes.
_ENGINE_GAUGES: list[tuple[str, str, Callable[[Numbers], float]]] = [
    ("sglang:num_running_reqs", "Running requests.", lambda n: n["num_running"]),
    ("sglang:num_queue_reqs", "Waiting requests.", lambda n: n["num_waiting"]),
    (
        "sglang:num_used_tokens",
        "Tokens of KV memory used by running requests.",
        lambda n: _pages(n)["running"] * n["page_size"],
    ),
    (
        "sglang:token_usage",
        "Share of the KV memory used by running requests.",
        lambda n: _pages(n)["running"] / n["num_total_pages"],
    ),
    (
        "sglang:max_total_num_tokens",
        "Capacity of the KV memory in tokens.",
        lambda n: n["num_total_pages"] * n["page_size"],
    ),
    (
        "sglang:gen_throughput",
        "Generated tokens per second, over the last seconds.",
        lambda n: n["gen_throughput"],
    ),
    (
        "sglang:cache_hit_rate",
        "Share of the latest prompts' tokens found in the prefix cache.",
        lambda n: n["cache_hit_rate"],
    ),
    (
        "sglang:num_retracted_reqs",
        "Preemptions in the last seconds: requests that lost their slots to others.",
        lambda n: n["num_recently_preempted"],
    ),
    (
        "srt:prompt_throughput",
        "Computed prompt tokens per second, over the last seconds.",
        lambda n: n["prompt_throughput"],
    ),
]


# Gauges of each layer with experts: how the names of the counters begin, before the layer's number, and help.
_EXPERT_GAUGES: dict[str, tuple[str, str]] = {
    "srt:distinct_experts": (
        "distinct_experts_of_layer_",
        "Experts of a layer that a step took, on average over the last second.",
    ),
    "srt:peak_expert_load": (
        "peak_load_of_layer_",
        "Tokens of a layer's busiest expert in the last second, as a multiple of the mean over all of its experts.",
    ),
}


def _pages(engine: Numbers) -> dict[str, float]:
    """Return the numbers of pages by state."""
    cached = engine["num_cached_pages"] - engine["num_pinned"]
    free = engine["num_free_pages"]
    return {"free": free, "running": engine["num_total_pages"] - free - cached, "cached": cached}


def _experts(page: Page, engines: Sequence[tuple[Labels, Numbers]]) -> None:
    """Add the gauges of each layer with experts, if the model has any."""
    for name, (beginning, text) in _EXPERT_GAUGES.items():
        samples = [
            ({**labels, "layer": number.removeprefix(beginning)}, value)
            for labels, engine in engines
            for number, value in engine.items()
            if number.startswith(beginning)
        ]
        if samples:
            page.gauge(name, text, samples)


def _engines(page: Page, engines: Sequence[tuple[Labels, Numbers]]) -> None:
    """Add the metrics of each replica, with its labels."""
    for name, text, value in _ENGINE_GAUGES:
        page.gauge(name, text, [(labels, value(engine)) for labels, engine in engines])
    lengths = [
        (labels, engine["num_verified_ids"] / engine["num_verified_rows"])
        for labels, engine in engines
        if engine["num_verified_rows"]
    ]
    if lengths:
        page.gauge("sglang:spec_accept_length", "Tokens that a row with drafts gets in a step, on average.", lengths)
        page.gauge(
            "srt:spec_draft_tokens",
            "Drafts that a row may bring in the latest step; 0 where steps without drafts bring more tokens in their time.",
            [(labels, engine["row_tokens"] - 1) for labels, engine in engines if engine["num_verified_rows"]],
        )
    _experts(page, engines)
    states = [({**labels, "state": state}, num) for labels, engine in engines for state, num in _pages(engine).items()]
    page.gauge("srt:kv_pages", "Pages of KV memory by state.", states)
    page.counter(
        "srt:steps_total", "Steps of the model.", [(labels, engine["num_steps"]) for labels, engine in engines]
    )
    page.counter(
        "srt:retractions_total",
        "Preemptions: requests that lost their slots to others.",
        [(labels, engine["num_preempted"]) for labels, engine in engines],
    )
    page.histogram(
        "sglang:queue_time_seconds",
        "Seconds from a request's arrival to its slot.",
        [(labels, _histogram(engine, "queue_ms", engine["queue_us"] / 1e6)) for labels, engine in engines],
    )
    page.histogram(
        "srt:step_time_seconds",
        "Seconds that a step took, as the workers report it.",
        [(labels, _histogram(engine, "step_ms", engine["step_ms_sum"] / 1000)) for labels, engine in engines],
    )


def _histogram(engine: Numbers, key: str, total: float) -> Histogram:
    prefix = f"{key}_to_"
    buckets = [
        (float(one.removeprefix(prefix)) / 1000, value) for one, value in engine.items() if one.startswith(prefix)
    ]
    return Histogram(buckets, engine[f"{key}_above"], total)


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
    page.gauge(
        "srt:is_deterministic",
        "1 with --enable-deterministic-inference, else 0.",
        [({}, service.args.enable_deterministic_inference)],
    )
    page.gauge("srt:info", "Always 1; the label is the version.", [({"version": __version__}, 1)])
