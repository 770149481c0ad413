"""A step's plan: in the making, and as it was submitted."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from srt.managers.request import Request
from srt.mem_cache.radix_cache import ITEM
from srt.protocol.messages import Admission, Int64Array, PageDelta, StepPlan, int32_array

NextPage = tuple[int, str, bytes]  # where the tree would go on: serial of the node, salt, ids of the page behind it


@dataclass(frozen=True, slots=True)
class Planned:
    """A step that was submitted. Its result is matched against who had the slots then."""

    plan: StepPlan
    sampling_slots: Int64Array
    sampling_incarnations: Int64Array
    num_prompt_ends: int  # so many of them, the first, are prompts: these get one id
    extends: dict[int, int]  # slot -> incarnation of the rows that compute prompt tokens


@dataclass(slots=True)
class Draft:
    """A plan in the making."""

    budget: int  # prompt tokens that may still be planned
    budget_us: float  # and how much longer they may make the step
    admissions: list[Admission] = field(default_factory=list)
    extends: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    page_slots: list[int] = field(default_factory=list)
    page_counts: list[int] = field(default_factory=list)
    pages: list[bytes] = field(default_factory=list)
    coming: set[NextPage] = field(default_factory=set)  # what its rows compute next, behind the tree
    aside: list[Request] = field(default_factory=list)  # wait for one of them, in the queue, until the next plan

    @property
    def has_budget(self) -> bool:
        return self.budget > 0 and self.budget_us > 0

    def add_pages(self, slot: int, pages: bytes) -> None:
        if pages:
            self.page_slots.append(slot)
            self.page_counts.append(len(pages) // ITEM)
            self.pages.append(pages)

    def page_delta(self) -> PageDelta:
        if not self.pages:
            return PageDelta(int32_array(), int32_array(), int32_array())
        return PageDelta(
            int32_array(self.page_slots), int32_array(self.page_counts), np.frombuffer(b"".join(self.pages), np.int32)
        )
