"""What is counted and logged of requests, with an invented clock."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
from msgspec import structs

from srt.managers.process.runtime_switches import ControlWords
from srt.managers.tokenizer_manager.api_types import GenerateInput
from srt.managers.tokenizer_manager.frontend_metrics import FrontendMetrics
from srt.managers.tokenizer_manager.request_watch import SHORT_TEXT, RequestWatch
from srt.protocol.messages import Refused
from srt.sampling.sampling_params import SamplingParams
from srt.server_args import ServerArgs
from srt.utils.logs import JsonFormatter
from tests.unit.managers.scheduler.scheduler_host import request

INPUT = GenerateInput(params=SamplingParams.from_dict({"top_k": 5}), text="hi")


class World:
    def __init__(self, log_level: int | None = None) -> None:
        args = ServerArgs(model_path="m", log_requests=log_level is not None, log_requests_level=log_level or 0)
        self.metrics = FrontendMetrics()
        self.now = 100.0
        control = ControlWords.open("/nowhere", args)
        self.watch = RequestWatch(0, self.metrics, control, None, lambda ids: "".join(map(chr, ids)), lambda: self.now)

    def value(self, name: str) -> float:
        return self.metrics.numbers.get(name)

    def run(self, rid: int, how: str, tokens: str = "") -> None:
        watched = self.watch.began(INPUT, request(rid, [104, 105]), self.now)
        assert watched is not None
        for letter in tokens:
            self.now += 0.5
            self.watch.tokens(watched, 0, [ord(letter)], self.now)
        self.watch.ended(rid, how)


def test_times_and_tokens_of_a_request_are_counted() -> None:
    world = World()
    watched = world.watch.began(INPUT, request(1, [1] * 7), 100.0)
    assert watched is not None
    world.now = 100.3
    world.watch.tokens(watched, 0, [5], world.now)
    world.now = 100.48
    world.watch.tokens(watched, 0, [6, 7], world.now)
    world.watch.received(Refused(7, 429, "full"), world.now)
    world.watch.cached(1, 4)
    world.now = 101.0
    world.watch.ended(1, "stop")
    world.watch.ended(1, "abort")
    assert {name: world.value(name) for name in ("prompt_tokens", "generation_tokens", "cached_tokens")} == {
        "prompt_tokens": 7,
        "generation_tokens": 3,
        "cached_tokens": 4,
    }
    assert world.value("time_to_first_token_sum") == pytest.approx(0.3)
    assert world.value("inter_token_latency_sum") == pytest.approx(0.18)
    assert world.value("inter_token_latency_to_0.1") == 2
    assert world.value("e2e_request_latency_sum") == pytest.approx(1.0)
    assert (world.value("num_requests"), world.value("num_aborted_requests")) == (1, 0)
    assert world.watch.num_watched == 0


def test_the_time_between_tokens_is_that_of_a_choice_whatever_the_others_do() -> None:
    world = World()
    watched = world.watch.began(INPUT, request(1, [1]), 100.0)
    assert watched is not None
    for now in (101.0, 101.5, 102.0):
        for choice in range(4):
            world.watch.tokens(watched, choice, [5], now)
    world.watch.received(Refused(7, 429, "full"), 102.0)
    assert world.value("inter_token_latency_sum") == 4 * (102.0 - 101.0)
    assert world.value("inter_token_latency_to_0.4") == 0
    assert world.value("time_to_first_token_sum") == 1.0


@pytest.mark.parametrize(
    ("how", "counter"),
    [("abort", "num_aborted_requests"), ("error", "num_failed_requests"), ("refused", "num_refused_requests")],
)
def test_what_did_not_end_well_is_counted_apart_and_has_no_whole_time(how: str, counter: str) -> None:
    world = World()
    world.run(1, how)
    assert (world.value(counter), world.value("e2e_request_latency_sum")) == (1, 0)


def test_questions_about_the_engines_health_are_not_counted() -> None:
    world = World()
    assert world.watch.began(replace(INPUT, urgent=True), request(1, [1], urgent=True), 100.0) is None
    world.watch.ended(1, "length")
    assert set(world.metrics.numbers.values().values()) == {0.0}


def test_a_name_with_a_line_feed_begins_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    world = World(0)
    with caplog.at_level(logging.INFO):
        assert (
            world.watch.began(INPUT, structs.replace(request(1, [1]), label="a\nFAKE\x1b[31m"), world.now) is not None
        )
        world.watch.ended(1, "stop")
    began, ended = (record.getMessage() for record in caplog.records)
    assert began == "Request 'a\\nFAKE\\x1b[31m' arrived: 1 prompt tokens."
    assert ended.startswith("Request 'a\\nFAKE\\x1b[31m' ended (stop): ")


@pytest.mark.parametrize(
    ("level", "has"),
    [(0, set()), (1, {"sampling_params"}), (2, {"sampling_params", "prompt", "output"}), (3, {"prompt", "output"})],
)
def test_a_log_level_says_how_much_of_a_request_is_logged(
    level: int, has: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    world = World(level)
    with caplog.at_level(logging.INFO):
        world.run(1, "stop", "x" * (SHORT_TEXT + 1))
    began, ended = (json.loads(JsonFormatter("p").format(record)) for record in caplog.records)
    assert (began["event"], began["rid"], ended["event"], ended["how"]) == ("began", "r1", "ended", "stop")
    assert (ended["completion_tokens"], ended["first_token_s"]) == (SHORT_TEXT + 1, 0.5)
    assert has <= {*began, *ended}
    assert ("output" in ended) == (level >= 2)
    if level >= 1:
        assert began["sampling_params"] == {"top_k": 5}
    if level >= 2:
        assert began["prompt"] == "hi"
        assert len(ended["output"][0]) == SHORT_TEXT + 1
        assert ended["output"][0].endswith("…" if level == 2 else "x")


def test_lines_that_were_asked_for_come_at_every_log_level(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "srt"):
        caplog.handler.setLevel(logging.NOTSET)
        World(0).run(1, "stop", "ab")
    assert len(caplog.records) == 2


def test_a_client_may_ask_not_to_be_logged_or_counted(caplog: pytest.LogCaptureFixture) -> None:
    world = World(3)
    quiet = replace(INPUT, is_logged=False, is_counted=False)
    with caplog.at_level(logging.INFO):
        watched = world.watch.began(quiet, request(1, [1]), 100.0)
        assert watched is not None
        for now in (101.0, 102.0):
            world.watch.tokens(watched, 0, [1], now)
        world.watch.received(Refused(2, 400, ""), 102.0)
        world.watch.ended(1, "length")
    assert caplog.records == []
    assert set(world.metrics.numbers.values().values()) == {0.0}


def test_nothing_is_logged_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        World().run(1, "stop", "ab")
    assert caplog.records == []
