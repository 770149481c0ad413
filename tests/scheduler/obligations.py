"""What a server owes each choice: its logprobs, its times, its counts, and an end when its time is up.

All is told by what was sent and when: requests that arrive, plans, results, batches. The scheduler is asked for two things only: which
requests it has, and whether they wait.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from srt.managers.scheduler.request import Request, Status
from srt.managers.tokenizer_manager.api_types import TokenLogprob
from srt.protocol.messages import GenerateRequest, RequestDone, StepPlan, TokenBatch
from tests.scheduler.hostile import HOSTILE_RIDS
from tests.scheduler.reference import best_tokens, logprobs, logprobs_of
from tests.scheduler.settings import Settings
from tests.scheduler.traffic import Choice

NEVER = -1.0
INSTANT_S = 1e-9  # times are sums of the same numbers


@dataclass(slots=True, eq=False)
class _Stay:
    """A choice in one server, from its arrival on."""

    choice: Choice
    arrived_s: float
    next_prompt_logprob: int  # of those that are to be told, by index into the prompt
    next_logprob: int  # and by index into the output
    started_s: float = NEVER  # first admission
    has_slot: bool = False
    num_lost: int = 0  # slots

    @property
    def prompt_logprobs_are_told(self) -> bool:
        return self.choice.request.logprobs.prompt_start < 0 or self.next_prompt_logprob >= self.choice.prompt_len


class Obligations:
    """Hears what one server is told and what it says. AssertionError when something due is missing, late, or wrong."""

    def __init__(self, settings: Settings, statistics: Counter[str]) -> None:
        self._settings = settings
        self._statistics = statistics
        self._stays: dict[tuple[int, int], _Stay] = {}  # by rid and choice
        self._by_seed: dict[int, _Stay] = {}
        self._early: list[_Stay] = []  # arrived before the workers were ready: their time begins with them
        self._looked_s = 0.0  # when somebody looked last whether a time was up

    # ---- What the server hears

    def arrive(self, message: GenerateRequest, choices: list[Choice], now: float, *, is_early: bool) -> None:
        """Its choices have come, which may have been elsewhere before."""
        start = message.logprobs.prompt_start
        for choice, outputs in zip(choices, message.output_ids, strict=True):
            stay = _Stay(choice, now, choice.prompt_len if start < 0 else start, len(outputs))
            self._stays[message.rid, choice.choice] = self._by_seed[choice.seed] = stay
            if is_early:
                self._early.append(stay)

    def become_ready(self, now: float) -> None:
        for stay in self._early:
            stay.arrived_s = now
        self._early.clear()

    # ---- What it does

    def see_plan(self, plan: StepPlan, now: float) -> None:
        for admission in plan.sections[0].admissions:
            stay = self._by_seed[admission.seed]
            if stay.started_s == NEVER:
                stay.started_s = now
            stay.num_lost += stay.has_slot  # it lost one, and has another at once
            stay.has_slot = True

    def see_preemptions(self, requests: list[Request]) -> None:
        """Those that had a slot and wait have lost it."""
        for request in requests:
            if request.progress.status is Status.WAITING:
                stay = self._stays.get(request.key)
                if stay is not None and stay.has_slot:
                    stay.has_slot = False
                    stay.num_lost += 1

    def see_batch(self, batch: TokenBatch, now: float) -> None:
        """Before its ranges count as sent: each logprob once, in order, and in the batch that brings its token."""
        self._see_logprobs(batch)
        for rid, index, first, count in zip(
            *(batch.rids.tolist(), batch.choices.tolist(), batch.first.tolist(), batch.counts.tolist()), strict=True
        ):
            stay = self._stays[rid, index]
            spec = stay.choice.request.logprobs
            if spec.output:
                self._statistics["rule: logprobs come with their tokens"] += 1
                is_beyond_stop = self._settings.row_tokens > 1 and stay.next_logprob > first + count
                assert stay.next_logprob == first + count or is_beyond_stop, (
                    f"{stay.choice.name}: tokens up to {first + count} come with logprobs up to {stay.next_logprob}"
                )
            if spec.prompt_start >= 0:
                self._statistics["rule: a prompt's logprobs come before its answer"] += 1
                assert stay.prompt_logprobs_are_told, (
                    f"{stay.choice.name}: its answer begins, and its prompt is told up to {stay.next_prompt_logprob}"
                )
        for done in batch.done:
            if done.rid >= HOSTILE_RIDS:
                continue
            self._see_end(self._stays[done.rid, done.choice], done, now)

    def _see_logprobs(self, batch: TokenBatch) -> None:
        for chunk in batch.logprobs:
            stay = self._stays[chunk.rid, chunk.choice]
            wanted = stay.next_prompt_logprob if chunk.is_prompt else stay.next_logprob
            self._statistics["rule: each logprob is sent once"] += 1
            assert chunk.first == wanted, (
                f"{stay.choice.name}: logprobs from {chunk.first} on came, where {wanted} was next (prompt: {chunk.is_prompt})"
            )
            if chunk.is_prompt:
                stay.next_prompt_logprob += len(chunk.chosen)
            else:
                stay.next_logprob += len(chunk.chosen)

    def _see_end(self, stay: _Stay, done: RequestDone, now: float) -> None:
        s, name, statistics = self._settings, stay.choice.name, self._statistics
        waited_s = stay.started_s - stay.arrived_s if stay.started_s != NEVER else NEVER
        statistics["rule: the time in the queue is told"] += 1
        assert abs(done.queue_s - waited_s) < INSTANT_S, f"{name} waited {waited_s:.6f} s for its slot, {done} says"
        statistics["rule: lost slots are told"] += stay.num_lost > 0
        assert done.num_preempted == stay.num_lost, f"{name} lost {stay.num_lost} slots, {done} says"
        if done.status == 503:
            statistics["rule: no time is up too early"] += 1
            assert stay.started_s == NEVER, f"{name} had its slot, and ends as if it had waited in vain"
            assert now >= stay.arrived_s + (s.waiting_timeout or 0.0), f"{name} waited from {stay.arrived_s:.3f} s only"
        elif done.status == 504:
            statistics["rule: no time is up too early"] += 1
            assert stay.started_s != NEVER, f"{name} never ran, and ends as if it had run too long"
            assert now >= stay.started_s + (s.running_timeout or 0.0), f"{name} ran from {stay.started_s:.3f} s only"

    # ---- Time

    def look_at_time(self, live: list[Request], now: float) -> None:
        """The scheduler's process wakes now; when it did so last it must have ended all whose time was up then."""
        looked_s, self._looked_s, s = self._looked_s, now, self._settings
        for request in live:
            stay = self._stays.get(request.key)
            if stay is None or request.progress.status is Status.ENDED:
                continue
            begin, limit = stay.started_s, s.running_timeout
            if begin == NEVER:
                begin, limit = stay.arrived_s, s.waiting_timeout
            if limit is not None:
                self._statistics["rule: what is overdue ends by itself"] += 1
                assert begin + limit > looked_s, f"the time of {stay.choice.name} was up at {begin + limit:.3f} s"


def wanted_rows(choice: Choice, first: int, end: int, vocab_size: int) -> list[TokenLogprob]:
    """The logprobs of its tokens from `first` on, prompt included, as a frontend must show them."""
    spec, hashes, tokens = choice.request.logprobs, choice.hashes[first:end], choice.answer.all_ids[first:end].tolist()
    top_ids, top = best_tokens(hashes, spec.top, vocab_size)
    of_ids, asked = logprobs_of(hashes, spec.ids), spec.ids.tolist()
    rows = []
    for i, (value, token) in enumerate(zip(logprobs(hashes), tokens, strict=True)):
        if first + i == 0:
            rows.append(TokenLogprob(None, token))
            continue
        best = tuple(zip(top[i].tolist(), top_ids[i].tolist(), strict=True))
        rows.append(TokenLogprob(value, token, best, tuple(zip(of_ids[i].tolist(), asked, strict=True))))
    return rows
