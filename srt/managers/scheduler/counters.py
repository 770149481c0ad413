"""Counters of the scheduler's work, which show tests and users what it did."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from srt.protocol.messages import Scalar

_OF_LAYERS = {"distinct_experts": "distinct_experts_of_layer_", "peak_loads": "peak_load_of_layer_"}
"""Beginnings of names, followed by the number of a layer among those with experts."""


class Histogram:
    """Numbers of values by range: above the previous bound and at most this one; the last range is above all bounds."""

    def __init__(self, *bounds: float) -> None:
        self._bounds = [float(bound) for bound in bounds]  # floats like the values, for a quick comparison
        self._counts = [0] * (len(bounds) + 1)

    def record(self, value: float) -> None:
        place = 0
        while place < len(self._bounds) and self._bounds[place] < value:
            place += 1
        self._counts[place] += 1

    def values(self, name: str) -> dict[str, Scalar]:
        labels = [*(f"{name}_to_{bound:g}" for bound in self._bounds), f"{name}_above"]
        return dict(zip(labels, self._counts, strict=True))


@dataclass(slots=True)
class Counters:
    num_steps: int = 0
    num_mixed_steps: int = 0  # with prompt chunks and decodes
    num_rows: int = 0  # over all steps
    num_prompt_rows: int = 0  # of these, with chunks of prompts
    max_rows_in_step: int = 0
    num_prompt_tokens: int = 0  # known tokens of requests at their admission, including cached ones
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    max_chunks_of_a_prompt: int = 0
    max_pages_of_a_prompt: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_aborted: int = 0
    num_aborted_waiting: int = 0
    num_aborted_prefill: int = 0
    num_aborted_decode: int = 0
    num_refused: int = 0
    num_dropped_rows: int = 0  # results for requests that had ended meanwhile
    num_preempted: int = 0
    num_recomputed_tokens: int = 0  # tokens of preempted requests that the cache had lost when they ran again
    num_tried: int = 0  # trials of suspects: requests that workers may have died of
    queue_us: int = 0  # sum of the times from arrival to the first admission
    num_timed_out: int = 0
    num_held_back: int = 0  # times that a request waited for another to compute its prefix
    step_us: int = 0  # sum of the step times that workers report
    prompt_step_us: int = 0  # the part of steps with prompt tokens
    num_prompt_steps: int = 0
    num_computed_prompt_tokens: int = 0  # in these steps
    num_verified_rows: int = 0  # decode rows of steps that may bring several ids, if the engine drafts
    num_verified_ids: int = 0  # that these rows brought
    distinct_experts: tuple[float, ...] = ()  # of each layer, as a worker last reported them
    peak_loads: tuple[float, ...] = ()
    rows_per_step: Histogram = field(default_factory=lambda: Histogram(1, 4, 16, 64, 256))
    queue_ms: Histogram = field(default_factory=lambda: Histogram(1, 10, 100, 1000, 10_000))

    def count_step(self, num_extends: int, num_decodes: int) -> None:
        rows = num_extends + num_decodes
        self.num_steps += 1
        self.num_rows += rows
        self.num_prompt_rows += num_extends
        if num_extends and num_decodes:
            self.num_mixed_steps += 1
        self.rows_per_step.record(rows)
        if rows > self.max_rows_in_step:
            self.max_rows_in_step = rows

    def count_wait(self, seconds: float) -> None:
        self.queue_us += int(seconds * 1e6 + 0.5)
        self.queue_ms.record(seconds * 1000)

    def count_prompt_step(self, num_tokens: int, step_us: int) -> None:
        self.num_prompt_steps += 1
        self.num_computed_prompt_tokens += num_tokens
        self.prompt_step_us += step_us

    def count_prompt(self, num_chunks: int, num_pages: int) -> None:
        if num_chunks > self.max_chunks_of_a_prompt:
            self.max_chunks_of_a_prompt = num_chunks
        if num_pages > self.max_pages_of_a_prompt:
            self.max_pages_of_a_prompt = num_pages

    def values(self) -> dict[str, Scalar]:
        """Return the counters by name; a histogram has one for each of its ranges."""
        values: dict[str, Scalar] = {}
        for one in fields(self):
            name, value = one.name, getattr(self, one.name)
            if isinstance(value, tuple):
                values |= {f"{_OF_LAYERS[name]}{layer}": number for layer, number in enumerate(value)}
            else:
                values |= value.values(name) if isinstance(value, Histogram) else {name: value}
        return values
