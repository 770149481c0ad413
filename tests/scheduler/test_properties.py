"""Small worlds of any kind. What Hypothesis finds it makes small: few requests, short texts, no more trouble than needed."""

from __future__ import annotations

import math

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.scheduler.callers import THEMES
from tests.scheduler.settings import Settings
from tests.scheduler.world import World


@st.composite
def small_worlds(draw: st.DrawFn) -> Settings:
    page_size = draw(st.sampled_from((1, 2, 4)))
    prompt, answer = draw(st.integers(1, 16)), draw(st.integers(1, 12))
    window = draw(st.integers(1, 2))
    num_stages = draw(st.sampled_from((1, 1, 2, 3)))
    least_pages = -(-(prompt + answer) // page_size) + window + num_stages - 1
    return Settings(
        page_size=page_size,
        num_pages=least_pages + draw(st.integers(0, 24)),
        num_slots=draw(st.integers(1, 5)),
        max_request_tokens=prompt + answer,
        chunk=draw(st.sampled_from((-1, 1, 5))),
        window=window,
        num_stages=num_stages,
        row_tokens=draw(st.sampled_from((1, 1, 3))),
        tp_size=draw(st.integers(1, 2)),
        caches=not draw(st.booleans()),
        num_frontends=draw(st.integers(1, 2)),
        conservativeness=draw(st.sampled_from((1.0, 0.01))),
        policy=draw(st.sampled_from(("fcfs", "lpm", "priority"))),
        threshold=1,
        aging=draw(st.sampled_from((0.1, math.inf))),
        waiting_timeout=draw(st.sampled_from((None, None, 0.2))),
        running_timeout=draw(st.sampled_from((None, None, 0.2))),
        eviction=draw(st.sampled_from(("lru", "lfu"))),
        num_requests=draw(st.integers(1, 12)),
        longest_prompt=prompt,
        longest_answer=answer,
        vocab_size=draw(st.sampled_from((40, 3))),
        has_choices=draw(st.booleans()),
        stream_share=draw(st.sampled_from((1.0, 0.0, 0.5))),
        logprob_share=draw(st.sampled_from((0.0, 0.5))),
        arrival_gap=draw(st.sampled_from((0.0, 0.02))),
        delay=draw(st.sampled_from((0.0001, 0.02))),
        ack_delay=draw(st.sampled_from((0.001, 0.2))),
        abort_share=draw(st.sampled_from((0.0, 0.5))),
        lost_share=draw(st.sampled_from((0.0, 0.1))),
        num_deaths=draw(st.integers(0, 2)),
        num_returns=draw(st.integers(0, 1)),
        num_questions=draw(st.integers(0, 3)),
        callers=draw(st.sampled_from((*["quiet"] * len(THEMES), *THEMES))),
        drains=draw(st.booleans()) and draw(st.booleans()),
        num_graphs=draw(st.sampled_from((0, 4))),
        missing_share=draw(st.sampled_from((0.0, 0.3, 1.0))),
    )


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(small_worlds(), st.integers(0, 1000))
def test_small_worlds_of_any_kind_keep_every_promise(world: Settings, seed: int) -> None:
    World(seed, world, check_every=1).run()
