"""What the prefix cache's own operations cost: matching, inserting and evicting. CPU time of this thread."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from srt.mem_cache.radix_cache import ITEM, RadixCache

VOCAB = 32_000


def prompt_micros(tokens: int, page_size: int, repeats: int = 20) -> tuple[float, float]:
    """Median microseconds to match a whole prompt, and to insert one, in a cache with other prompts that begin alike."""
    rng = np.random.default_rng(0)
    num_pages = tokens // page_size
    pages = np.arange(num_pages, dtype=np.int32).tobytes()
    begin = rng.integers(0, VOCAB, tokens // 4, np.int32)
    matching, inserting = [], []
    cache = RadixCache(page_size)
    for _ in range(repeats):
        ids = np.concatenate((begin, rng.integers(0, VOCAB, tokens - len(begin), np.int32))).tobytes()
        node, found = cache.pin_prefix(ids, "", num_pages)
        rest = ids[len(found) * page_size :], pages[len(found) :]
        start = time.thread_time_ns()
        end = cache.extend(node, "", *rest).end
        inserting.append(time.thread_time_ns() - start)
        cache.unpin(end)
        start = time.thread_time_ns()
        node, found = cache.pin_prefix(ids, "", num_pages)
        matching.append(time.thread_time_ns() - start)
        assert found == pages
        cache.unpin(node)
    return float(np.median(matching)) / 1000, float(np.median(inserting)) / 1000


def eviction_micros(num_prompts: int) -> float:
    """Microseconds per evicted prompt, when a cache of so many prompts of one to four pages is emptied a few pages at a time."""
    rng = np.random.default_rng(0)
    cache = RadixCache(16)
    for _ in range(num_prompts):
        count = int(rng.integers(1, 5))
        node, _ = cache.pin_prefix(b"", "", 0)
        ids = rng.integers(0, VOCAB, 16 * count, np.int32).tobytes()
        cache.unpin(cache.extend(node, "", ids, bytes(ITEM * count)).end)
    start = time.thread_time_ns()
    while cache.num_pages:
        cache.evict(min(3, cache.num_pages))
    return (time.thread_time_ns() - start) / 1000 / num_prompts


def measure_cache(prompt_len: int, nodes: tuple[int, ...], report: Callable[..., None]) -> None:
    print(f"\n{f'a prompt of {prompt_len} tokens, CPU microseconds (p50)':56} {'match':>8} {'insert':>8}")
    for page_size in (16, 1):
        match, insert = prompt_micros(prompt_len, page_size)
        print(
            f"{f'page size {page_size}':56} {match:8.0f} {insert:8.0f}"
            + ("  goal 1000 each" if page_size == 16 else "")
        )
        report(
            "prefix cache", page_size=page_size, tokens=prompt_len, match_us=round(match, 1), insert_us=round(insert, 1)
        )
    print("\neviction, CPU microseconds a prompt (grows like the logarithm: the heap)")
    for count in nodes:
        micros = eviction_micros(count)
        print(f"{f'{count} prompts cached':56} {micros:8.2f}")
        report("eviction", prompts=count, us_per_prompt=round(micros, 3))
