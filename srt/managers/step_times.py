"""How long a step takes, learnt from what workers report, so that prompts do not hold up those who stream.

A step that has decodes may take at most twice as long as without prompt tokens, and `--max-decode-stall` on top.
"""

from __future__ import annotations

import math

from srt.protocol.messages import PlanSection

MEMORY = 0.85  # what a report counts, when the next has come
LEAST_CHUNK = 16  # tokens that a prompt goes on by in any case


class StepTimes:
    """step = decodes + tokens * (per_token + per_pair * the positions that a token attends to); in µs.

    The decodes' part is a decaying mean of steps without prompt tokens; the other two are fitted to what a token took beyond it
    in steps with both (until there is one, in steps of prompts alone). Every step counts alike, so that one that compiled kernels
    is soon forgotten. Only messages matter: no clock.
    """

    def __init__(self, stall_us: float) -> None:
        self._stall_us = stall_us
        self._decode_us = _Mean()
        self._sums = [0.0] * 5  # decaying: 1, attended, attended², µs, attended * µs; of a token, one entry a step
        self._has_mixed = False
        self.per_token = self.per_pair = 0.0

    @property
    def decode_us(self) -> float:
        return self._decode_us.value

    def take(self, section: PlanSection, step_us: int) -> None:
        """This step took so long."""
        if not len(section.extend_slots):
            self._decode_us.take(step_us)
            return
        counts = section.extend_counts.astype(float)
        tokens = float(counts.sum())
        attended = float((counts * (section.extend_starts + counts / 2)).sum()) / tokens
        is_mixed = len(section.decode_slots) > 0 and self._decode_us.has_value
        if self._has_mixed and not is_mixed:
            return
        if is_mixed and not self._has_mixed:
            self._has_mixed = True
            self._sums = [0.0] * 5
        us = max(step_us - self.decode_us, 0.0) / tokens if is_mixed else step_us / tokens
        new = (1.0, attended, attended * attended, us, attended * us)
        self._sums = [MEMORY * old + one for old, one in zip(self._sums, new, strict=True)]
        self._fit()

    def budget_us(self, num_decodes: int) -> float:
        """What prompt tokens may add to a step with so many decodes."""
        if not num_decodes or not self._decode_us.has_value:
            return math.inf
        return self.decode_us + self._stall_us

    def cost_us(self, start: int, count: int) -> float:
        return count * (self.per_token + self.per_pair * (start + count / 2))

    def tokens_within(self, budget_us: float, start: int) -> int:
        """So many tokens from position `start` on fit into the budget; at least LEAST_CHUNK."""
        if math.isinf(budget_us) or self.per_token + self.per_pair == 0.0:
            return 1 << 40
        a, b = self.per_pair / 2, self.per_token + self.per_pair * start
        count = 2 * budget_us / (b + math.sqrt(b * b + 4 * a * budget_us))
        return max(int(count), LEAST_CHUNK)

    def _fit(self) -> None:
        """Least squares; a part that came out negative is nothing, and the other is fitted alone."""
        n, x, xx, u, xu = self._sums
        det = n * xx - x * x
        if det > 1e-6 * n * xx:
            self.per_token, self.per_pair = (u * xx - xu * x) / det, (xu * n - u * x) / det
            if self.per_token >= 0.0 and self.per_pair >= 0.0:
                return
            if self.per_token < 0.0:
                self.per_token, self.per_pair = 0.0, xu / xx
                return
        self.per_token, self.per_pair = u / n, 0.0


class _Mean:
    """Decaying; a new value counts a quarter."""

    def __init__(self) -> None:
        self.value = 0.0
        self.has_value = False

    def take(self, value: float) -> None:
        self.value = self.value + (value - self.value) / 4 if self.has_value else float(value)
        self.has_value = True
