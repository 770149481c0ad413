"""Bugs to plant in a copy of the scheduler, to see whether the simulation finds them. Each is one change of text that must apply once."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "srt"


@dataclass(frozen=True, slots=True)
class Mutation:
    name: str
    file: str  # in srt/
    anchor: str  # a piece of text that the file has once
    change: str  # what stands in its place

    def plant(self, folder: Path) -> None:
        """Copy the package into this folder, with the bug. AssertionError when the text to change is not there any more."""
        shutil.copytree(PACKAGE, folder / "srt", ignore=shutil.ignore_patterns("__pycache__"))
        path = folder / "srt" / self.file
        text = path.read_text()
        found = text.count(self.anchor)
        assert found == 1, (
            f"the bug {self.name!r} cannot be planted: srt/{self.file} has the text {self.anchor!r} {found} times, not once;"
            " say in tests/scheduler/mutations.py where it belongs now"
        )
        path.write_text(text.replace(self.anchor, self.change))


MUTATIONS = (
    Mutation(
        "page visible one plan early",
        "managers/planner.py",
        "slots.computed_at[slot] = end\n",
        "slots.computed_at[slot] = end; self._memory.insert_computed(request, request.id_bytes, end)\n",
    ),
    Mutation(
        "slot reset after reuse",
        "managers/slots.py",
        "self.sent_at[slot] = self.num_output_at[slot] = 0",
        "late, self._late = getattr(self, '_late', slot), slot; self.sent_at[late] = self.num_output_at[late] = 0",
    ),
    Mutation(
        "forgotten pin",
        "managers/kv_memory.py",
        "self.tree.unpin(request.node)",
        "request.num_in_tree > 3 or self.tree.unpin(request.node)",
    ),
    Mutation(
        "double insert",
        "mem_cache/radix_cache.py",
        "child = node.children.get(key)\n            if child is None:",
        "child = node.children.get(key)\n            if child is None or child.pins > 1:",
    ),
    Mutation(
        "off-by-one page at a boundary",
        "managers/planner.py",
        "rows[slots.computed[rows] >= slots.num_pages[rows]",
        "rows[slots.computed[rows] > slots.num_pages[rows]",
    ),
    Mutation(
        "lost abort",
        "managers/scheduler_state.py",
        "if choice in (-1, r.choice)]",
        "if choice in (-1, r.choice) and not r.num_preempted]",
    ),
    Mutation(
        "wrong preemption order",
        "managers/planner.py",
        "self._preempt(max(self.running(), key=_order))",
        "self._preempt(sorted(self.running(), key=_order)[-2:][0])",
    ),
    Mutation(
        "preempted row's token dropped",
        "managers/results.py",
        "            request.append(token)\n",
        "",
    ),
    Mutation(
        "resubmission delivered twice",
        "managers/request_ledger.py",
        "choice.is_gap, choice.asked_from, choice.done = False, -1, None",
        "choice.is_gap, choice.asked_from, choice.done, choice.num_released = False, -1, None, 0",
    ),
)
