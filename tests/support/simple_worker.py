"""A worker without a model for small worlds: it answers any request. It does what it is told, and checks what a real one relies on."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from srt.mem_cache.tables_hash import tables_hash
from srt.protocol.engine_work import (
    InspectTables,
    InspectWeights,
    JoinUpdateGroup,
    LeaveUpdateGroup,
    LoadWeights,
    ReceiveWeights,
    ReleaseMemory,
    ResumeMemory,
)
from srt.protocol.messages import (
    Admission,
    Int64Array,
    PlanSection,
    RowLogprobs,
    Scalar,
    StepPlan,
    StepResult,
    WorkDone,
    WorkPlan,
    int32_array,
)
from tests.support.simple_reference import draw, extend_hash, is_not_finite, logprob, prefix_hashes

_NEVER_WRITTEN = -1


@dataclass(slots=True)
class _Slot:
    admission: Admission
    tokens: list[int]
    hashes: list[int]
    length: int
    pages: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Row:
    slot: int
    start: int
    end: int
    samples: bool


class FakeWorker:
    """Its KV memory holds, for each position, the hash of the tokens up to there: a foreign or stale cell is found when it is read."""

    def __init__(self, num_slots: int, num_pages: int, page_size: int, vocab_size: int, *, breaks_down: bool) -> None:
        self._num_slots = num_slots
        self._num_pages = num_pages
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._breaks_down = breaks_down
        self._kv: Int64Array = np.full(num_pages * page_size, _NEVER_WRITTEN, np.int64)
        self._slots: dict[int, _Slot] = {}
        self._next_step = 1

    def slot_seed(self, slot: int) -> int:
        """The seed of the request that was admitted to this slot last: tests know requests by it."""
        return self._slots[slot].admission.seed

    def forget_kv(self) -> None:
        """The KV memory was released, or written over."""
        self._kv[:] = _NEVER_WRITTEN

    def do(self, work: WorkPlan) -> WorkDone:
        self._count(work.step)
        if isinstance(work.work, LoadWeights):
            return WorkDone(work.step, 0, {"files": f"those of {work.work.folder}"})
        if isinstance(work.work, InspectWeights):
            return WorkDone(work.step, 0, {"rows": f"[{work.work.name}]"})
        if isinstance(work.work, JoinUpdateGroup | LeaveUpdateGroup | ReceiveWeights | ReleaseMemory | ResumeMemory):
            return WorkDone(work.step, 0, {})
        assert isinstance(work.work, InspectTables)
        values: dict[str, Scalar] = {"tables_hash": tables_hash({slot: s.pages for slot, s in self._slots.items()})}
        return WorkDone(work.step, 0, values)

    def execute(self, plan: StepPlan) -> StepResult:
        """The step's result, as rank 0 would send it."""
        self._count(plan.step)
        (section,) = plan.sections
        self._apply_delta(section)
        rows = self._rows(section)
        assert rows, f"step {plan.step} has no rows"
        assert len({row.slot for row in rows}) == len(rows), f"step {plan.step} has a slot twice"
        self._run_model(rows)
        logprobs = [part for row in rows for part in self._prompt_logprobs(row)]
        counts, ids = [], []
        for row in rows:
            if row.samples:
                token = self._sample(row, logprobs)
                counts.append(-1 if token is None else 1)
                ids += [] if token is None else [token]
        ids_hash = prefix_hashes(ids)[-1] if ids else 0
        return StepResult(plan.step, int32_array(counts), int32_array(ids), ids_hash, logprobs, 1000)

    def _count(self, step: int) -> None:
        assert step == self._next_step, f"step {step} came where {self._next_step} was expected"
        self._next_step += 1

    def _apply_delta(self, section: PlanSection) -> None:
        for admission in section.admissions:
            ids = admission.ids.tolist()
            assert 0 <= admission.slot < self._num_slots
            assert 0 <= admission.cached < len(ids), (
                f"{admission.cached} of {len(ids)} ids are cached: nothing is left to compute"
            )
            assert 0 < admission.prompt_len <= len(ids)
            self._slots[admission.slot] = _Slot(admission, ids, prefix_hashes(ids), admission.cached)
        (delta,) = section.pages
        assert len(set(delta.slots.tolist())) == len(delta.slots), "a slot appears twice in a page delta"
        pages = delta.pages.tolist()
        assert len(pages) == int(delta.counts.sum())
        for slot, count in zip(delta.slots.tolist(), delta.counts.tolist(), strict=True):
            self._slots[slot].pages += pages[:count]
            del pages[:count]
            row = self._slots[slot].pages
            assert all(0 <= page < self._num_pages for page in row) and len(set(row)) == len(row), f"pages {row}"

    def _rows(self, section: PlanSection) -> list[_Row]:
        rows = []
        extends = zip(
            section.extend_slots.tolist(),
            section.extend_starts.tolist(),
            section.extend_counts.tolist(),
            section.extend_samples.tolist(),
            strict=True,
        )
        for slot, start, count, samples in extends:
            state = self._slots[slot]
            assert start == state.length and count > 0, f"chunk at {start}, slot {slot} has {state.length} computed"
            assert start + count <= len(state.tokens), "a chunk goes beyond the known ids"
            assert samples == (start + count == len(state.tokens)), "a row must sample exactly at its last known id"
            rows.append(_Row(slot, start, start + count, bool(samples)))
        for slot in section.decode_slots.tolist():
            state = self._slots[slot]
            assert state.length == len(state.tokens) - 1, (
                f"slot {slot} decodes at {state.length} of {len(state.tokens)} ids"
            )
            rows.append(_Row(slot, state.length, state.length + 1, True))
        return rows

    def _run_model(self, rows: list[_Row]) -> None:
        """Reads see what earlier steps wrote; nothing that a step reads is written by another row of it."""
        places = {row.slot: self._places(row) for row in rows}
        for row in rows:
            self._check_context(row, places[row.slot], row.start)
        written = np.concatenate([places[row.slot][row.start :] for row in rows])
        assert len(np.unique(written)) == len(written), "two rows of a step write the same position"
        for row in rows:
            hashes = self._slots[row.slot].hashes
            self._kv[places[row.slot][row.start :]] = hashes[row.start : row.end]
            self._slots[row.slot].length = row.end
        for row in rows:
            self._check_context(row, places[row.slot], row.end)

    def _places(self, row: _Row) -> Int64Array:
        pages = np.array(self._slots[row.slot].pages, np.int64)
        assert row.end <= len(pages) * self._page_size, (
            f"slot {row.slot} has {len(pages)} pages for {row.end} positions"
        )
        positions = np.arange(row.end)
        places: Int64Array = pages[positions // self._page_size] * self._page_size + positions % self._page_size
        return places

    def _check_context(self, row: _Row, places: Int64Array, end: int) -> None:
        held = self._kv[places[:end]]
        wanted = np.array(self._slots[row.slot].hashes[:end], np.int64)
        wrong = np.flatnonzero(held != wanted)
        assert not len(wrong), (
            f"slot {row.slot} reads position {wrong[0]} of {end}, but its cell"
            f" {'was never written' if held[wrong[0]] == _NEVER_WRITTEN else 'holds something else'}"
        )

    def _sample(self, row: _Row, logprobs: list[RowLogprobs]) -> int | None:
        state = self._slots[row.slot]
        admission, prefix = state.admission, state.hashes[row.end - 1]
        if self._breaks_down and is_not_finite(prefix, admission.seed):
            state.tokens.append(0)  # the table holds something; the row is over
            state.hashes.append(0)
            return None
        num_outputs = len(state.tokens) - admission.prompt_len
        sampling = admission.sampling
        assert num_outputs < sampling.max_new_tokens, "a row is sampled beyond max_new_tokens"
        banned = frozenset(sampling.stop_ids.tolist()) if num_outputs < sampling.min_new_tokens else frozenset()
        token = draw(prefix, admission.seed, self._vocab_size, banned)
        state.tokens.append(token)
        state.hashes.append(extend_hash(prefix, token))
        if admission.logprobs.output:
            logprobs.append(_row_logprobs(row.slot, False, num_outputs, [logprob(state.hashes[-1])]))
        return token

    def _prompt_logprobs(self, row: _Row) -> list[RowLogprobs]:
        """Positions of a chunk tell of the tokens behind them; of token 0 nobody tells."""
        state = self._slots[row.slot]
        wanted, prompt_len = state.admission.logprobs.prompt_start, state.admission.prompt_len
        if wanted < 0:
            return []
        first, end = max(wanted, row.start + 1 if row.start else 0), min(row.end + 1, prompt_len)
        if first >= end:
            return []
        values = [logprob(state.hashes[i]) if i else float("nan") for i in range(first, end)]
        return [_row_logprobs(row.slot, True, first, values)]


def _row_logprobs(slot: int, is_prompt: bool, first: int, values: list[float]) -> RowLogprobs:
    nothing = np.zeros(0, np.float32)
    return RowLogprobs(slot, is_prompt, first, np.array(values, np.float32), int32_array(), nothing, nothing)
