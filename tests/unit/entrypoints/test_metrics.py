"""/metrics, read by Prometheus' own parser."""

from __future__ import annotations

import math
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from srt.entrypoints.metrics import CONTENT_TYPE, Page, render
from srt.entrypoints.service import Service
from srt.managers.process.heartbeats import HeartbeatWriter
from srt.managers.scheduler.counters import Counters
from srt.managers.scheduler.engine_status import EngineStatus
from srt.managers.tokenizer_manager.frontend_metrics import FrontendMetrics
from srt.server_args import ServerArgs
from tests.unit.entrypoints.fake_engine import World
from tests.unit.managers.scheduler.scheduler_host import Host, request

# What dashboards made for SGLang ask for.
KNOWN = {
    "counter": "prompt_tokens generation_tokens cached_tokens num_requests num_aborted_requests",
    "gauge": "num_running_reqs num_queue_reqs num_used_tokens token_usage gen_throughput cache_hit_rate"
    " num_retracted_reqs max_total_num_tokens",
    "histogram": "time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds queue_time_seconds",
}


def families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(family: Metric, suffix: str = "", **labels: str) -> float:
    (found,) = (
        s.value for s in family.samples if s.name == family.name + suffix and labels.items() <= s.labels.items()
    )
    return float(found)


def server(run_dir: Path) -> Service:
    """The first of two frontends, and a scheduler that has done something."""
    host = Host()
    host.say(request(1, [1] * 9, max_new=4))
    host.run()
    counters = host.scheduler.counters()
    assert counters is not None
    status = EngineStatus(run_dir, None)
    status.record_step(2500)
    status.publish(counters, 100.0)
    return Service(ServerArgs(model_path='a "model"'), 0, run_dir)


def test_every_name_that_dashboards_know_is_there_with_its_type(tmp_path: Path) -> None:
    found = families(render(server(tmp_path)))
    for kind, names in KNOWN.items():
        for name in names.split():
            assert found[f"sglang:{name}"].type == kind
            assert all(s.labels["model_name"] == 'a "model"' for s in found[f"sglang:{name}"].samples)
    assert all(family.documentation for family in found.values())


def test_the_engines_numbers_are_those_of_the_scheduler(tmp_path: Path) -> None:
    found = families(render(server(tmp_path)))
    assert value(found["sglang:max_total_num_tokens"]) == 64 * 4
    assert value(found["sglang:num_running_reqs"]) == 0
    assert sum(value(found["srt:kv_pages"], state=state) for state in ("free", "running", "cached")) == 64
    assert value(found["srt:steps"], "_total") == 4
    assert value(found["sglang:queue_time_seconds"], "_count") == 1
    step = found["srt:step_time_seconds"]
    assert (value(step, "_count"), value(step, "_sum")) == (1, 0.0025)
    assert (value(step, "_bucket", le="0.002"), value(step, "_bucket", le="0.003")) == (0, 1)


def test_each_layer_with_experts_has_its_load(tmp_path: Path) -> None:
    assert "srt:distinct_experts" not in families(render(server(tmp_path)))
    counters = Counters(distinct_experts=(5.5, 7.0), peak_loads=(1.25, 3.0)).values()
    host = Host().scheduler.counters()
    assert host is not None
    EngineStatus(tmp_path, None).publish(host | counters, 100.0)
    found = families(render(Service(ServerArgs(model_path="m"), 0, tmp_path)))
    assert [value(found["srt:distinct_experts"], layer=str(layer)) for layer in range(2)] == [5.5, 7.0]
    assert [value(found["srt:peak_expert_load"], layer=str(layer)) for layer in range(2)] == [1.25, 3.0]


def test_whichever_frontend_is_asked_tells_for_all(tmp_path: Path) -> None:
    services = [Service(ServerArgs(model_path="m"), index, tmp_path) for index in range(2)]
    for index, service in enumerate(services):
        service.metrics.add("prompt_tokens", 10 + index)
        service.metrics.first_token_s.record(0.03)
        service.metrics.count_response(200)
    texts = [render(service) for service in services]
    assert texts[0] == texts[1]
    found = families(texts[0])
    assert value(found["sglang:prompt_tokens"], "_total") == 21
    assert value(found["sglang:time_to_first_token_seconds"], "_count") == 2
    assert value(found["srt:http_responses"], "_total", status="2xx") == 2


def test_a_frontend_that_takes_the_place_of_another_goes_on_counting(tmp_path: Path) -> None:
    FrontendMetrics(tmp_path, 0).add("num_requests", 5)
    after = FrontendMetrics(tmp_path, 0)
    after.add("num_requests")
    assert (
        families(render(Service(ServerArgs(model_path="m"), 0, tmp_path)))["sglang:num_requests"].samples[0].value == 6
    )


def test_a_histogram_counts_up_to_its_bounds_and_all() -> None:
    metrics = FrontendMetrics()
    for seconds, times in ((0.004, 3), (0.005, 1), (1.5, 2), (1000.0, 1)):
        metrics.first_token_s.record(seconds, times)
    service = Service(ServerArgs(model_path="m"))
    service.metrics = metrics
    family = families(render(service))["sglang:time_to_first_token_seconds"]
    assert value(family, "_bucket", le="0.005") == 4
    assert value(family, "_bucket", le="1") == 4
    assert value(family, "_bucket", le="2") == 6
    assert value(family, "_bucket", le="400") == 6
    assert value(family, "_bucket", le="+Inf") == value(family, "_count") == 7
    assert math.isclose(value(family, "_sum"), 0.017 + 3 + 1000)


def test_a_frozen_process_is_seen_and_the_server_is_not_ready(tmp_path: Path) -> None:
    HeartbeatWriter(tmp_path, "worker 0").beat(1.0)
    found = families(render(server(tmp_path)))
    assert value(found["srt:process_silent_seconds"], process="worker 0") > 5
    assert value(found["srt:is_ready"]) == 0


def test_processes_that_were_replaced_are_counted(tmp_path: Path) -> None:
    supervisor = HeartbeatWriter(tmp_path, "supervisor")
    supervisor.beat(1.0)
    for _ in range(3):
        supervisor.count_replacement()
    HeartbeatWriter(tmp_path, "worker 0").beat(1.0)
    assert value(families(render(server(tmp_path)))["srt:replaced_processes"], "_total") == 3


def test_without_an_engine_there_are_only_the_frontends_numbers() -> None:
    world = World(ready=False)
    answer = world.get("/metrics")
    assert answer.headers["content-type"].encode() == CONTENT_TYPE
    found = families(answer.text)
    assert "sglang:num_requests" in found
    assert "sglang:num_running_reqs" not in found


def test_responses_are_counted_by_their_class() -> None:
    world = World()
    world.get("/health")
    world.get("/nowhere")
    found = families(world.get("/metrics").text)["srt:http_responses"]
    assert (value(found, "_total", status="2xx"), value(found, "_total", status="4xx")) == (1, 1)


def test_what_a_label_may_not_hold_is_escaped() -> None:
    page = Page({})
    page.gauge("x", "Text.", [({"a": 'b"c\\d\ne'}, 1.5)])
    (family,) = text_string_to_metric_families(page.text())
    assert family.samples[0].labels == {"a": 'b"c\\d\ne'}
    assert family.samples[0].value == 1.5
