"""A model of a step's duration, fitted to the workers' reports, so that prompts do not delay streamed answers.

A step that decodes streamed requests may take at most twice as long as without prompt tokens, plus `--max-decode-stall`. The model is
fitted to measurements: now and then a step leaves prompts out, and a chunk is at most twice as large as one that was timed. No client
watches the tokens of other requests arrive, so if only such requests decode, prompts get the whole budget.
"""

from __future__ import annotations

import math
from collections import deque

MEMORY = 0.85  # factor by which a report loses weight with each later one
LEAST_CHUNK = 16  # tokens by which a prompt advances in any case
NUM_DECODE_STEPS = 8  # steps without prompts to remember
MEASURE_EVERY = 64  # after this many steps with both, a step leaves prompts out
MEASURE_FIRST = 4  # the same, until one such step was timed
FEWER = 0.75  # with less than this share of the rows measured, decodes take less time: measure again


class StepTimes:
    """The model, in µs: step = decodes + tokens * (per_token + per_pair * positions that a token attends to).

    `decodes` is the shortest of the last steps without prompt tokens. The two prices are fitted to the time that a token took beyond
    it in steps with both. Until there is such a step, the time of a token in a step of prompts alone is the upper bound. All steps
    count alike: one that compiled kernels is soon forgotten, and steps without streams count too, so that the model is ready when a
    stream comes. It depends on messages alone and reads no clock.
    """

    def __init__(self, stall_us: float) -> None:
        self._stall_us = stall_us
        self._decode_steps: deque[tuple[int, int]] = deque(maxlen=NUM_DECODE_STEPS)  # µs and rows
        self.decode_us = 0.0  # the shortest of them
        self._fewest_rows = 0
        self._num_mixed = 0  # planned steps with decodes and prompts since the last with decodes only
        self._largest = 0.0  # largest number of prompt tokens timed in one step; decays
        # Decaying sums over steps, per prompt token: 1, attended, attended², µs, attended * µs.
        self._n = self._x = self._xx = self._u = self._xu = 0.0
        self._has_mixed = False
        # Pairs of per_token and per_pair, one for each possible explanation: the dearest counts.
        self._prices: list[tuple[float, float]] = []

    @property
    def per_token(self) -> float:
        return self._prices[0][0] if self._prices else 0.0

    @property
    def per_pair(self) -> float:
        return self._prices[0][1] if self._prices else 0.0

    def must_measure(self, num_decodes: int) -> bool:
        """Return whether the next step must leave prompts out, to measure the decodes alone."""
        if not num_decodes:
            return False
        enough = MEASURE_EVERY if self._decode_steps else MEASURE_FIRST
        return self._num_mixed >= enough or num_decodes < FEWER * self._fewest_rows

    def note_planned(self, num_decodes: int, num_tokens: int) -> None:
        if num_decodes:
            self._num_mixed = self._num_mixed + 1 if num_tokens else 0

    def most_tokens(self, num_streams: int) -> int:
        """Return the largest number of prompt tokens for a step with `num_streams` decodes of streamed requests."""
        return max(LEAST_CHUNK, int(2 * self._largest)) if num_streams else 1 << 40

    def record(self, num_decodes: int, num_tokens: int, num_pairs: float, step_us: int) -> None:
        """Record the time of a step; `num_pairs` is the sum, over its prompt tokens, of the positions that each attended to."""
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
                self._record_alone(step_us / tokens, attended)
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
        """Return the time that prompt tokens may add to a step with `num_streams` decodes of streamed requests."""
        return self.decode_us + self._stall_us if num_streams else math.inf

    def cost_us(self, start: int, count: int) -> float:
        return max((count * (token + pair * (start + count / 2)) for token, pair in self._prices), default=0.0)

    def tokens_within(self, budget_us: float, start: int) -> int:
        """Return the number of tokens from position `start` on that fit into the budget; at least LEAST_CHUNK."""
        count = 1 << 40
        if math.isinf(budget_us):
            return count
        for token, pair in self._prices:
            if token + pair > 0.0:
                a, b = pair / 2, token + pair * start
                count = min(count, int(2 * budget_us / (b + math.sqrt(b * b + 4 * a * budget_us))))
        return max(count, LEAST_CHUNK)

    def _record_alone(self, us: float, attended: float) -> None:
        """Lower the upper bound of a token's time to that in a step of prompts alone, which includes the step's own cost."""
        if not self._prices or us < self.per_token:
            self._know_one(us, attended)

    def _know_one(self, us: float, attended: float) -> None:
        """Set the prices from one measurement. Tokens that attend to less may cost as much; to more, proportionally more."""
        self._prices = [(us, 0.0), (0.0, us / attended)]

    def _fit(self) -> None:
        """Fit the prices by least squares. If one would be negative, as a few small steps may suggest, use the averages instead."""
        n, x, xx, u, xu = self._n, self._x, self._xx, self._u, self._xu
        det = n * xx - x * x
        if det > 1e-6 * n * xx:
            token, pair = (u * xx - xu * x) / det, (xu * n - u * x) / det
            if token >= 0.0 and pair >= 0.0:
                self._prices = [(token, pair)]
                return
        self._know_one(u / n, x / n)
