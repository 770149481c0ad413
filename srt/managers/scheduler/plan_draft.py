"""The plan of a step: a `Draft` while it is made, `Planned` once it was submitted."""

from __future__ import annotations

from math import inf

import numpy as np

from srt.managers.scheduler.request import Request
from srt.mem_cache.radix_cache import ITEM
from srt.mem_cache.window_pages import WindowPages
from srt.protocol.arrays import INT32, int32_bytes
from srt.protocol.messages import Int64Array, PageDelta, StepPlan, int32_array
from srt.protocol.views import AdmissionView

NextPage = tuple[int, str, bytes]  # page after a prefix: serial of its end in the tree, salt, ids of the page


NO_PAGE_DELTA = PageDelta(int32_array(), int32_array(), int32_array())


class Planned:
    """A submitted step. Its result is matched against the requests that had the slots at that time."""

    def __init__(
        self,
        plan: StepPlan,
        sampling_slots: Int64Array,
        sampling_incarnations: Int64Array,
        num_prompt_ends: int,
        extends: dict[int, int],
        num_tokens: int,
        num_pairs: float,
        row_tokens: int,
    ) -> None:
        self.plan = plan
        self.sampling_slots = sampling_slots
        self.sampling_incarnations = sampling_incarnations
        self.num_prompt_ends = num_prompt_ends  # the first of them end prompts and get one id each
        self.extends = extends  # slot -> incarnation of the rows that compute prompt tokens
        self.num_tokens = num_tokens  # prompt tokens that these compute
        self.num_pairs = num_pairs  # sum of the positions that each of these attends to
        self.row_tokens = row_tokens  # most ids that each other row gets


class Draft:
    """A plan that is being made."""

    def __init__(self, budget: int, budget_us: float) -> None:
        self.budget = budget  # prompt tokens that may still be planned
        self.budget_us = budget_us  # time that they may still add to the step
        self.admissions: list[AdmissionView] = []
        self.extends: list[Request] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.samples: list[int] = []
        self.num_tokens = 0
        self.num_pairs = 0.0
        self.page_slots: list[int] = []
        self.page_counts: list[int] = []
        self.pages: list[bytes] = []
        self.coming: set[NextPage] = set()  # pages, not in the tree yet, that rows compute next
        self.aside: list[Request] = []  # wait for one of these pages, until the next plan

    @property
    def has_budget(self) -> bool:
        return self.budget > 0 and self.budget_us > 0

    @property
    def is_timed(self) -> bool:
        return self.budget_us != inf

    def add_chunk(self, request: Request, start: int, count: int, *, samples: bool) -> None:
        self.extends.append(request)
        self.starts.append(start)
        self.counts.append(0)
        self.samples.append(0)
        self.lengthen_chunk(-1, count, samples=samples)

    def lengthen_chunk(self, index: int, count: int, *, samples: bool) -> None:
        start = self.starts[index] + self.counts[index]
        self.counts[index] += count
        self.samples[index] = 1 if samples else 0
        self.num_tokens += count
        self.num_pairs += count * (start + count / 2)

    def add_pages(self, slot: int, pages: bytes) -> None:
        if pages:
            self.page_slots.append(slot)
            self.page_counts.append(len(pages) // ITEM)
            self.pages.append(pages)

    def page_deltas(self, windows: list[WindowPages]) -> list[PageDelta]:
        """Return the new pages of each group. Those of a window group are for the same slots, in the same order."""
        if not self.pages:
            return [NO_PAGE_DELTA] * (1 + len(windows))
        slots = np.frombuffer(int32_bytes(self.page_slots), INT32)
        counts = np.frombuffer(int32_bytes(self.page_counts), INT32)
        deltas = [PageDelta(slots, counts, np.frombuffer(b"".join(self.pages), INT32))]
        for window in windows:
            pages = [window.pop_untold(slot) for slot in self.page_slots]
            counts = np.frombuffer(int32_bytes([len(some) // ITEM for some in pages]), INT32)
            deltas.append(PageDelta(slots, counts, np.frombuffer(b"".join(pages), INT32)))
        return deltas


def admission_of(request: Request, num_cached: int) -> AdmissionView:
    """Return the admission of a request that has its slot, with `num_cached` tokens in the prefix cache."""
    progress = request.progress
    return AdmissionView(
        progress.slot,
        progress.id_bytes,
        request.prompt_len,
        num_cached,
        request.seed,
        request.sampling,
        progress.logprobs,
        "" if request.resource is None else request.resource.key,
        "" if request.adapter is None else request.adapter.key,
    )
