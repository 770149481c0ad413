"""The choice of how many drafts the rows of a step bring, so that a step brings the most tokens in its time.

Drafts lengthen a step, the more the more rows it has, and what they bring depends on the texts. Both are measured: now and then a few steps
bring another number of drafts than the rest. If these steps bring more tokens in their time, the number stays.
"""

from __future__ import annotations

from typing import Final

SKIPPED: Final = 1  # first steps after a change that do not count: a smaller model may have to catch up in them
FEWEST_STEPS: Final = 1  # steps of a trial
MOST_STEPS: Final = 16
COUNTED_ROWS: Final = 32  # rows of a trial, over all of its steps, if that is possible
MANY_ROWS: Final = 32  # from this number on, drafts have to show first that they bring something
MEMORY: Final = 0.95  # factor by which a step loses weight with each later one
COUNTED_TIMES: Final = 15  # steps whose times count
GAIN: Final = 1.02  # less is no reason to change
GAIN_OF_FEWER: Final = 1.15  # likewise, for fewer drafts of few rows: these cost little, and times and luck vary much
CLEAR_LOSS: Final = 0.8  # with less than this share a trial ends early
SURE_STEPS: Final = 4  # but not before this number of steps
CLEAR_GAIN: Final = 1.2  # less may be chance: look again soon
FIRST_INTERVAL: Final = 128  # steps between two trials of the same number; doubles when it fails
MOST_INTERVAL: Final = 2048
SHORT_INTERVAL: Final = 16
LOST_SHARE: Final = 0.005  # share of the time that trials may cost: the more one costs, the later is the next


class _Rate:
    """Tokens that a row gets in a µs: the mean of a step, with decaying weights, by the lower quartile of the latest steps' times.

    On a busy machine steps are interrupted for several times as long as they take, long steps more often than short ones. A mean would
    follow the few that wait longest; a median would compare long steps that wait with short ones that do not.
    """

    def __init__(self) -> None:
        self._weight = self._tokens = 0.0
        self._times: list[int] = []

    def record(self, tokens: float, step_us: int) -> None:
        self._weight = MEMORY * self._weight + 1.0
        self._tokens = MEMORY * self._tokens + tokens
        self._times.append(max(step_us, 1))
        if len(self._times) > COUNTED_TIMES:
            del self._times[0]

    @property
    def value(self) -> float:
        return self._tokens / self._weight / self._step_us if self._times else 0.0

    @property
    def _step_us(self) -> int:
        return sorted(self._times)[len(self._times) // 4]

    def lost_steps(self, tokens: float, us: float) -> float:
        """Return how many steps of this rate would have gone on in the time that was lost for these tokens."""
        return max(0.0, us - tokens / self.value) / self._step_us if self.value else 0.0


class _Band:
    """What is known of steps of about the same number of rows."""

    def __init__(self, num_rows: int, level: int, num_levels: int) -> None:
        self._is_large = num_rows >= MANY_ROWS
        self._num_steps = max(FEWEST_STEPS, min(MOST_STEPS, COUNTED_ROWS // num_rows))
        self.level = level
        self.tried = -1  # the level on trial, if there is one
        self._plain = num_levels - 1
        self._rate, self._tried_rate = _Rate(), _Rate()
        self._num_skipped = SKIPPED
        self._num_planned = self._num_answered = 0  # steps of the trial
        self._trial_tokens = self._trial_us = 0.0
        self._intervals = [FIRST_INTERVAL] * num_levels
        self._trial_steps = SKIPPED + self._num_steps
        self._waits = [self._trial_steps] * num_levels  # steps until the next trial of each level

    @property
    def next_level(self) -> int:
        return self.tried if self.tried >= 0 and self._num_planned < self._trial_steps else self.level

    def note_planned(self, level: int) -> None:
        if level == self.tried and self._num_planned < self._trial_steps:
            self._num_planned += 1

    def record(self, level: int, tokens: float, step_us: int) -> None:
        if level == self.tried and self._num_answered < self._num_planned:
            self._num_answered += 1
            self._trial_tokens += tokens
            self._trial_us += step_us
            if self._num_answered > SKIPPED:
                self._tried_rate.record(tokens, step_us)
            if self._num_answered == self._trial_steps or self._is_clear_loss():
                self._conclude()
        elif level == self.level:
            if self._num_skipped:
                self._num_skipped -= 1
            else:
                self._rate.record(tokens, step_us)
            self._waits = [wait - 1 for wait in self._waits]
            if self.tried < 0:
                self._begin_trial()

    def _begin_trial(self) -> None:
        for level in (self._plain, self.level + 1, self.level - 1):
            if level != self.level and 0 <= level <= self._plain and self._waits[level] <= 0:
                self.tried, self._tried_rate = level, _Rate()
                self._num_planned = self._num_answered = 0
                self._trial_tokens = self._trial_us = 0.0
                return

    def _gain(self) -> float:
        return self._tried_rate.value / self._rate.value if self._rate.value else 0.0

    def _is_clear_loss(self) -> bool:
        return self._num_answered >= SKIPPED + SURE_STEPS and self._gain() < CLEAR_LOSS

    def _least_gain(self, tried: int) -> float:
        if self._is_large:
            return GAIN
        return GAIN_OF_FEWER if tried > self.level else 1.0

    def _conclude(self) -> None:
        gain = self._gain()
        tried, self.tried, self._num_skipped = self.tried, -1, SKIPPED
        if gain <= self._least_gain(tried):
            lost = self._rate.lost_steps(self._trial_tokens, self._trial_us)
            self._waits[tried] = max(self._intervals[tried], min(int(lost / LOST_SHARE), MOST_INTERVAL))
            self._intervals[tried] = min(2 * self._intervals[tried], MOST_INTERVAL)
            return
        wait = FIRST_INTERVAL if gain > CLEAR_GAIN else SHORT_INTERVAL
        self.level, self._rate = tried, self._tried_rate
        self._waits, self._intervals = [wait] * len(self._waits), [2 * wait] * len(self._waits)


class DraftLength:
    """Says how many tokens a row may get in the next step, by the number of rows. It depends on messages alone and reads no clock.

    Numbers of rows between two powers of two are one band, with a choice of its own. A new band begins with the choice of the one beside
    it; if that is not known, with all drafts where rows are few, and with none where they are many. Only steps without prompts count.
    """

    def __init__(self, max_row_tokens: int) -> None:
        most_drafts = max_row_tokens - 1
        self._levels = sorted({1 + most_drafts, 1 + most_drafts // 2, 1}, reverse=True)
        self._bands: dict[int, _Band] = {}

    def choose(self, num_rows: int) -> int:
        """Return the most tokens of a row in a step with this number of decoding rows."""
        return self._levels[self._band(num_rows).next_level] if num_rows else 1

    def note_planned(self, num_rows: int, row_tokens: int) -> None:
        """Note a planned step without prompts."""
        if self._is_known(num_rows, row_tokens):
            self._band(num_rows).note_planned(self._levels.index(row_tokens))

    def record(self, num_rows: int, row_tokens: int, num_ids: int, step_us: int) -> None:
        """Record what a step without prompts brought, and its time."""
        if self._is_known(num_rows, row_tokens):
            self._band(num_rows).record(self._levels.index(row_tokens), num_ids / num_rows, step_us)

    def _is_known(self, num_rows: int, row_tokens: int) -> bool:
        return len(self._levels) > 1 and num_rows > 0 and row_tokens in self._levels

    def _band(self, num_rows: int) -> _Band:
        number = num_rows.bit_length()
        band = self._bands.get(number)
        if band is None:
            beside = self._bands.get(number - 1) or self._bands.get(number + 1)
            first = 0 if num_rows < MANY_ROWS else len(self._levels) - 1
            level = first if beside is None else beside.level
            band = self._bands[number] = _Band(1 << (number - 1), level, len(self._levels))
        return band
