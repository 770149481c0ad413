"""The real Replacer over simulated processes: thousands of stories of one server each, from its start to its end."""

from __future__ import annotations

import random
from collections import Counter

from tests.scheduler.settings import Settings
from tests.scheduler.supervision import Supervision

NUM_STORIES = 1500


def tell(seed: int) -> str:
    """One story; what it is about."""
    rng = random.Random(seed)
    settings = Settings(num_frontends=rng.choice((1, 2, 3)), tp_size=rng.choice((1, 2, 4)))
    busy_since = rng.random() * 40
    server = Supervision(
        settings, rng, 0.0, lambda now: min(max(now - busy_since, 0.0), 0.9 * settings.watchdog_timeout)
    )
    server.run_until(rng.choice((0.1, 1.0, 60.0)) * rng.random())
    if rng.random() < 0.4:
        server.end_in_order()
        return "end"
    cause = server.break_frontend(0) if rng.random() < 0.3 else server.break_worker_or_scheduler()
    server.run_until(cause.due_s + 10.0)
    assert server.is_finished
    return f"{cause.kind} {cause.culprit.role}"


def test_whatever_happens_to_processes_the_right_one_is_named_in_time_and_all_end_in_order() -> None:
    stories: Counter[str] = Counter()
    for seed in range(NUM_STORIES):
        try:
            stories[tell(seed)] += 1
        except AssertionError as error:
            raise AssertionError(f"story {seed}: {error}") from error
    assert len(stories) == 1 + 3 * 8
    assert min(stories.values()) >= 10, stories
