"""The rows of a worker's steps whose answers must follow a grammar: their state, and the masks of tokens that they may draw.

Each rank does this for itself, from the same tokens, so all ranks draw the same. min_new_tokens is applied here for such rows, because
an answer may end early if its grammar allows nothing more. `TpWorker._run` decides when masks are filled: while the model runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec.structs import replace

from srt.constrained.resource import KIND, read_content
from srt.managers.tp_worker.resources import PrepareError
from srt.protocol.messages import Admission, Int32Array, PlanSection

if TYPE_CHECKING:
    from srt.constrained.matcher import Grammars, MaskFiller, Matcher
    from srt.constrained.vocabulary import Vocabulary
    from srt.model_executor.step.step_output import SampledRows


class GrammarLoader:
    """Compiles grammars, in any thread. The vocabulary is read when the first one comes, or by `warm_up`."""

    kind = KIND

    def __init__(self, read_vocabulary: Callable[[], Vocabulary]) -> None:
        self._read_vocabulary = read_vocabulary
        self._lock = threading.Lock()
        self._grammars: Grammars | None = None
        self._begins_after: dict[str, frozenset[int]] = {}

    @property
    def grammars(self) -> Grammars:
        """The compiled grammars. The first call reads the vocabulary, which takes about half a second."""
        with self._lock:
            if self._grammars is None:
                from srt.constrained.matcher import Grammars

                self._grammars = Grammars(self._read_vocabulary())
            return self._grammars

    def prepare(self, key: str, content: bytes) -> None:
        from srt.constrained.matcher import GrammarError

        grammar = read_content(content)
        try:
            self.grammars.compile(key, grammar.text)
        except GrammarError as error:
            raise PrepareError(f"The grammar cannot be compiled: {error}") from error
        self._begins_after[key] = frozenset(grammar.begins_after)

    def maintain(self) -> None:
        """Compile grammars anew that have served for long: their tables grow with the tokens that they have seen."""
        self.grammars.renew_worn()

    def release(self, key: str) -> None:
        self.grammars.release(key)
        self._begins_after.pop(key, None)

    def new_row(self, admission: Admission) -> ConstrainedRow:
        """Return the state of an admitted row, which may have tokens of its answer already."""
        row = ConstrainedRow(
            self.grammars.matcher(admission.resource), self._begins_after[admission.resource], admission
        )
        for token in admission.ids[admission.prompt_len :].tolist():
            row.accept(token)
        return row


class ConstrainedRow:
    """The state of one answer."""

    def __init__(self, matcher: Matcher, begins_after: frozenset[int], admission: Admission) -> None:
        self.matcher = matcher
        self._begins_after = begins_after  # empty once the constrained part has begun
        self._num_tokens = 0
        self._min_new_tokens = admission.sampling.min_new_tokens
        self._stop_ids = admission.sampling.stop_ids

    @property
    def has_begun(self) -> bool:
        return not self._begins_after

    @property
    def held_back(self) -> Int32Array | None:
        """The ids that must not end the answer yet, as it is too short."""
        return self._stop_ids if self._num_tokens < self._min_new_tokens else None

    def accept(self, token: int) -> None:
        """Note the next token of the answer. Behind its end, or an error, nothing changes any more."""
        self._num_tokens += 1
        if self.has_begun:
            self.matcher.accept(token)
        elif token in self._begins_after:
            self._begins_after = frozenset()


class SamplingRow(NamedTuple):
    """A constrained row that samples in a step."""

    place: int  # among the rows that sample
    row: ConstrainedRow


class ConstrainedRows:
    """The constrained rows by slot."""

    def __init__(self, loader: GrammarLoader) -> None:
        self.loader = loader
        self._filler: MaskFiller | None = None
        self._by_slot: dict[int, ConstrainedRow] = {}

    def are_in(self, section: PlanSection) -> bool:
        """Return whether a step may have to do with constrained rows: there are some, or it admits one."""
        return bool(self._by_slot) or any(admission.resource for admission in section.admissions)

    def admit(self, section: PlanSection) -> None:
        """Apply a step's admissions: each begins its slot anew."""
        for admission in section.admissions:
            self._by_slot.pop(admission.slot, None)
            if admission.resource:
                self._by_slot[admission.slot] = self.loader.new_row(admission)

    def clear(self) -> None:
        self._by_slot.clear()

    def sampling(self, section: PlanSection) -> list[SamplingRow]:
        """Return the constrained rows that sample in this step."""
        by_slot = self._by_slot
        if not by_slot:
            return []
        slots = [*section.extend_slots[section.extend_samples == 1].tolist(), *section.decode_slots.tolist()]
        return [SamplingRow(place, by_slot[slot]) for place, slot in enumerate(slots) if slot in by_slot]

    @staticmethod
    def accept(rows: list[SamplingRow], sampled: SampledRows) -> None:
        """Note what the rows of an executed step have drawn."""
        if not rows:
            return
        starts = np.cumsum(np.maximum(sampled.counts, 0)) - np.maximum(sampled.counts, 0)
        for place, row in rows:
            for token in sampled.ids[starts[place] : starts[place] + max(int(sampled.counts[place]), 0)].tolist():
                row.accept(token)

    def fill(self, rows: list[SamplingRow], words: Int32Array) -> list[int]:
        """Write the masks of the rows whose constrained part has begun, one behind the other. Return these rows' places.

        A row that cannot go on, as its grammar exceeds a limit, may draw nothing: it ends with an error.
        """
        begun = [(place, row) for place, row in rows if row.has_begun]
        if not begun:
            return []
        if self._filler is None:
            from srt.constrained.matcher import MaskFiller

            self._filler = MaskFiller(self.loader.grammars.vocabulary)
        failed = self._filler.fill([(i, row.matcher) for i, (_, row) in enumerate(begun)], words)
        for i, _ in failed:
            words[i] = 0
        for i, (_, row) in enumerate(begun):
            if row.held_back is not None:
                _forbid(words[i], row.held_back)
        return [place for place, _ in begun]


def without_least_length(section: PlanSection) -> PlanSection:
    """Return the section with `min_new_tokens` 0 in constrained admissions.

    Their masks hold back stops instead: where nothing but the end may follow, it follows.
    """
    if not any(admission.resource and admission.sampling.min_new_tokens for admission in section.admissions):
        return section
    admissions = [
        replace(a, sampling=replace(a.sampling, min_new_tokens=0)) if a.resource else a for a in section.admissions
    ]
    return replace(section, admissions=admissions)


def _forbid(words: Int32Array, ids: Int32Array) -> None:
    """Take these ids out of a mask, unless it allows nothing else."""
    kept = words.copy()
    for token in ids.tolist():
        kept[token // 32] &= ~np.int32(np.uint32(1 << token % 32).view(np.int32))
    if kept.any():
        words[:] = kept
