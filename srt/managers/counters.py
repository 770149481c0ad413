"""What the scheduler counts about its own work: the step reports by which tests and users see what happened."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from srt.protocol.messages import Scalar


@dataclass(slots=True)
class Counters:
    num_steps: int = 0
    num_mixed_steps: int = 0  # with prompt chunks and decodes
    num_rows: int = 0  # over all steps
    max_rows_in_step: int = 0
    num_prompt_tokens: int = 0  # of requests when they are admitted, cached ones included
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
    num_dropped_rows: int = 0  # sampled for requests that had ended meanwhile
    num_preempted: int = 0
    num_recomputed_tokens: int = 0  # of preempted requests that came back, what the cache had lost meanwhile
    queue_us: int = 0  # sum of the times from arrival to the first admission
    num_queued_1ms: int = 0  # such times up to 1 ms, ...
    num_queued_10ms: int = 0
    num_queued_100ms: int = 0
    num_queued_1s: int = 0
    num_queued_10s: int = 0
    num_queued_longer: int = 0
    num_timed_out: int = 0
    num_held_back: int = 0  # waited for another request to compute their prefix
    step_us: int = 0  # sum of what workers report

    def count_step(self, num_extends: int, num_decodes: int) -> None:
        rows = num_extends + num_decodes
        self.num_steps += 1
        self.num_rows += rows
        if num_extends and num_decodes:
            self.num_mixed_steps += 1
        if rows > self.max_rows_in_step:
            self.max_rows_in_step = rows

    def count_wait(self, seconds: float) -> None:
        self.queue_us += round(seconds * 1e6)
        if seconds <= 0.001:
            self.num_queued_1ms += 1
        elif seconds <= 0.01:
            self.num_queued_10ms += 1
        elif seconds <= 0.1:
            self.num_queued_100ms += 1
        elif seconds <= 1.0:
            self.num_queued_1s += 1
        elif seconds <= 10.0:
            self.num_queued_10s += 1
        else:
            self.num_queued_longer += 1

    def count_prompt(self, num_chunks: int, num_pages: int) -> None:
        self.max_chunks_of_a_prompt = max(self.max_chunks_of_a_prompt, num_chunks)
        self.max_pages_of_a_prompt = max(self.max_pages_of_a_prompt, num_pages)

    def values(self) -> dict[str, Scalar]:
        return asdict(self)
