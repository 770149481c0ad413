"""How long a step takes, learnt from what workers report, so that prompts do not hold up those who stream.

A step that has decodes of a streamed request may take at most twice as long as without prompt tokens, and `--max-decode-stall` on
top. What is needed for that is measured: now and then a step leaves prompts out, and a chunk is at most twice as large as one that
was timed. Nobody watches the tokens of other requests come, so where only such decode, prompts get all that there is.
"""

from __future__ import annotations

import math
from collections import deque

MEMORY = 0.85  # what a report counts, when the next has come
LEAST_CHUNK = 16  # tokens that a prompt goes on by in any case
NUM_DECODE_STEPS = 8  # steps without prompts that are remembered
MEASURE_EVERY = 64  # steps with streams have one among them without prompts, at least
MEASURE_FIRST = 4  # as long as there was none
FEWER = 0.75  # so small a share of the streams of then takes less time, so that is measured anew


class StepTimes:
    """step = decodes + tokens * (per_token + per_pair * the positions that a token attends to); in µs.

    The decodes' part is the shortest of the last steps without prompt tokens; the other two are fitted to what a token took beyond
    it in steps with both. Until there is one, what it took in a step of prompts alone is the most that it may take. Every step counts
    alike, so that one that compiled kernels is soon forgotten, and those that nobody watches, so that all is known when a stream
    comes. Only messages matter: no clock.
    """

    def __init__(self, stall_us: float) -> None:
        self._stall_us = stall_us
        self._decode_steps: deque[tuple[int, int]] = deque(maxlen=NUM_DECODE_STEPS)  # time and rows
        self.decode_us = 0.0  # the shortest of them
        self._fewest_rows = 0
        self._num_mixed = 0  # steps that were planned with decodes and prompts since one with decodes only
        self._largest = 0.0  # number of tokens that were timed in one step; decaying
        # Decaying sums of what a token of each step was: 1, attended, attended², µs, attended * µs.
        self._n = self._x = self._xx = self._u = self._xu = 0.0
        self._has_mixed = False
        self._prices: list[
            tuple[float, float]
        ] = []  # of a token and of a pair, each as things may be: the dearest counts

    @property
    def per_token(self) -> float:
        return self._prices[0][0] if self._prices else 0.0

    @property
    def per_pair(self) -> float:
        return self._prices[0][1] if self._prices else 0.0

    def must_measure(self, num_decodes: int) -> bool:
        """Is the next step to be one without prompts, so that it shows what the decodes take?"""
        if not num_decodes:
            return False
        enough = MEASURE_EVERY if self._decode_steps else MEASURE_FIRST
        return self._num_mixed >= enough or num_decodes < FEWER * self._fewest_rows

    def note_planned(self, num_decodes: int, num_tokens: int) -> None:
        if num_decodes:
            self._num_mixed = self._num_mixed + 1 if num_tokens else 0

    def most_tokens(self, num_streams: int) -> int:
        """So many prompt tokens may a step have in which so many streams decode."""
        return max(LEAST_CHUNK, int(2 * self._largest)) if num_streams else 1 << 40

    def take(self, num_decodes: int, num_tokens: int, num_pairs: float, step_us: int) -> None:
        """A step with so many decodes and prompt tokens, which attended to so many positions together, took so long."""
        if not num_tokens:
            self._decode_steps.append((step_us, num_decodes))
            self.decode_us = float(min([us for us, _ in self._decode_steps]))
            self._fewest_rows = min([rows for _, rows in self._decode_steps])
            return
        tokens = float(num_tokens)
        attended = num_pairs / tokens
        if not num_decodes or not self._decode_steps:
            if not self._has_mixed:
                self._largest = max(tokens, MEMORY * self._largest)
                self._take_alone(step_us / tokens, attended)
            return
        if not self._has_mixed:
            self._has_mixed = True
            self._largest = 0.0
        self._largest = max(tokens, MEMORY * self._largest)
        us = max(step_us - self.decode_us, 0.0) / tokens
        self._n = MEMORY * self._n + 1.0
        self._x = MEMORY * self._x + attended
        self._xx = MEMORY * self._xx + attended * attended
        self._u = MEMORY * self._u + us
        self._xu = MEMORY * self._xu + attended * us
        self._fit()

    def budget_us(self, num_streams: int) -> float:
        """What prompt tokens may add to a step in which so many streams decode."""
        return self.decode_us + self._stall_us if num_streams else math.inf

    def cost_us(self, start: int, count: int) -> float:
        return max((count * (token + pair * (start + count / 2)) for token, pair in self._prices), default=0.0)

    def tokens_within(self, budget_us: float, start: int) -> int:
        """So many tokens from position `start` on fit into the budget; at least LEAST_CHUNK."""
        count = 1 << 40
        if math.isinf(budget_us):
            return count
        for token, pair in self._prices:
            if token + pair > 0.0:
                a, b = pair / 2, token + pair * start
                count = min(count, int(2 * budget_us / (b + math.sqrt(b * b + 4 * a * budget_us))))
        return max(count, LEAST_CHUNK)

    def _take_alone(self, us: float, attended: float) -> None:
        """A token took so long at most, since the step's own cost is in it."""
        if not self._prices or us < self.per_token:
            self._know_one(us, attended)

    def _know_one(self, us: float, attended: float) -> None:
        """Tokens that attend to so much take so long. Less may cost as much, and more may cost more in proportion."""
        self._prices = [(us, 0.0), (0.0, us / attended)]

    def _fit(self) -> None:
        """Least squares, where what they give can be: few steps of few tokens may say that what attends to more costs less."""
        n, x, xx, u, xu = self._n, self._x, self._xx, self._u, self._xu
        det = n * xx - x * x
        if det > 1e-6 * n * xx:
            token, pair = (u * xx - xu * x) / det, (xu * n - u * x) / det
            if token >= 0.0 and pair >= 0.0:
                self._prices = [(token, pair)]
                return
        self._know_one(u / n, x / n)
