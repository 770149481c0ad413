"""How long a step takes, learnt from what workers report, so that prompts do not hold up those who stream.

A step that has decodes may take at most twice as long as without prompt tokens, and `--max-decode-stall` on top.
"""

from __future__ import annotations

import math

from srt.protocol.messages import PlanSection

MEMORY = 0.9  # what a report counts, when the next has come
LEAST_CHUNK = 16  # tokens that a prompt goes on by in any case


class StepTimes:
    """step = decodes + per_token * tokens + per_pair * (tokens * the positions that they attend to); in µs.

    The decodes' part is a decaying mean of steps without prompt tokens; the other two are fitted to what steps with prompt
    tokens took beyond it. Both are used as the messages come: no clock.
    """

    def __init__(self, stall_us: float) -> None:
        self._stall_us = stall_us
        self._decode_us = _Mean()
        self._squares = [0.0] * 5  # decaying sums: tokens², tokens * pairs, pairs², tokens * µs, pairs * µs
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
        pairs = float((counts * (section.extend_starts + counts / 2)).sum())
        beyond = max(step_us - self.decode_us, 0.0) if len(section.decode_slots) else float(step_us)
        new = (tokens * tokens, tokens * pairs, pairs * pairs, tokens * beyond, pairs * beyond)
        self._squares = [MEMORY * old + one for old, one in zip(self._squares, new, strict=True)]
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
        tt, tp, pp, tu, pu = self._squares
        det = tt * pp - tp * tp
        if det > 1e-6 * tt * pp:
            self.per_token, self.per_pair = (tu * pp - pu * tp) / det, (pu * tt - tu * tp) / det
            if self.per_token >= 0.0 and self.per_pair >= 0.0:
                return
            if self.per_token < 0.0:
                self.per_token, self.per_pair = 0.0, pu / pp
                return
        self.per_token, self.per_pair = tu / tt, 0.0


class _Mean:
    """Decaying; a new value counts a quarter."""

    def __init__(self) -> None:
        self.value = 0.0
        self.has_value = False

    def take(self, value: float) -> None:
        self.value = self.value + (value - self.value) / 4 if self.has_value else float(value)
        self.has_value = True
