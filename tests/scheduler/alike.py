"""Worlds whose requests are all alike in one thing, so that what follows from it happens in nearly every step.

Each is drawn as any other world is, and then made small and given its theme, from a stream of its own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

from tests.scheduler.settings import Settings

SHARE = 0.45  # of all worlds
MOST_SLOTS = 32  # of a small world
READERS_SHARE = 0.55
RESOURCES_SHARE = 0.8  # of the small ones without another theme


def alike(settings: Settings, seed: int) -> Settings:
    """The same settings, or a world with a theme."""
    rng = random.Random(f"plans of {seed}")
    if rng.random() >= SHARE:
        return settings
    return replace(rng.choice(THEMES)(settings, rng), is_alike=True)


def alike_for_readers(settings: Settings, seed: int) -> Settings:
    """Likewise, for what happens above the scheduler, and for what others draw seldom. A world has one theme."""
    if random.Random(f"plans of {seed}").random() < SHARE:
        return settings
    rng = random.Random(f"readers of {seed}")
    if rng.random() >= READERS_SHARE:
        return settings
    return replace(rng.choice(READERS)(settings, rng), is_alike=True)


def alike_in_resources(settings: Settings, seed: int) -> Settings:
    """Likewise, for small worlds without another theme: most requests need a resource, and the workers hold few at a time."""
    rng = random.Random(f"resources of {seed}")
    if settings.is_alike or settings.num_slots > MOST_SLOTS or rng.random() >= RESOURCES_SHARE:
        return settings
    small = _small(settings, rng, 20, 40, memory=rng.choice((0.4, 1.0)))
    many = replace(small, num_requests=18 * small.num_slots, arrival_gap=rng.choice((1.0, 4.0)) * small.arrival_gap)
    few, share = replace(many, num_resources=rng.choice((12, 40, 80))), rng.choice((0.6, 1.0))
    most = rng.choice((1, 3, 3, 8))
    return replace(few, most_resources=most, resource_share=share, num_deaths=rng.choice((0, 1, 3)), is_alike=True)


def _all_read(settings: Settings, rng: random.Random) -> Settings:
    """Nearly all are read, many with logprobs, and several tokens come at once."""
    few, share = min(settings.num_requests, 120), rng.choice((0.3, 0.8))
    returns = rng.choice((0, 6))  # of frontends
    return replace(settings, read_share=0.8, logprob_share=share, num_requests=few, ack_delay=0.1, num_returns=returns)


def _poisonous(settings: Settings, rng: random.Random) -> Settings:
    """Engines die of requests, and are paused."""
    small = _small(settings, rng, 20, 60, memory=1.0)
    return replace(
        small,
        num_poisons=20,
        poison_share=0.5,
        arrival_gap=2 * small.arrival_gap,
        num_returns=6,
        num_questions=40,
        lost_share=0.0,
    )


def _too_long(settings: Settings, rng: random.Random) -> Settings:
    """What is asked for is often more than can be served."""
    least = settings.longest_answer + 1
    return replace(settings, max_request_tokens=max(least, settings.max_request_tokens * 3 // 4), num_requests=200)


def _stopped(settings: Settings, rng: random.Random) -> Settings:
    """A stop is asked for while much is under way."""
    return replace(settings, drains=True, num_requests=min(settings.num_requests, 200))


def _many_pass(settings: Settings, rng: random.Random) -> Settings:
    """Whoever shares a prefix comes first, and passes others."""
    small = _small(settings, rng, 60, 12, memory=1.0)
    return replace(
        small, policy="lpm", caches=True, rarely_new=True, num_requests=12 * small.num_slots, arrival_gap=0.0
    )


def _small(settings: Settings, rng: random.Random, prompt: int, answer: int, memory: float) -> Settings:
    """Few slots, and memory for a part of what would fill them."""
    page_size, num_slots = rng.choice((1, 4, 16)), rng.choice((6, 12, 20))
    least = -(-(prompt + answer) // page_size) + 2 + settings.most_in_flight
    pages = int(num_slots * (prompt + answer) * memory / page_size)
    return replace(
        settings,
        page_size=page_size,
        num_slots=num_slots,
        num_pages=max(least, pages),
        longest_prompt=prompt,
        longest_answer=answer,
        max_request_tokens=prompt + answer,
        num_requests=5 * num_slots,
        max_queued=4096,
        rarely_new=False,
        waiting_timeout=None,
        running_timeout=None,
        arrival_gap=0.2 * settings.step_time * answer / num_slots,
    )


def _with_logprobs(settings: Settings, rng: random.Random) -> Settings:
    """All with logprobs, in small chunks, and slots that are lost before a prompt is through."""
    small = _small(settings, rng, *rng.choice(((60, 60), (100, 60))), memory=rng.choice((0.2, 0.3)))
    return replace(
        small,
        logprob_share=1.0,
        chunk=rng.choice((7, 7, 20)),
        conservativeness=0.01,
        urgent_share=0.1,
        num_questions=0,
        num_retracts=rng.choice((10, 30)),
        abort_share=0.1,
        num_deaths=rng.choice((0, 1)),
    )


def _with_priorities(settings: Settings, rng: random.Random) -> Settings:
    """All with priorities, and the important come while others run."""
    small = _small(settings, rng, 30, 80, memory=rng.choice((0.3, 0.6, 1.0)))
    return replace(
        small,
        policy="priority",
        threshold=rng.choice((1, 2, 4)),
        aging=rng.choice((1.0, 5.0, math.inf)),
        arrival_gap=0.6 * small.step_time * 80 / small.num_slots,
        stream_share=rng.choice((0.0, 0.5)),
    )


def _with_urgent(settings: Settings, rng: random.Random) -> Settings:
    """Many urgent ones among others, or nothing else."""
    small = _small(settings, rng, 20, 80, memory=rng.choice((0.3, 0.6, 1.0)))
    gap = 0.5 * small.step_time * 80 / small.num_slots
    return replace(small, urgent_share=rng.choice((0.1, 0.3, 1.0)), arrival_gap=gap, stream_share=0.5)


def _with_timeouts(settings: Settings, rng: random.Random) -> Settings:
    """Little time to wait and to run, while steps are slow and pauses many."""
    small = _small(settings, rng, 20, 60, memory=rng.choice((0.4, 1.0)))
    return replace(
        small,
        waiting_timeout=rng.choice((None, 0.05, 0.3, 1.0)),
        running_timeout=rng.choice((0.1, 0.4, 0.7)),
        num_questions=40,
        num_slow_steps=4,
        num_deaths=1,
    )


def _with_little_memory(settings: Settings, rng: random.Random) -> Settings:
    """Long answers, of which too many begin."""
    small = _small(settings, rng, *rng.choice(((12, 200), (40, 120))), memory=rng.choice((0.15, 0.25, 0.4)))
    return replace(
        small,
        conservativeness=0.01,
        stream_share=rng.choice((0.0, 1.0)),
        num_requests=4 * small.num_slots,
        num_deaths=rng.choice((0, 0, 2)),
    )


def _with_shared_prompts(settings: Settings, rng: random.Random) -> Settings:
    """Prompts that begin alike, and memory for some of what they leave in the cache."""
    small = _small(settings, rng, 120, 20, memory=rng.choice((0.3, 0.6, 1.0)))
    policy, breaks_down = rng.choice(("fcfs", "lpm")), rng.choice((False, True))
    few = replace(small, rarely_new=True, caches=True, policy=policy, num_requests=8 * small.num_slots)
    return replace(few, breaks_down=breaks_down, grows_short=rng.choice((False, True)))


def _with_long_prompts(settings: Settings, rng: random.Random) -> Settings:
    """Many chunks to each prompt, some of which are short."""
    small = _small(settings, rng, 300, 12, memory=rng.choice((0.4, 1.0)))
    chunk, stream_share = rng.choice((16, 32, 64)), rng.choice((0.0, 0.0, 0.5))
    return replace(small, chunk=chunk, stream_share=stream_share, breaks_down=rng.choice((False, True)))


THEMES: tuple[Callable[[Settings, random.Random], Settings], ...] = (
    _with_logprobs,
    _with_logprobs,
    _with_priorities,
    _with_priorities,
    _with_urgent,
    _with_urgent,
    _with_timeouts,
    _with_little_memory,
    _with_shared_prompts,
    _with_long_prompts,
)
READERS = (
    *(_poisonous,) * 5,
    _all_read,
    _poisonous,
    *(_all_read,) * 2,
    _too_long,
    _stopped,
    _many_pass,
)
