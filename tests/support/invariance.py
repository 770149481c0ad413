"""The check that answers depend on the request alone: a few probes are run again and again in random company, and must not differ."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from srt.model_executor.model_runner import ModelRunner
from srt.protocol.messages import LogprobSpec, RowLogprobs, SamplingSpec, int32_array
from tests.support.plan_driver import Job, PlanDriver

BATCHES = (1, 2, 3, 7, 16, 23)  # rows that run together
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.02},
    {"temperature": 0.9, "frequency_penalty": 0.4, "presence_penalty": 0.2, "repetition_penalty": 1.1},
    {"temperature": 0.7, "bias_ids": int32_array([5, 77]), "bias_values": np.array([2.0, -3.0], np.float32)},
    {"temperature": 1.0, "min_new_tokens": 4, "stop_ids": int32_array(range(3, 200))},
)


@dataclass(slots=True)
class Probe:
    """A request to repeat, and everything that its repetitions gave."""

    prompt: list[int]
    sampling: SamplingSpec
    seed: int
    ids: set[tuple[int, ...]] = field(default_factory=set)
    bits: dict[tuple[int, int], set[bytes]] = field(default_factory=lambda: defaultdict(set))
    """By position in the text, and place: 0 for the token's own logprob, n for the n-th best token with its logprob."""

    @property
    def num_distinct(self) -> int:
        """The number of different results: 1 if all trials agree."""
        return max(len(self.ids), *(len(values) for values in self.bits.values()))

    def job(self, rng: random.Random) -> Job:
        """Return a trial: the request, the same after a preemption, or its text as the prompt of a later request."""
        kind = rng.choice(("new", "new", "scored", "resumed", "rescored"))
        ids = list(next(iter(self.ids), ()))
        top = rng.choice((2, 2, 9))  # a neighbour may ask for more than this row does
        if kind == "rescored" and ids:
            return Job(self.prompt + ids, SamplingSpec(1), self.seed, LogprobSpec(False, 1, top))
        spec = LogprobSpec(True, 1 if kind == "scored" else -1, top)  # prompts with logprobs use no cached prefix
        outputs = ids[: rng.randrange(1, len(ids))] if kind == "resumed" and ids else []
        return Job(self.prompt, self.sampling, self.seed, spec, outputs)

    def add(self, job: Job) -> None:
        """Add what a trial gave."""
        if job.prompt == self.prompt:
            self.ids.add(tuple(job.outputs))
        for part in job.prompt_logprobs:
            self._add(part, part.first)
        for part in job.output_logprobs if job.prompt == self.prompt else []:
            self._add(part, len(self.prompt) + part.first)

    def _add(self, part: RowLogprobs, first: int) -> None:
        num_top = len(part.top_ids) // len(part.chosen)
        for i, chosen in enumerate(part.chosen):
            self.bits[first + i, 0].add(chosen.tobytes())
            for place in range(num_top):
                at = i * num_top + place
                self.bits[first + i, place + 1].add(part.top_ids[at].tobytes() + part.top[at].tobytes())


def make_probes(
    count: int, vocab_size: int, num_tokens: int = 6, lengths: Sequence[int] = (3, 20, 37, 70)
) -> list[Probe]:
    """Return requests of different lengths and sampling parameters. Each second one begins like the one before it."""
    rng, probes = random.Random(7), list[Probe]()
    for number in range(count):
        prompt = [rng.randrange(3, vocab_size) for _ in range(rng.choice(lengths))]
        if number % 2:
            prompt = probes[-1].prompt[:18] + prompt
        sampling = SamplingSpec(num_tokens, **WAYS[number % len(WAYS)])
        probes.append(Probe(prompt, sampling, seed=number + 1))
    return probes


def run_trials(
    runner: ModelRunner,
    probes: Sequence[Probe],
    num_trials: int,
    page_size: int,
    chunks: Sequence[int],
    batches: Sequence[int] = BATCHES,
    seed: int = 3,
) -> int:
    """Run at least this many trials: rows of random batches, with cold and warm caches. Return their number."""
    rng, trials = random.Random(seed), 0
    while trials < num_trials:
        runner.reset()
        driver = PlanDriver(runner, page_size, chunk=rng.choice(chunks), share=True)
        for _ in range(2):  # the second batch finds prefixes of the first
            chosen = [rng.choice(probes) for _ in range(rng.choice(batches))]
            jobs = [probe.job(rng) for probe in chosen]
            driver.run(jobs)
            for probe, job in zip(chosen, jobs, strict=True):
                probe.add(job)
            trials += len(jobs)
    return trials
