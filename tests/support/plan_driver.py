"""A scheduler for tests of the worker: it makes plans by hand and keeps what comes back. No processes, no sockets."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from srt.model_executor.model_runner import ModelRunner
from srt.model_executor.startup.warm_up import with_windows
from srt.model_executor.step.step_output import SampledRows
from srt.protocol.messages import Admission, LogprobSpec, PageDelta, PlanSection, RowLogprobs, SamplingSpec, int32_array


@dataclass(eq=False)
class Job:
    """One request, and what came of it. Two requests may be alike."""

    prompt: list[int]
    sampling: SamplingSpec
    seed: int = 0
    logprobs: LogprobSpec | None = None
    outputs: list[int] = field(default_factory=list)
    """Ids that it has got; given ids are those of an earlier incarnation."""
    prompt_logprobs: list[RowLogprobs] = field(default_factory=list)
    output_logprobs: list[RowLogprobs] = field(default_factory=list)
    adapter: str = ""
    slot: int = -1
    computed: int = 0
    cached: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def known(self) -> list[int]:
        return self.prompt + self.outputs

    @property
    def is_done(self) -> bool:
        return len(self.outputs) >= self.sampling.max_new_tokens


class PlanDriver:
    """Runs jobs to their end on a runner: all decodes each step, then chunks within `chunk` tokens, then new jobs.

    Pages are handed out in a random order. With `share` a job reuses the whole pages of ended jobs' common prefixes.
    """

    def __init__(self, runner: ModelRunner, page_size: int, chunk: int = 1 << 30, share: bool = False) -> None:
        self.runner = runner
        self.page_size = page_size
        self.chunk = chunk
        self.share = share
        self.steps: list[tuple[int, int]] = []  # extend rows, decode rows
        self._free_pages = list(range(min(runner.state.num_pages, *runner.state.window_pages, 1 << 30)))
        random.Random(0).shuffle(self._free_pages)
        self._free_slots = list(range(runner.state.num_slots))
        self._ended: list[Job] = []

    def run(self, jobs: Iterable[Job]) -> None:
        waiting, running = list(jobs), list[Job]()
        while waiting or running:
            self._step(waiting, running)
            for job in [job for job in running if job.is_done]:
                running.remove(job)
                self._free_slots.append(job.slot)
                self._ended.append(job)

    def _step(self, waiting: list[Job], running: list[Job]) -> None:
        decodes = [job for job in running if job.computed == len(job.known) - 1 and job.outputs and job.computed > 0]
        budget = self.chunk
        admissions: list[Admission] = []
        extends: list[tuple[Job, int, int, bool]] = []
        for job in [job for job in running if job not in decodes]:
            budget = self._plan_chunk(job, budget, extends)
        while waiting and budget > 0 and self._free_slots:
            job = waiting.pop(0)
            admissions.append(self._admit(job))
            running.append(job)
            budget = self._plan_chunk(job, budget, extends)
        for job in decodes:
            job.computed += 1
        rows = [job for job, *_ in extends] + decodes
        section = PlanSection(
            admissions=admissions,
            pages=[self._grow(rows, admissions)],
            extend_slots=int32_array([job.slot for job, *_ in extends]),
            extend_starts=int32_array([start for _, start, _, _ in extends]),
            extend_counts=int32_array([count for _, _, count, _ in extends]),
            extend_samples=int32_array([samples for *_, samples in extends]),
            decode_slots=int32_array([job.slot for job in decodes]),
        )
        self.steps.append((len(extends), len(decodes)))
        result = run_section(self.runner, section)
        self._take([job for job, _, _, samples in extends if samples] + decodes, rows, result)

    def _plan_chunk(self, job: Job, budget: int, extends: list[tuple[Job, int, int, bool]]) -> int:
        count = min(budget, len(job.known) - job.computed)
        if count > 0:
            end = job.computed + count
            extends.append((job, job.computed, count, end == len(job.known)))
            job.computed = end
        return budget - count

    def _admit(self, job: Job) -> Admission:
        job.slot = self._free_slots.pop(0)
        job.pages = []
        if self.share:
            job.pages = max(
                (self._common_pages(job, other) for other in self._ended if other.adapter == job.adapter),
                key=len,
                default=[],
            )
        job.computed = job.cached = len(job.pages) * self.page_size
        logprobs = job.logprobs or LogprobSpec()
        return Admission(
            job.slot,
            int32_array(job.known),
            len(job.prompt),
            job.cached,
            job.seed,
            job.sampling,
            logprobs,
            adapter=job.adapter,
        )

    def _common_pages(self, job: Job, other: Job) -> list[int]:
        num_tokens = 0
        limit = min(len(job.known) - 1, other.computed)
        if job.logprobs is not None and job.logprobs.prompt_start >= 0:
            limit = min(limit, max(0, job.logprobs.prompt_start - 1))
        while num_tokens < limit and job.known[num_tokens] == other.known[num_tokens]:
            num_tokens += 1
        return other.pages[: num_tokens // self.page_size]

    def _grow(self, rows: list[Job], admissions: list[Admission]) -> PageDelta:
        """Pages for everything that is computed now; an admitted slot is given its shared pages too."""
        admitted = {admission.slot for admission in admissions}
        slots, counts, pages = [], [], list[int]()
        for job in rows:
            new = [self._free_pages.pop() for _ in range(-(-job.computed // self.page_size) - len(job.pages))]
            job.pages += new
            given = job.pages if job.slot in admitted else new
            if given:
                slots.append(job.slot)
                counts.append(len(given))
                pages += given
        return PageDelta(int32_array(slots), int32_array(counts), int32_array(pages))

    def _take(self, sampling: list[Job], rows: list[Job], result: SampledRows) -> None:
        assert len(result.counts) == len(sampling)
        assert (result.counts > 0).all(), "a row without finite logits"
        for job, token in zip(sampling, result.ids.tolist(), strict=True):
            job.outputs.append(token)
        by_slot = {job.slot: job for job in rows}
        for row in result.logprobs:
            job = by_slot[row.slot]
            (job.prompt_logprobs if row.is_prompt else job.output_logprobs).append(row)


def run_section(runner: ModelRunner, section: PlanSection) -> SampledRows:
    """Run a section with the pages of one group; the groups of windows get the same pages."""
    grouped = with_windows(section, runner.state.windows, runner.state.page_size)
    return runner.sample(runner.execute(grouped)).result()


def idle_section() -> PlanSection:
    empty = int32_array()
    return PlanSection([], [PageDelta(empty, empty, empty)], empty, empty, empty, empty, empty)


def greedy(max_new_tokens: int) -> SamplingSpec:
    return SamplingSpec(max_new_tokens, temperature=0.0)


def token_ids(rng: np.random.Generator, count: int, vocab_size: int) -> list[int]:
    ids: list[int] = rng.integers(0, vocab_size, count).tolist()
    return ids
