"""The ledger of received tokens: it releases the tokens of every live choice exactly once and in order. Pure state: no I/O, no clock.

Tokens come as ranges. A range may come twice, late or, after a gap, too early. When a scheduler dies, the next one continues behind the
tokens that the ledger has. Tokens whose logprobs have not come are dropped and computed again; they were not released yet.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from srt.managers.tokenizer_manager.api_types import TokenLogprob
from srt.managers.tokenizer_manager.logprob_rows import logprob_rows
from srt.protocol.labels import is_named
from srt.protocol.link_errors import LinkBroken
from srt.protocol.messages import (
    TRIAL_TOKENS,
    Abort,
    AckBatch,
    AskRange,
    FromFrontend,
    GenerateRequest,
    LastWord,
    Refused,
    RequestDone,
    TokenBatch,
    TokenLogprobs,
    int32_array,
)

ALL_CHOICES = -1
SUSPECTED = 2  # a request is tried alone after this many engine deaths while it was in flight
CONVICTED = 2  # a request fails after this many engine deaths while it alone was in flight
MOST_CONVICTED = 1000  # convicted requests to remember
CONVICTION = "The engine died twice while it ran this request and nothing else."


@dataclass(frozen=True, slots=True)
class Send:
    """Effect: send a message to the scheduler."""

    message: FromFrontend


class NewTokens(Struct, frozen=True, gc=False):
    """Effect: deliver the next tokens of a choice, with their logprob rows if those were asked for.

    The first NewTokens of a choice also has the prompt's rows. `cached` is the number of its prompt tokens that the prefix cache had.
    """

    rid: int
    choice: int
    ids: list[int]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    cached: int = 0
    reader: Any = None  # the `reader` that was given to `add`


@dataclass(frozen=True, slots=True)
class ChoiceEnded:
    """Effect: end a choice whose tokens were all delivered. The ledger has forgotten it."""

    rid: int
    choice: int
    done: RequestDone


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """Effect: fail a request that the scheduler refused. The ledger has forgotten it."""

    rid: int
    status: int
    message: str
    retry_after_s: int = 0


Effect = Send | NewTokens | ChoiceEnded | RequestRefused


@dataclass(slots=True)
class _Choice:
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # rows of the tokens behind `num_released`
    num_released: int = 0  # tokens delivered in NewTokens effects
    cached: int = 0  # cached prompt tokens, as reported with the first tokens: a later scheduler may find another number in its cache
    is_gap: bool = False  # the current batch has tokens that do not follow directly on `ids`
    asked_from: int = -1  # after a gap: the index from which tokens were asked for again; -1: no gap
    done: RequestDone | None = None
    was_in_flight: bool = False  # at the end of the present scheduler, as its LastWord says
    num_deaths: int = 0  # engine deaths that this choice may have caused, without progress between them
    num_lone_deaths: int = 0  # engine deaths while it alone was in flight, without progress between them
    died_at: int = 0  # `num_released` at the last engine death that it may have caused

    @property
    def num_logprobs(self) -> int:
        return self.num_released + len(self.logprobs)

    def record_death(self, *, is_suspected: bool, is_alone: bool) -> None:
        """Record an engine's death. A harmful choice kills engines at the same token each time, so progress by more than TRIAL_TOKENS
        since the last death clears the counts."""
        self.was_in_flight = False
        if self.num_released > self.died_at + TRIAL_TOKENS:
            self.num_deaths = self.num_lone_deaths = 0
        if is_suspected:
            self.num_deaths += 1
            self.num_lone_deaths += is_alone
            self.died_at = self.num_released

    @property
    def is_suspect(self) -> bool:
        """True if it may have caused an engine's death and has not got past that token since."""
        return self.num_deaths > 0 and self.num_released <= self.died_at + TRIAL_TOKENS

    @property
    def has_ended(self) -> bool:
        """True if the end and every token before it have come."""
        return self.done is not None and len(self.ids) >= self.done.num_output


@dataclass(slots=True)
class LedgerEntry:
    """A live request. Only ledgers read or write its fields."""

    request: GenerateRequest
    choices: dict[int, _Choice]
    has_logprobs: bool  # logprobs were asked for
    reader: Any
    only: _Choice | None  # choice 0, if it is the only one
    was_sent: bool  # to a scheduler
    is_aborted: bool = False  # a client was told that it is aborted, but the scheduler has not confirmed it
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def next_prompt_logprob(self) -> int:
        """Index of the prompt token whose logprobs come next."""
        return self.request.logprobs.prompt_start + len(self.prompt_logprobs)

    @property
    def has_prompt_logprobs(self) -> bool:
        """True if all prompt logprobs that were asked for have come."""
        return self.request.logprobs.prompt_start < 0 or self.next_prompt_logprob >= len(self.request.prompt_ids)

    def num_complete(self, choice: _Choice) -> int:
        """Return the number of tokens that can be released: those whose logprobs, if wanted, have come, or all if the choice has ended."""
        if choice.has_ended:
            return len(choice.ids)
        if not self.has_prompt_logprobs:
            return 0
        return min(len(choice.ids), choice.num_logprobs) if self.request.logprobs.output else len(choice.ids)


class Conviction(NamedTuple):
    """What is remembered of a convicted request."""

    died_at: int  # tokens that were released at the engine's death
    replica: int  # whose engines died


class Convictions:
    """The latest requests that killed two engines, by their digests. Clients may submit the same again."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, Conviction] = {}

    def find(self, request: GenerateRequest) -> Conviction | None:
        return self._by_digest.get(digest_of(request)) if self._by_digest else None

    def add(self, request: GenerateRequest, conviction: Conviction) -> None:
        self._by_digest[digest_of(request)] = conviction
        if len(self._by_digest) > MOST_CONVICTED:
            del self._by_digest[next(iter(self._by_digest))]


class RequestLedger:
    """Owner of the tokens of every live request of one replica, on the frontend's side.

    Requests that ended, were refused or were aborted are forgotten.
    """

    def __init__(self, convictions: Convictions | None = None, replica: int = 0) -> None:
        """Create an empty ledger. The ledgers of all replicas share their convictions."""
        self._entries: dict[int, LedgerEntry] = {}
        self._labels: set[str] = set()
        self._last_batch = -1
        self._last_acknowledged = -1
        self._has_scheduler = True
        self._convictions = Convictions() if convictions is None else convictions
        self.replica = replica
        self._has_last_word = False  # the last scheduler said what was in flight at its end
        self._by_request: bool | None = None  # whether a request may be the cause of that end; None: unknown
        self._was_alone = False  # only one choice was in flight at the last scheduler's end
        self.num_batches = 0
        self.num_gaps = 0
        self.num_surplus_tokens = 0  # tokens known already, or belonging to a choice that has ended

    @property
    def num_requests(self) -> int:
        return len(self._entries)

    @property
    def num_unsent(self) -> int:
        """Number of requests that were sent to no scheduler yet."""
        return sum(not entry.was_sent for entry in self._entries.values())

    @property
    def num_choices(self) -> int:
        return sum(len(entry.choices) for entry in self._entries.values())

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.ids) for entry in self._entries.values() for choice in entry.choices.values())

    @property
    def num_unacknowledged(self) -> int:
        """Number of received batches that are not acknowledged yet."""
        return self._last_batch - self._last_acknowledged

    def has_label(self, label: str) -> bool:
        return label in self._labels

    def live_rids(self) -> list[int]:
        return list(self._entries)

    def named(self, name: str) -> list[int]:
        """Return the live requests that a client means by this name."""
        return [rid for rid, entry in self._entries.items() if is_named(entry.request.label, name)]

    def add(self, request: GenerateRequest, reader: object = None) -> list[Effect]:
        """Enter a new request, whose rid and label must not be live. Its effects carry `reader`, which saves a lookup."""
        assert request.rid not in self._entries, f"request {request.rid} is live"
        assert request.label not in self._labels, f"the label {request.label} is live"
        choices = {choice: _Choice() for choice in request.choices.tolist()}
        self._entries[request.rid] = LedgerEntry(
            request,
            choices,
            has_logprobs=request.logprobs.output or request.logprobs.prompt_start >= 0,
            reader=reader,
            only=choices.get(0) if len(choices) == 1 else None,
            was_sent=self._has_scheduler,
        )
        conviction = self._convictions.find(request)
        if conviction is not None:
            for choice in choices.values():
                choice.num_deaths, choice.num_lone_deaths, choice.died_at = SUSPECTED, CONVICTED - 1, conviction.died_at
            request = self._entries[request.rid].request = replace(request, suspect=True)
        self._labels.add(request.label)
        return [Send(request)]

    def handle(self, message: TokenBatch | Refused) -> list[Effect]:
        """Return the effects of a message; raise LinkBroken for a batch that contradicts itself."""
        return list(self.effects_of(message))

    def effects_of(self, message: TokenBatch | Refused) -> Iterator[Effect]:
        """Yield the effects of a message one by one. Iterate to the end; `end` may be called in between.

        Tokens count as released, and choices are forgotten, only when the effects that say so are asked for.
        """
        if isinstance(message, Refused):
            yield from self._refuse(message)
            return
        self.num_batches += 1
        self._last_batch = max(self._last_batch, message.number)
        touched: dict[tuple[int, int], None] = {}  # in the order of the batch
        yield from self._enter_ids(message, touched)
        for logprobs in message.logprobs:
            self._enter_logprobs(logprobs, touched)
        for done in message.done:
            choice = self._choice(done.rid, done.choice)
            if choice is not None:
                choice.done = done
                touched[done.rid, done.choice] = None
        for rid, index in touched:
            if self._choice(rid, index) is not None:
                yield from self._settle(rid, index)

    def acknowledge(self) -> list[Effect]:
        """Acknowledge all batches since the last call with one message. Apply the effects of these batches before sending it.

        Until the scheduler gets it, the scheduler keeps the tokens that an AskRange among the effects may ask for.
        """
        if self._last_batch == self._last_acknowledged:
            return []
        self._last_acknowledged = self._last_batch
        return [Send(AckBatch(self._last_batch))]

    def end(self, rid: int, choice: int = ALL_CHOICES) -> list[Effect]:
        """Forget a choice (or all) that ends on this side: its client left, or a stop was found. No effects if it has ended already."""
        entry = self._entries.get(rid)
        if entry is None or (choice != ALL_CHOICES and choice not in entry.choices):
            return []
        for index in list(entry.choices) if choice == ALL_CHOICES else [choice]:
            self._forget(rid, index)
        return [Send(Abort(rid, choice))]

    def record_aborted(self, rid: int) -> None:
        """Record that a client was told that this request is aborted. Should the scheduler die before it confirms, `resume` ends it."""
        entry = self._entries.get(rid)
        if entry is not None:
            entry.is_aborted = True

    def record_last_word(self, word: LastWord) -> None:
        """Record the choices that were in flight when a scheduler came to its end."""
        self._was_alone, self._has_last_word = word.is_alone, True
        for rid, index in zip(word.rids.tolist(), word.choices.tolist(), strict=True):
            choice = self._choice(rid, index)
            if choice is not None:
                choice.was_in_flight = True

    def record_lost(self) -> None:
        """Record that the scheduler is unreachable. New requests wait until `resume`."""
        self._has_scheduler = False

    def record_cause(self, *, by_request: bool) -> None:
        """Record whether a request may have caused the scheduler's death, before all of its engine has ended."""
        self._by_request = by_request

    def record_death(self, *, by_request: bool) -> None:
        """Record the cause of the scheduler's death. If a request may be the cause, choices in flight become suspects."""
        self._by_request = by_request
        for entry in self._entries.values():
            for choice in entry.choices.values():
                choice.record_death(is_suspected=choice.was_in_flight and by_request, is_alone=self._was_alone)

    def resume(self) -> Iterator[Effect]:
        """Yield the effects by which a new scheduler continues each live choice. A new scheduler's batches are numbered from the start.

        A choice ends here if it was aborted, if its tokens are complete, or if two engines died while it alone was in flight and it made
        no progress between these deaths. Iterate to the end, as with `effects_of`.
        """
        self._last_batch = self._last_acknowledged = -1
        self._has_scheduler = True
        self._has_last_word, self._by_request = False, None
        for entry in list(self._entries.values()):
            for index, choice in list(entry.choices.items()):
                if index not in entry.choices:
                    continue
                if choice.num_lone_deaths >= CONVICTED:
                    yield from self._convict(entry, index, choice)
                else:
                    yield from self._rewind(entry, index, choice)
            if entry.choices:
                again = _resubmission(entry)
                entry.was_sent = True
                yield Send(again)

    # ---- From one replica to another

    def movable(self) -> list[int]:
        """Return the requests that another replica may continue after the scheduler's end: those that cannot have caused it."""
        return [rid for rid, entry in self._entries.items() if self._may_move(entry)]

    def request(self, rid: int) -> GenerateRequest:
        """Return a live request as it was submitted."""
        return self._entries[rid].request

    def withdraw(self, rid: int) -> LedgerEntry:
        """Give up a request without telling the scheduler, which is gone. Pass the result to another ledger's `adopt`."""
        entry = self._entries.pop(rid)
        self._labels.remove(entry.request.label)
        return entry

    def adopt(self, entry: LedgerEntry) -> Iterator[Effect]:
        """Yield the effects by which this ledger's scheduler continues a request of another replica. Iterate to the end."""
        assert entry.request.rid not in self._entries, f"request {entry.request.rid} is live"
        self._entries[entry.request.rid] = entry
        self._labels.add(entry.request.label)
        for index, choice in list(entry.choices.items()):
            choice.was_in_flight = False
            choice.num_deaths = choice.num_lone_deaths = 0
            yield from self._rewind(entry, index, choice)
        if entry.choices:
            again = _resubmission(entry)
            entry.was_sent = entry.was_sent or self._has_scheduler
            yield Send(again)

    def _may_move(self, entry: LedgerEntry) -> bool:
        if any(choice.is_suspect for choice in entry.choices.values()):
            return False
        if not entry.was_sent or self._by_request is False:
            return True
        return self._has_last_word and not any(choice.was_in_flight for choice in entry.choices.values())

    # ---- What a batch brings

    def _enter_ids(self, batch: TokenBatch, touched: dict[tuple[int, int], None]) -> Iterator[Effect]:
        """Enter a batch's token ids. A range that directly follows its choice's tokens is released at once if it needs no logprobs."""
        columns = (batch.rids, batch.choices, batch.first, batch.counts, batch.cached)
        if len({len(column) for column in columns}) != 1:
            raise LinkBroken(f"batch {batch.number} has columns of different lengths")
        if int(batch.counts.sum()) != len(batch.ids):
            raise LinkBroken(f"batch {batch.number} has {len(batch.ids)} ids for ranges of {int(batch.counts.sum())}")
        ids, entries = batch.ids.tolist(), self._entries
        end = 0
        for rid, index, first, count, cached in zip(*[column.tolist() for column in columns], strict=True):
            end += count
            entry = entries.get(rid)
            choice = None if entry is None else entry.only if index == 0 and entry.only else entry.choices.get(index)
            if entry is None or choice is None:
                self.num_surplus_tokens += count
                continue
            if not choice.num_released:
                choice.cached = cached
            known = len(choice.ids) - first
            if count and known == 0 and not entry.has_logprobs and choice.num_released == first:
                new = ids[end - count : end]
                choice.ids += new
                choice.num_released = first + count
                choice.asked_from = -1
                yield NewTokens(rid, index, new, (), (), choice.cached, entry.reader)
                continue
            touched[rid, index] = None
            if known < 0:
                choice.is_gap = True
                continue
            self.num_surplus_tokens += min(known, count)
            if known < count:
                choice.ids += ids[end - count + known : end]
                choice.asked_from = -1

    def _enter_logprobs(self, message: TokenLogprobs, touched: dict[tuple[int, int], None]) -> None:
        entry = self._entries.get(message.rid)
        choice = None if entry is None else entry.choices.get(message.choice)
        if entry is None or choice is None:
            return
        spec = entry.request.logprobs
        after = message.first + len(message.chosen)
        if message.is_prompt:
            known = entry.next_prompt_logprob - message.first  # any choice may bring them: the first to come are used
            tokens = entry.request.prompt_ids[message.first : after].tolist()
            rows = entry.prompt_logprobs
            touched.update(((message.rid, index), None) for index in entry.choices)
        else:
            known = choice.num_logprobs - message.first
            tokens = choice.ids[message.first : after]  # empty after a gap
            rows = choice.logprobs
            touched[message.rid, message.choice] = None
        if 0 <= known < len(tokens):
            rows += logprob_rows(message, tokens, spec)[known:]

    def _settle(self, rid: int, index: int) -> list[Effect]:
        """Release a choice's complete tokens after a batch, then end the choice if it has ended, or ask for missing tokens."""
        entry = self._entries[rid]
        choice = entry.choices[index]
        effects = self._release(entry, index, choice)
        if choice.has_ended:
            assert choice.done is not None
            done = replace(choice.done, cached_tokens=choice.cached) if choice.num_released else choice.done
            self._forget(rid, index)
            effects.append(ChoiceEnded(rid, index, done))
        elif choice.is_gap or choice.done is not None:
            missing = min(len(choice.ids), choice.num_logprobs) if entry.request.logprobs.output else len(choice.ids)
            if choice.asked_from != missing:
                self.num_gaps += 1
                choice.asked_from = missing
                effects.append(Send(AskRange(rid, index, missing)))
        choice.is_gap = False
        return effects

    def _release(self, entry: LedgerEntry, index: int, choice: _Choice) -> list[Effect]:
        end = entry.num_complete(choice)
        if end <= choice.num_released:
            return []
        prompt_rows = tuple(entry.prompt_logprobs) if choice.num_released == 0 else ()
        ids = choice.ids[choice.num_released : end]
        rows = tuple(choice.logprobs[: len(ids)])
        del choice.logprobs[: len(ids)]
        choice.num_released = end
        return [NewTokens(entry.request.rid, index, ids, rows, prompt_rows, choice.cached, entry.reader)]

    def _refuse(self, message: Refused) -> list[Effect]:
        entry = self._entries.get(message.rid)
        if entry is None:
            return []  # aborted while the refusal was on its way
        for index in list(entry.choices):
            self._forget(message.rid, index)
        return [RequestRefused(message.rid, message.status, message.message, message.retry_after_s)]

    # ---- Beginnings and ends

    def _convict(self, entry: LedgerEntry, index: int, choice: _Choice) -> list[Effect]:
        """End a choice that killed two engines, and remember its request: a second try is convicted by one more death at that token."""
        self._convictions.add(entry.request, Conviction(choice.died_at, self.replica))
        cached, num_output = choice.cached, len(choice.ids)
        done = RequestDone(entry.request.rid, index, "error", -1, num_output, cached, status=500, message=CONVICTION)
        self._forget(entry.request.rid, index)
        return [ChoiceEnded(entry.request.rid, index, done)]

    def _rewind(self, entry: LedgerEntry, index: int, choice: _Choice) -> list[Effect]:
        """Drop tokens whose logprobs the old scheduler had not sent. End the choice if it was aborted or if its tokens are complete."""
        if entry.request.logprobs.output:
            del choice.ids[choice.num_logprobs :]
        choice.is_gap, choice.asked_from, choice.done = False, -1, None
        if entry.has_prompt_logprobs:
            choice.done = _end_by_tokens(entry.request, index, choice.ids, choice.cached)
        if entry.is_aborted and choice.done is None:
            choice.done = RequestDone(entry.request.rid, index, "abort", -1, len(choice.ids), choice.cached)
        return self._settle(entry.request.rid, index)

    def _choice(self, rid: int, choice: int) -> _Choice | None:
        entry = self._entries.get(rid)
        return None if entry is None else entry.choices.get(choice)

    def _forget(self, rid: int, choice: int) -> None:
        entry = self._entries[rid]
        del entry.choices[choice]
        if not entry.choices:
            del self._entries[rid]
            self._labels.remove(entry.request.label)


def _resubmission(entry: LedgerEntry) -> GenerateRequest:
    request = entry.request
    start = -1 if entry.has_prompt_logprobs else entry.next_prompt_logprob
    return replace(
        request,
        choices=int32_array(list(entry.choices)),
        output_ids=[int32_array(choice.ids) for choice in entry.choices.values()],
        logprobs=replace(request.logprobs, prompt_start=start),
        resumed=entry.was_sent,
        suspect=any(choice.num_deaths >= SUSPECTED for choice in entry.choices.values()),
    )


def digest_of(request: GenerateRequest) -> bytes:
    """Return a digest of a request's prompt, max_new_tokens, temperature and resources. Another try has the same, whatever its seed."""
    digest = hashlib.blake2b(repr((request.sampling.max_new_tokens, request.sampling.temperature)).encode())
    digest.update(request.prompt_ids.tobytes())
    for resource in (request.resource, request.adapter):
        if resource is not None:
            digest.update(f"{resource.kind} {resource.key}".encode())
    return digest.digest()


def _end_by_tokens(request: GenerateRequest, index: int, ids: list[int], cached: int) -> RequestDone | None:
    """Return the end that the tokens imply, or None. The old scheduler may have died before it could report that end."""
    if ids and ids[-1] in request.sampling.stop_ids:
        return RequestDone(request.rid, index, "stop", ids[-1], len(ids), cached)
    if len(ids) >= request.sampling.max_new_tokens:
        return RequestDone(request.rid, index, "length", -1, len(ids), cached)
    return None
