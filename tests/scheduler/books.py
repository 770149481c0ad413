"""What a scheduler must know of its requests, by what it was told and what it has said: nothing here is read from the scheduler itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.scheduler.ledger_frontend import LedgerFrontend
from tests.scheduler.names import is_meant
from tests.scheduler.traffic import Choice

ALL = -1


@dataclass(slots=True, eq=False)
class Entry:
    """A choice from the moment that the scheduler took it until its frontend has acknowledged the end."""

    frontend: LedgerFrontend
    rid: int
    index: int
    label: str
    choice: Choice | None  # None: of a request that must be refused yet
    num_outputs: int  # that have come to the scheduler
    is_live: bool = True
    batch: int = -1  # the last that carried its end; -1: that is still to be said


@dataclass(slots=True)
class Totals:
    """By what has happened."""

    num_taken: int = 0  # choices that must be counted under one of the next three some time
    num_finished: int = 0
    num_failed: int = 0
    num_aborted: int = 0
    num_refused: int = 0
    num_generated_tokens: int = 0
    num_dropped_rows: int = 0


@dataclass(slots=True)
class Books:
    entries: dict[tuple[int, int, int], Entry] = field(default_factory=dict)  # by frontend's number, rid and index
    by_choice: dict[Choice, Entry] = field(default_factory=dict)
    by_label: dict[str, list[Entry]] = field(default_factory=dict)  # those that live
    totals: Totals = field(default_factory=Totals)
    num_live: int = 0

    def of_request(self, number: int, rid: int) -> list[Entry]:
        return [entry for (n, r, _), entry in self.entries.items() if (n, r) == (number, rid)]

    def of_frontend(self, number: int) -> list[Entry]:
        return [entry for (n, _, _), entry in self.entries.items() if n == number]

    def named(self, name: str) -> list[Entry]:
        return [entry for label, entries in self.by_label.items() if is_meant(label, name) for entry in entries]

    @property
    def num_unsaid(self) -> int:
        """Choices whose end the frontend was not told."""
        return sum(entry.batch < 0 for entry in self.entries.values())

    def enter(self, entry: Entry) -> None:
        self.entries[entry.frontend.number, entry.rid, entry.index] = entry
        self.by_label.setdefault(entry.label, []).append(entry)
        self.num_live += 1
        self.totals.num_taken += 1
        if entry.choice is not None:
            self.by_choice[entry.choice] = entry
            answer = entry.choice.answer
            if answer.reason != "error" and entry.num_outputs >= len(answer.ids):
                self.end(entry)  # it came with all its tokens
                self.totals.num_taken -= 1

    def end(self, entry: Entry) -> bool:
        """False if it had ended before."""
        if not entry.is_live:
            return False
        entry.is_live = False
        self.num_live -= 1
        others = self.by_label[entry.label]
        others.remove(entry)
        if not others:
            del self.by_label[entry.label]
        return True

    def abort(self, entries: Iterable[Entry]) -> list[Entry]:
        """Those that had not ended."""
        aborted = [entry for entry in list(entries) if self.end(entry)]
        self.totals.num_aborted += len(aborted)
        return aborted

    def forget(self, entry: Entry) -> None:
        self.end(entry)
        del self.entries[entry.frontend.number, entry.rid, entry.index]
        if entry.choice is not None:
            del self.by_choice[entry.choice]

    def take_result(self, rows: list[tuple[Choice, int]]) -> None:
        """So many ids of each have come, or word that there is none."""
        by_choice, totals = self.by_choice, self.totals
        for choice, count in rows:
            if not count:
                continue
            entry = by_choice.get(choice)
            if entry is None or not entry.is_live:
                totals.num_dropped_rows += 1
                continue
            answer = choice.answer
            left = len(answer.ids) - entry.num_outputs
            totals.num_generated_tokens += min(count, left)
            entry.num_outputs += count
            if count > left or (count == left and answer.reason != "error"):
                totals.num_failed += answer.reason == "error"
                totals.num_finished += answer.reason != "error"
                self.end(entry)

    def acknowledge(self, number: int, batch: int) -> None:
        for entry in self.of_frontend(number):
            if 0 <= entry.batch <= batch:
                self.forget(entry)
