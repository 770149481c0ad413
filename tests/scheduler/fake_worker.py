"""A worker without a model. It does what it is told, and checks at once all that a real one silently relies on.

Its KV memory is known by page: which slots hold the page, and the hash of all tokens up to the page's end, once that is written.
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from typing import cast

import numpy as np
from numpy.typing import NDArray

from srt.managers.scheduler.core import SchedulerCore
from srt.mem_cache.radix_cache import ITEM
from srt.protocol.engine_work import CaptureGraph, InspectTables
from srt.protocol.messages import (
    Int32Array,
    Int64Array,
    PageDelta,
    PlanSection,
    RowLogprobs,
    StepPlan,
    StepResult,
    WorkDone,
    WorkPlan,
)
from srt.protocol.views import AdmissionView
from tests.scheduler.fake_window import FakeWindow
from tests.scheduler.reference import UInt64Array, best_tokens, is_any, logprobs, logprobs_of
from tests.scheduler.resource_rules import ResourceRules
from tests.scheduler.settings import Settings
from tests.scheduler.traffic import Choice
from tests.support.wire import request_at_scheduler

OVER, ROBBED, EMPTY = 1, 2, 4  # why a slot may be in no plan
IS_COMPILING = 0.3  # of the captures come before their kernels are there
_NOT_WRITTEN = 0
_Chosen = tuple[
    int, int, int, bool
]  # logprobs to report: of which slot, from which position up to which, and whether of its prompt


class FakeWorker:
    """All ranks of one core, which say the same. It knows who is admitted by the seed."""

    def __init__(self, settings: Settings, by_seed: dict[int, Choice], resources: ResourceRules) -> None:
        self._settings = s = settings
        self._by_seed = by_seed
        self._resources = resources
        num_words = -(-s.num_slots // 64)
        width = s.max_request_tokens + 1
        self._choices: list[Choice | None] = [None] * s.num_slots
        self._barred: NDArray[np.uint8] = np.full(s.num_slots, EMPTY, np.uint8)
        self._length: Int64Array = np.zeros(s.num_slots, np.int64)  # positions computed
        self._known: Int64Array = np.zeros(s.num_slots, np.int64)  # ids in the token table
        self._num_admitted: Int64Array = np.zeros(s.num_slots, np.int64)  # of these, so many came with the admission
        self._extended: Int64Array = np.zeros(s.num_slots, np.int64)  # positions cached or computed by chunks
        self._most_known: Int64Array = np.zeros(s.num_slots, np.int64)
        self._error_at: Int64Array = np.zeros(s.num_slots, np.int64)
        self._ids: Int32Array = np.zeros((s.num_slots, width), np.int32)  # of the reference
        self._hashes: UInt64Array = np.zeros((s.num_slots, width), np.uint64)
        self._pages: Int32Array = np.zeros((s.num_slots, width // s.page_size + 2), np.int32)
        self._num_pages: Int64Array = np.zeros(s.num_slots, np.int64)
        self._page_hash: UInt64Array = np.zeros(s.num_pages, np.uint64)
        self._holders: UInt64Array = np.zeros((s.num_pages, num_words), np.uint64)  # a bit for each slot
        self._bits: UInt64Array = np.zeros((s.num_slots, num_words), np.uint64)
        for slot in range(s.num_slots):
            self._bits[slot, slot // 64] = np.uint64(1 << slot % 64)
        self._logging: set[int] = set()  # slots that are asked for logprobs of their outputs
        self._beside: dict[int, tuple[int, Int32Array]] = {}  # so many best tokens, and these, are told of, too
        self._prompt_start: dict[int, int] = {}  # and of their prompts, from this position on
        self._end: Int64Array = np.zeros(s.num_slots, np.int64)  # so many ids the request has at most
        self._stream: NDArray[np.bool_] = np.zeros(s.num_slots, np.bool_)  # somebody watches its tokens come
        self._planned_at: Int64Array = np.zeros(s.num_slots, np.int64)  # the last step that had the slot's request
        self._turn = 0  # number of the last step, other work not counted
        self._turn_of: Int64Array = np.zeros(s.num_slots, np.int64)
        self._rng = np.random.Generator(np.random.PCG64(len(by_seed)))
        self._next_step = 1
        self.num_graphs_left = s.num_graphs
        self.rows_per_step: list[int] = []
        self.num_prefix_hits = 0
        self.num_readmissions = 0
        self.rules: Counter[str] = Counter()  # how often each had something to judge
        self._windows = [FakeWindow(window, s, self._hashes, self.rules) for window in s.windows]

    def end(self, choice: Choice) -> None:
        """The scheduler knows that it is over: no plan that is made from now on may have it."""
        choice.is_over = True
        if choice.slot >= 0 and self._choices[choice.slot] is choice:
            self._barred[choice.slot] |= OVER
            self.rules["rule: no rows after the end"] += 1

    def check_written(self, cached: list[bytes]) -> None:
        """The prefix tree has only pages that were written in full."""
        pages = np.frombuffer(b"".join(cached), np.int32)
        self.rules["rule: the prefix tree has written pages only"] += bool(len(pages))
        unwritten = pages[self._page_hash[pages] == _NOT_WRITTEN]
        assert not len(unwritten), f"page {unwritten[0]} is in the prefix tree and was not written"

    def rows_of(self, plan: StepPlan, result: StepResult) -> list[tuple[Choice, int]]:
        """Whose rows are in this plan, which is the last, and how many ids each has got by it."""
        (section,) = plan.sections
        counts = iter(abs(result.counts).tolist())
        extends = zip(section.extend_slots.tolist(), section.extend_samples.tolist(), strict=True)
        rows = [(slot, next(counts) if samples else 0) for slot, samples in extends]
        rows += [(slot, next(counts)) for slot in section.decode_slots.tolist()]
        return [(choice, count) for slot, count in rows if (choice := self._choices[slot]) is not None]

    def only_row(self, plan: StepPlan) -> tuple[Choice, int] | None:
        """Of a plan that is to be executed: who is alone in it, and the ids of it that are known."""
        (section,) = plan.sections
        slots = [*section.extend_slots.tolist(), *section.decode_slots.tolist()]
        if len(slots) != 1:
            return None
        for admission in section.admissions:
            return self._by_seed[admission.seed], len(cast("AdmissionView", admission).ids) // ITEM
        choice = self._choices[slots[0]]
        return None if choice is None else (choice, int(self._known[slots[0]]))

    def num_known(self, choice: Choice) -> int:
        """Ids of it that are here, of the prompt too."""
        return int(self._known[choice.slot])

    def num_streams(self, slots: Int32Array) -> int:
        return int(np.count_nonzero(self._stream[slots]))

    def do(self, work: WorkPlan) -> WorkDone:
        self._count(work.step)
        if isinstance(work.work, CaptureGraph):
            is_compiling = self._rng.random() < IS_COMPILING
            self.num_graphs_left -= not is_compiling
            return WorkDone(work.step, 0, {"num_left": self.num_graphs_left})
        assert isinstance(work.work, InspectTables), work
        self.rules["rule: page tables are compared"] += 1
        digest = blake2b(digest_size=8)
        for slot, choice in enumerate(self._choices):
            if choice is not None:
                pages = self._pages[slot, : self._num_pages[slot]].tolist()
                pages += [number for window in self._windows for number in window.pages_of(slot)]
                digest.update(b"".join(number.to_bytes(4, "little") for number in (slot, len(pages), *pages)))
        hashed = digest.hexdigest()
        return WorkDone(work.step, 0, {"tables_hash": hashed, "num_slots_seen": 1000})

    def forget_cached(self) -> None:
        """The cache was flushed: nobody may be admitted with a page that was written before."""
        self._page_hash[:] = _NOT_WRITTEN

    def execute(self, plan: StepPlan, step_us: int, answered: int, is_trial: bool = False) -> StepResult:
        """The step's result, as rank 0 would send it. The scheduler has heard the results of all steps up to `answered`. While a suspect is
        tried, others stand still."""
        self._turn += not is_trial
        self._count(plan.step)
        (section,) = plan.sections
        admissions = cast("list[AdmissionView]", section.admissions)
        for admission in admissions:
            self._admit(admission)
        delta, *others = section.pages
        cached = {a.slot: a.cached for a in admissions}
        if len(delta.slots):
            self._take_pages(delta, cached)
        self._take_windows(section, others, cached)
        for admission in admissions:
            self._check_cached(admission)
        sampling, chosen = self._extend(section)
        decodes = section.decode_slots
        rows = np.concatenate((sampling, decodes)) if len(sampling) else decodes
        self._check_rows(section, plan.step, answered)
        places = self._known[rows]
        late = places >= self._most_known[rows]
        self.rules["rule: no row after the last token"] += is_any(places == self._most_known[rows] - 1)
        if is_any(late):
            raise AssertionError(f"{self._name(rows[late][0])} is sampled more often than needed")
        counts = self._counts(rows, len(sampling), section.row_tokens)
        is_plain = self._settings.row_tokens == 1 and not self._settings.breaks_down
        if len(decodes):
            self._decode(decodes, counts[len(sampling) :], section.row_tokens)
        if self._logging:
            columns = zip(rows.tolist(), places.tolist(), counts.tolist(), strict=True)
            chosen += [(slot, at, at + n, False) for slot, at, n in columns if n > 0 and slot in self._logging]
        ids = self._ids[rows, places] if is_plain else self._sampled(rows, counts.clip(0))
        self._known[rows] = places + (1 if is_plain else abs(counts))  # of what failed something is there, too
        logged = [self._row_logprobs(*entry) for entry in chosen]
        wants_capture = self.num_graphs_left > 0 and self._rng.random() < self._settings.missing_share
        return StepResult(plan.step, counts, ids, int(ids.sum()), logged, step_us, wants_capture)

    def _counts(self, rows: Int32Array, num_prompt_ends: int, row_tokens: int) -> Int32Array:
        """How many ids each row draws: decodes that guess, any number; -1 where the model has no finite logits for the next one."""
        counts, s = np.ones(len(rows), np.int32), self._settings
        if row_tokens > 1:
            most = np.minimum(row_tokens, self._end[rows] - self._known[rows])
            counts[:] = self._rng.integers(0, most + 1)
            counts[:num_prompt_ends] = 1
        if s.breaks_down:
            left = self._error_at[rows] - self._known[rows]
            cut = (self._error_at[rows] >= 0) & (left < counts)
            counts[cut] = np.where(left[cut] <= 0, -1, left[cut])
        return counts

    def _sampled(self, rows: Int32Array, counts: Int32Array) -> Int32Array:
        """Of each row so many ids behind those that it has, end to end."""
        ends = np.cumsum(counts)
        within = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
        ids: Int32Array = self._ids[np.repeat(rows, counts), np.repeat(self._known[rows], counts) + within]
        return ids

    def _count(self, step: int) -> None:
        assert step == self._next_step, f"step {step} came where {self._next_step} was expected"
        self._next_step += 1

    def _name(self, slot: int) -> str:
        choice = self._choices[slot]
        return f"slot {slot}, {'empty' if choice is None else choice.name},"

    # ---- The delta

    def _admit(self, admission: AdmissionView) -> None:
        slot, ids = admission.slot, np.frombuffer(admission.ids, np.int32)
        choice = self._by_seed.get(admission.seed)
        assert choice is not None, "nobody has the seed of an admission"
        self._leave(slot)
        self._check_admission(choice, admission)
        self._choices[slot] = choice
        choice.slot = slot
        everything, late = choice.answer.all_ids, self._settings.most_in_flight - 1
        needed = choice.prompt_len + len(choice.answer.ids)
        if choice.answer.reason != "length":
            needed += (late + 1) * self._settings.row_tokens - 1 + (choice.answer.reason == "error")
        self._most_known[slot] = min(needed, len(everything))
        self._error_at[slot] = choice.prompt_len + choice.answer.error_at if choice.answer.error_at >= 0 else -1
        self._ids[slot, : len(everything)] = everything
        self._hashes[slot, : len(everything)] = choice.hashes
        self._length[slot], self._known[slot], self._num_pages[slot] = admission.cached, len(ids), 0
        for window in self._windows:
            window.admit(slot, admission.cached)
        self._barred[slot], self._num_admitted[slot], self._extended[slot] = 0, len(ids), admission.cached
        self._stream[slot] = choice.request.stream
        self._end[slot], self._planned_at[slot] = len(everything), -self._settings.num_stages
        self.num_prefix_hits += admission.cached > 0
        self._beside[slot] = admission.logprobs.top, np.frombuffer(admission.logprobs.ids, np.int32)
        if admission.logprobs.output:
            self._logging.add(slot)
        if admission.logprobs.prompt_start >= 0:
            self._prompt_start[slot] = admission.logprobs.prompt_start

    def _leave(self, slot: int) -> None:
        """The slot's table row begins anew. Whoever had it runs no more, unless it is admitted again."""
        before = self._choices[slot]
        if before is None:
            return
        if before.slot == slot:
            before.num_held = int(self._known[slot])
            before.slot = -1
        self._holders[self._pages[slot, : self._num_pages[slot]]] &= ~self._bits[slot]
        self._logging.discard(slot)
        self._prompt_start.pop(slot, None)

    def _check_admission(self, choice: Choice, admission: AdmissionView) -> None:
        ids, request = np.frombuffer(admission.ids, np.int32), request_at_scheduler(choice.request)
        assert not choice.is_over, f"{choice.name} is admitted after its end"
        self._resources.check_admission(choice, admission)
        if choice.slot >= 0:  # preempted, and its slot was not used since
            choice.num_held = int(self._known[choice.slot])
            self._barred[choice.slot] |= OVER
        if choice.num_held >= 0:
            self.num_readmissions += 1
            self.rules["rule: the preempted come back with all their tokens"] += 1
            assert len(ids) == choice.num_held, (
                f"{choice.name} comes back with {len(ids)} ids, it had {choice.num_held}"
            )
        elif choice.num_cached < 0:
            choice.num_cached = admission.cached
        self.rules["rule: admitted with its tokens and adjustments"] += 1
        self.rules["rule: a new server gets the tokens of the old one"] += (
            choice.num_delivered > 0 and choice.num_sent < 0
        )
        assert admission.prompt_len == choice.prompt_len <= len(ids)
        assert not is_any(ids != choice.answer.all_ids[: len(ids)]), f"{choice.name} is admitted with wrong ids"
        assert 0 <= admission.cached < len(ids), (
            f"{admission.cached} of {len(ids)} ids are cached: nothing is left to compute"
        )
        assert admission.cached % self._settings.page_size == 0
        assert admission.sampling == request.sampling and admission.logprobs.output == request.logprobs.output

    def _take_pages(self, delta: PageDelta, cached: dict[int, int]) -> None:
        slots, counts = delta.slots, delta.counts
        assert len(set(slots.tolist())) == len(slots), "a slot appears twice in a page delta"
        assert int(counts.sum()) == len(delta.pages), "a page delta's columns do not match"
        if not cached and int(counts.max()) == 1:
            self._append_pages(slots, delta.pages)
            return
        pages, owners, end = delta.pages, [], 0
        own = np.ones(len(pages), np.bool_)
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            start, end = end, end + count
            num_cached = cached.get(slot, 0) // self._settings.page_size
            own[start : start + num_cached] = False
            held = int(self._num_pages[slot])
            self._pages[slot, held : held + count] = pages[start:end]
            self._num_pages[slot] = held + count
            owners.append(slot)
        everyone = np.repeat(owners, counts)
        self._own(everyone[own], pages[own])
        for slot in cached:
            self._holders[self._pages[slot, : cached[slot] // self._settings.page_size]] |= self._bits[slot]

    def _take_windows(self, section: PlanSection, deltas: list[PageDelta], cached: dict[int, int]) -> None:
        """Take the pages of the groups with a window, and read what the rows see."""
        assert len(deltas) == len(self._windows), "a plan has pages for other groups than there are"
        for window, delta in zip(self._windows, deltas, strict=True):
            assert delta.slots.tobytes() == section.pages[0].slots.tobytes(), "page groups grow in different slots"
            window.take_pages(delta, self._num_pages, cached)
            window.note_lengths(self._length)
            for slot in (*section.extend_slots.tolist(), *section.decode_slots.tolist()):
                window.read(slot, int(self._length[slot]))

    def check_windows(self, core: SchedulerCore) -> None:
        """Pages of windows are in use only where a row may read them."""
        for window, pages in zip(self._windows, core.memory.windows, strict=True):
            used = pages.num_pages - pages.num_available
            window.check_given_back(core.slots.used_slots(), self._length, used)

    def _append_pages(self, slots: Int32Array, pages: Int32Array) -> None:
        places = self._num_pages[slots]
        self._pages[slots, places] = pages
        self._num_pages[slots] = places + 1
        self._own(slots, pages)

    def _own(self, slots: Int32Array, pages: Int32Array) -> None:
        """These slots will write these pages. Who has held one of them so far must not run any more."""
        bits = self._bits[slots]
        before = self._holders[pages]
        if is_any(before != 0):
            self.rules["rule: no rows without their pages"] += 1
            robbed = np.bitwise_or.reduce(before, axis=0).view(np.uint8)
            self._barred |= np.unpackbits(robbed, bitorder="little")[: len(self._barred)] * np.uint8(ROBBED)
        self._holders[pages] = bits
        self.rules["rule: a page has one writer"] += 1
        assert not is_any(self._holders[pages] != bits), "a plan gives a page to two slots"
        self._page_hash[pages] = _NOT_WRITTEN

    def _check_cached(self, admission: AdmissionView) -> None:
        """What an earlier step wrote there is what this request would write."""
        size, slot = self._settings.page_size, admission.slot
        count = admission.cached // size
        if count:
            self.rules["rule: cached pages hold the request's tokens"] += 1
            held = self._page_hash[self._pages[slot, :count]]
            wrong = (held != self._hashes[slot, size - 1 : admission.cached : size]).nonzero()[0]
            assert not len(wrong), (
                f"{self._name(slot)} is admitted with page {wrong[0]} of {count} from the cache, which"
                f" {'was not written by an earlier plan' if held[wrong[0]] == _NOT_WRITTEN else 'holds something else'}"
            )

    # ---- The rows

    def _check_rows(self, section: PlanSection, step: int, answered: int) -> None:
        extends, decodes = section.extend_slots, section.decode_slots
        rows = np.concatenate((extends, decodes)) if len(extends) else decodes
        assert len(rows), f"step {step} has no rows"
        assert len(set(rows.tolist())) == len(rows), f"step {step} has a slot twice"
        self.rows_per_step.append(len(rows))
        self.rules["rule: each slot once in a plan"] += len(rows) > 1
        barred = self._barred[rows]
        if is_any(barred != 0):
            at = int(np.flatnonzero(barred)[0])
            why = "after its end" if barred[at] & OVER else "though a page of it was given to another"
            raise AssertionError(f"{self._name(rows[at])} is in a plan {why}")
        self.rules["rule: a row decodes once in the pipeline"] += self._settings.num_stages > 1
        inside = self._planned_at[decodes] > max(step - self._settings.num_stages, answered)
        if is_any(inside):
            raise AssertionError(
                f"{self._name(decodes[inside][0])} is in step {step}, and in another that is under way"
            )
        self._check_share(decodes)
        self._check_nobody_stands_still(section.decode_slots)
        self._planned_at[rows] = step
        self._turn_of[rows] = self._turn
        if len(extends):
            self._check_chunk(section, step)

    def _check_share(self, decodes: Int32Array) -> None:
        """A step of a pipeline has its share of the rows that decode, so that there are rows for the other stages."""
        num_stages = self._settings.num_stages
        if num_stages == 1:
            return
        num_decoding = sum(
            choice is not None and self._length[slot] >= choice.prompt_len for slot, choice in enumerate(self._choices)
        )
        self.rules["rule: each step of a pipeline has its share of decodes"] += len(decodes) > 1
        share = -(-num_decoding // num_stages)
        assert len(decodes) <= share, f"{len(decodes)} of {num_decoding} rows decode in one step of {num_stages} stages"

    def _check_chunk(self, section: PlanSection, step: int) -> None:
        """Never more prompt tokens than allowed; nor less, where nobody watches and a prompt could go on, for which it has pages."""
        chunk, num_tokens = self._settings.chunk, int(section.extend_counts.sum())
        self.rules["rule: no more prompt tokens than allowed"] += num_tokens == chunk
        assert chunk < 0 or num_tokens <= chunk, "a plan has more prompt tokens than allowed"
        if num_tokens != chunk and not self.num_streams(section.decode_slots):
            room = self._num_pages[section.extend_slots] * self._settings.page_size
            stops = (section.extend_samples == 0) & (section.extend_starts + section.extend_counts < room)
            self.rules["rule: a prompt stops only for those who stream"] += 1
            assert not is_any(stops), f"a prompt stops in step {step} after {num_tokens} tokens, for nobody"

    def _check_nobody_stands_still(self, decodes: Int32Array) -> None:
        """Who streams is in every step, or has its turn in a pipeline; but not who may have got all its ids already."""
        s = self._settings
        longest = 1 if s.num_stages == 1 else 3 * s.num_stages
        if s.row_tokens > 1 and s.num_stages > 1:
            longest *= 2  # those who had seemed to have all go before
        self.rules["rule: every stream goes on"] += bool(len(decodes))
        paused = self._turn_of[decodes] < self._turn - longest
        if s.row_tokens > 1:
            paused &= self._known[decodes] + s.row_tokens * (s.most_in_flight + 1) < self._end[decodes]
        if is_any(paused):
            raise AssertionError(f"{self._name(decodes[paused][0])} was left out of a step")

    def _extend(self, section: PlanSection) -> tuple[Int32Array, list[_Chosen]]:
        """The slots that sample, and the logprobs of prompt tokens."""
        slots, chosen = section.extend_slots, list[_Chosen]()
        size = self._settings.page_size
        columns = (
            slots.tolist(),
            section.extend_starts.tolist(),
            section.extend_counts.tolist(),
            section.extend_samples.tolist(),
        )
        for slot, start, count, samples in zip(*columns, strict=True):
            end, known = start + count, int(self._known[slot])
            self.rules["rule: a prompt goes on where it was"] += start > 0
            self.rules["rule: a prompt samples at its end"] += 1
            assert start == self._length[slot] and count > 0, (
                f"{self._name(slot)} has a chunk at {start}, not at {self._length[slot]}"
            )
            assert end <= known, f"{self._name(slot)} has a chunk beyond its {known} ids"
            assert samples == (end == known), f"{self._name(slot)} must sample exactly at its last known id"
            assert end <= self._num_pages[slot] * size, f"{self._name(slot)} has too few pages for {end} positions"
            first, last = start // size, end // size
            self._page_hash[self._pages[slot, first:last]] = self._hashes[slot, (first + 1) * size - 1 : end : size]
            self._length[slot] = self._extended[slot] = end
            for window in self._windows:
                window.write(slot, start, end)
            if slot in self._prompt_start:
                chosen += self._prompt_positions(slot, start, end)
        return slots[section.extend_samples != 0], chosen

    def _prompt_positions(self, slot: int, start: int, end: int) -> list[_Chosen]:
        """Positions of a chunk tell of the tokens behind them; of token 0 nobody tells."""
        wanted = self._prompt_start[slot]
        first, behind = max(wanted, start + 1 if start else 0), min(end + 1, self._prompt_len(slot))
        return [(slot, first, behind, True)] if first < behind else []

    def _decode(self, rows: Int32Array, counts: Int32Array, row_tokens: int) -> None:
        length, s = self._length[rows], self._settings
        self.rules["rule: rows bring as many ids as a plan allows"] += row_tokens > 1
        self.rules["rule: rows bring one id where a plan allows no more"] += row_tokens == 1 < s.row_tokens
        assert 1 <= row_tokens <= s.row_tokens, f"a plan allows {row_tokens} ids a row, of {s.row_tokens}"
        self.rules["rule: a decode has its place"] += 1
        if is_any(length != self._known[rows] - 1):
            raise AssertionError(
                f"{self._name(rows[length != self._known[rows] - 1][0])} decodes though it lacks more than one position"
            )
        last, room = length, self._num_pages[rows] * s.page_size
        if row_tokens > 1:  # what it guesses it writes, too
            last = length + np.minimum(row_tokens, self._end[rows] - self._known[rows]) - 1
        if is_any(last >= room):
            raise AssertionError(f"{self._name(rows[last >= room][0])} has no page for its next position")
        if row_tokens == 1:
            self._write_one_each(rows)
            return
        for n in range(row_tokens):
            self._write_one_each(rows[abs(counts) > n])

    def _write_one_each(self, rows: Int32Array) -> None:
        size = self._settings.page_size
        length = self._length[rows]
        full = length % size == size - 1
        if is_any(full):
            ends, places = rows[full], length[full]
            self._page_hash[self._pages[ends, places // size]] = self._hashes[ends, places]
        self._length[rows] = length + 1
        for window in self._windows:
            for slot, start in zip(rows.tolist(), length.tolist(), strict=True):
                window.write(slot, start, start + 1)

    def _row_logprobs(self, slot: int, first: int, end: int, is_prompt: bool) -> RowLogprobs:
        hashes, (top, ids) = self._hashes[slot, first:end], self._beside[slot]
        top_ids, best = best_tokens(hashes, top, self._settings.vocab_size)
        of_ids = logprobs_of(hashes, ids)
        values = logprobs(hashes)
        if is_prompt and first == 0:
            values[0] = float("nan")
        start = first if is_prompt else first - self._prompt_len(slot)
        beside = top_ids.reshape(-1), best.reshape(-1), of_ids.reshape(-1)
        return RowLogprobs(slot, is_prompt, start, np.array(values, np.float32), *beside)

    def _prompt_len(self, slot: int) -> int:
        choice = self._choices[slot]
        assert choice is not None
        return choice.prompt_len
