"""What a scheduler says that it counts, by the plans and results that were seen."""

from __future__ import annotations

from collections import Counter

import numpy as np

from srt.protocol.messages import StepPlan

BOUNDS = (1, 4, 16, 64, 256)  # of rows in a step


class StepCounts:
    """Shown each plan and each result once."""

    def __init__(self) -> None:
        self._values: Counter[str] = Counter(
            num_steps=0, num_mixed_steps=0, num_rows=0, num_prompt_rows=0, max_rows_in_step=0, rows_per_step_above=0
        )
        self._values.update({f"rows_per_step_to_{bound}": 0 for bound in BOUNDS})
        self._values.update(step_us=0, prompt_step_us=0, num_prompt_steps=0, num_computed_prompt_tokens=0)
        self._prompt_tokens: dict[int, int] = {}  # by step that has no result

    def note_plan(self, plan: StepPlan) -> None:
        values, (section,) = self._values, plan.sections
        num_prompts, num_decodes = len(section.extend_slots), len(section.decode_slots)
        num_rows = num_prompts + num_decodes
        values["num_steps"] += 1
        values["num_rows"] += num_rows
        values["num_prompt_rows"] += num_prompts
        values["num_mixed_steps"] += num_prompts > 0 and num_decodes > 0
        values["max_rows_in_step"] = max(values["max_rows_in_step"], num_rows)
        values["rows_per_step_" + next((f"to_{bound}" for bound in BOUNDS if num_rows <= bound), "above")] += 1
        self._prompt_tokens[plan.step] = int(np.sum(section.extend_counts))

    def note_result(self, step: int, step_us: int) -> None:
        num_tokens, values = self._prompt_tokens.pop(step), self._values
        values["step_us"] += step_us
        if num_tokens:
            values["prompt_step_us"] += step_us
            values["num_prompt_steps"] += 1
            values["num_computed_prompt_tokens"] += num_tokens

    def values(self) -> dict[str, int]:
        return dict(self._values)
