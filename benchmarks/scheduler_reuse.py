"""How many prompt tokens the prefix cache saves on a trace of chats, beside what could be saved at best.

The trace: people who chat begin at random times, each below one of a few system prompts, and write again some time after each answer.
Every turn's prompt is the whole chat so far. The real scheduler runs it turn by turn, generated tokens included.

  infinite      memory for everything
  working set   memory for the most pages that any window of the trace as long as the longest pause of a chat touches
  optimum       Belady's: knows the future, evicts the page whose next use is farthest, and keeps none that is never used again
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from benchmarks.scheduler_load import PAGE_SIZE, VOCAB, answer, as_received, generate, messages_of
from srt.managers.scheduler.effects import Frontend, Worker
from srt.managers.scheduler.scheduler import Scheduler
from srt.protocol.codec import decode
from srt.protocol.messages import AckBatch, FrontendHello, SamplingSpec, StepPlan, TokenBatch, WorkerHello
from srt.server_args import ServerArgs

NEVER = 1 << 60
ANSWER_LEN = 24
Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Turn:
    chat: int
    says: Ids  # what comes behind the chat so far; in the first turn the system prompt as well


def make_trace(num_chats: int) -> list[Turn]:
    """Turns in order of time. Pauses between the turns of a chat are exponential, at most four times their mean."""
    rng = np.random.default_rng(0)
    systems = [rng.integers(0, VOCAB, 16 * int(rng.integers(10, 40)), np.int32) for _ in range(6)]
    timed = []
    for chat in range(num_chats):
        at = float(rng.uniform(0, num_chats))
        for turn in range(int(rng.geometric(0.2))):
            says = rng.integers(0, VOCAB, int(rng.integers(20, 200)), np.int32)
            system = systems[min(int(rng.zipf(1.6)) - 1, len(systems) - 1)]
            timed.append((at, chat, Turn(chat, np.concatenate((system, says)) if turn == 0 else says)))
            at += float(min(rng.exponential(1.0), 4.0)) * num_chats / 12
    return [turn for _, _, turn in sorted(timed, key=lambda entry: entry[:2])]


class Chats:
    """The scheduler with so many pages, and page groups with these windows and pages; one turn at a time."""

    def __init__(self, num_pages: int, windows: dict[int, int]) -> None:
        self._rng = np.random.default_rng(1)  # the same answers whatever is cached
        self._scheduler = Scheduler(ServerArgs(model_path="m"), "p")
        hello = WorkerHello(0, "p", "c", "d", PAGE_SIZE, num_pages, 1, 1 << 20, VOCAB)
        hello = structs.replace(hello, windows=[*windows], window_pages=[*windows.values()])
        self._scheduler.handle(Worker(0), hello, 0.0)
        self._scheduler.handle(Frontend(0), FrontendHello(0, "p"), 0.0)
        self._rid = 0

    def run(self, prompt: Ids) -> tuple[Ids, int]:
        """The answer, and how many tokens of the prompt were in the cache."""
        self._rid += 1
        self._scheduler.handle(Frontend(0), as_received(generate(self._rid, prompt, SamplingSpec(ANSWER_LEN))), 0.0)
        plans: deque[StepPlan] = deque()
        ids: list[Ids] = []
        while True:
            effects = self._scheduler.tick(0.0)
            plans += messages_of(effects, StepPlan)
            for batch in messages_of(effects, TokenBatch):
                ids.append(batch.ids)
                self._scheduler.handle(Frontend(0), AckBatch(batch.number), 0.0)
                if batch.done:
                    return np.concatenate(ids), batch.done[0].cached_tokens
            self._scheduler.handle(Worker(0), decode(answer(plans.popleft(), self._rng)).message, 0.0)


@dataclass(frozen=True, slots=True)
class Use:
    """What a turn touches: full pages of prompt and answer, numbered by content. The first `num_matchable` may be found cached."""

    pages: list[int]
    num_matchable: int


def run_trace(trace: list[Turn], num_pages: int, windows: dict[int, int] | None = None) -> tuple[int, list[Use]]:
    """Tokens that were found in the cache, and what each turn used. `windows` are those of further page groups, with their pages."""
    chats, so_far = Chats(num_pages, windows or {}), dict[int, Ids]()
    numbers: dict[tuple[int, bytes], int] = {}  # (page before, ids) -> page
    hits, uses = 0, list[Use]()
    for turn in trace:
        prompt = np.concatenate((so_far.get(turn.chat, turn.says[:0]), turn.says))
        ids, cached = chats.run(prompt)
        hits += cached
        text = so_far[turn.chat] = np.concatenate((prompt, ids))
        page, pages = -1, list[int]()
        for start in range(0, len(text) - PAGE_SIZE, PAGE_SIZE):  # the last token's KV is never computed
            page = numbers.setdefault((page, text[start : start + PAGE_SIZE].tobytes()), len(numbers))
            pages.append(page)
        uses.append(Use(pages, (len(prompt) - 1) // PAGE_SIZE))
    return hits, uses


def belady_hits(uses: list[Use], num_pages: int) -> int:
    """Hits in tokens of the optimum. A turn's own pages are in memory while it runs, like in the scheduler's."""
    next_use: list[list[int]] = []
    coming: dict[int, int] = {}
    for turn in range(len(uses) - 1, -1, -1):
        next_use.append([coming.get(page, NEVER) for page in uses[turn].pages])
        coming.update(dict.fromkeys(uses[turn].pages, turn))
    next_use.reverse()
    kept: dict[int, int] = {}  # page -> its next use
    farthest: list[tuple[int, int, int]] = []  # heap; the deepest page goes first among equals
    hits = 0
    for use_of_turn, nexts in zip(uses, next_use, strict=True):
        found = 0
        while found < use_of_turn.num_matchable and use_of_turn.pages[found] in kept:
            found += 1
        hits += found * PAGE_SIZE
        for depth, (page, use) in enumerate(zip(use_of_turn.pages, nexts, strict=True)):
            kept[page] = use
            heapq.heappush(farthest, (-use, -depth, page))
        while len(kept) > num_pages or (farthest and farthest[0][0] == -NEVER):
            use, _, page = heapq.heappop(farthest)
            if kept.get(page) == -use:
                del kept[page]
    return hits


def working_set(trace: list[Turn], uses: list[Use]) -> int:
    """Most pages touched in a window of as many turns as the longest pause between two turns of a chat."""
    last: dict[int, int] = {}
    longest = 1
    for i, turn in enumerate(trace):
        longest = max(longest, i - last.get(turn.chat, i))
        last[turn.chat] = i
    touched: Counter[int] = Counter()
    most = 0
    for i, use in enumerate(uses):
        touched.update(use.pages)
        if i > longest:
            for page in uses[i - longest - 1].pages:
                touched[page] -= 1
                if not touched[page]:
                    del touched[page]
        most = max(most, len(touched))
    return most


def measure_reuse(num_chats: int, report: Callable[..., None]) -> None:
    trace = make_trace(num_chats)
    infinite, uses = run_trace(trace, 1 << 20)
    pages = working_set(trace, uses)
    num_distinct = len({page for turn in uses for page in turn.pages})
    print(f"\nreuse: {num_chats} chats, {len(trace)} turns, {num_distinct} pages in all, working set {pages}")
    print(f"{'tokens hit':16} {'scheduler':>12} {'optimum':>12} {'ratio':>8}")
    for name, share, goal in (
        ("infinite", 0, ""),
        ("working set", 1, "goal 0.98"),
        ("half", 2, "goal 0.8"),
        ("quarter", 4, ""),
    ):
        num_pages = pages // share if share else NEVER
        hits = run_trace(trace, num_pages)[0] if share else infinite
        best = belady_hits(uses, num_pages)
        print(f"{name:16} {hits:12} {best:12} {hits / best:8.3f}  {goal}")
        report("prefix reuse", memory=name, pages=num_pages if share else None, hits=hits, optimum=best)
