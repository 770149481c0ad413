"""A frontend that keeps its books with the real RequestLedger, and knows every answer beforehand: it accepts nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, assert_never

import numpy as np
from msgspec.structs import replace

from srt.managers.tokenizer_manager.request_ledger import (
    ALL_CHOICES,
    CONVICTION,
    ChoiceEnded,
    Effect,
    NewTokens,
    RequestRefused,
    Send,
)
from srt.protocol.engine_work import WeightVersion
from srt.protocol.messages import (
    TRIAL_TOKENS,
    Abort,
    AbortLabel,
    AskRange,
    ControlReply,
    FromFrontend,
    GenerateRequest,
    LastWord,
    Load,
    Refused,
    Rejected,
    RequestDone,
    SchedulerHello,
    ToFrontend,
    TokenBatch,
)
from tests.scheduler.clients import Clients
from tests.scheduler.names import is_meant
from tests.scheduler.obligations import wanted_rows
from tests.scheduler.resource_rules import check_failure, needed_by
from tests.scheduler.traffic import Choice

if TYPE_CHECKING:
    from tests.scheduler.world import World


Asked = tuple[bytes, int, float, str]


PROCESSES = itertools.count()


class LedgerFrontend:
    """What the ledger releases must be each token once, in order, then the end, once, whatever became of schedulers meanwhile."""

    def __init__(self, number: int, world: World) -> None:
        self.number = number
        self.process = f"process {next(PROCESSES)}"
        self.open_calls: dict[int, FromFrontend] = {}  # that have no answer yet
        self.last_reply: ControlReply | None = None
        self._num_calls = 0  # each process counts its own
        self._named_by_call: dict[int, list[int]] = {}  # requests that a call for their end meant
        self._is_lost = False  # the scheduler
        self._unsent: set[int] = set()  # requests that no scheduler was sent
        self.live: dict[int, dict[int, Choice]] = {}  # rid -> choice -> what is to come
        self._world = world
        self.clients = Clients(world, self._note, self._forget)
        self._ledger = self.clients.ledger
        self._settings = world.settings
        self._rng = world.rng
        self._statistics = world.statistics
        self._leaving: list[Choice] = []
        self._next_batch = 0
        self._is_greeted = False
        self._was_alone = False
        self._ended_here: list[tuple[Abort, bool]] = []  # since that was last told; did the scheduler say so before?
        self._convicted: dict[Asked, int] = {}  # and the tokens that were delivered

    def add(self, choices: list[Choice]) -> list[FromFrontend]:
        request = choices[0].request
        self.live[request.rid] = {choice.choice: choice for choice in choices}
        is_convicted = _asked(request) in self._convicted
        if is_convicted:  # somebody tries again: one lone death there is enough
            for choice in choices:
                choice.num_deaths, choice.num_lone_deaths = 2, 1
                choice.died_at = self._convicted[_asked(request)]
        if self._is_lost:
            self._unsent.add(request.rid)
        sent = self.clients.begin(choices)
        self._statistics["rule: only what was convicted is suspected at once"] += bool(self._convicted)
        assert sent == [replace(request, suspect=is_convicted)], f"{request} is sent as {sent}"
        return sent

    def has_label(self, label: str) -> bool:
        return any(choice.request.label == label for choice in self.live_choices())

    def call(self, make: Callable[[int], FromFrontend]) -> FromFrontend:
        """What to send for it."""
        number = self._num_calls
        self._num_calls += 1
        message = self.open_calls[number] = make(number)
        if isinstance(message, AbortLabel):
            self._named_by_call[number] = self._rids_named(message.label)
        return message

    def note_lost(self) -> None:
        """The scheduler has died."""
        self._is_lost = True
        self._ledger.record_lost()

    def abort(self, rid: int, choice: int) -> list[FromFrontend]:
        """The ledger forgets at once what it aborts: nothing more may be released for it."""
        return self._check_aborts(self.clients.abort(rid, choice))

    def _forget(self, rid: int, choice: int) -> None:
        choices = self.live.get(rid, {})
        ending = list(choices.values()) if choice == ALL_CHOICES else [choices[choice]] if choice in choices else []
        if ending:
            self._ended_here.append((Abort(rid, choice), all(one.is_done for one in ending)))
        for index in list(choices) if choice == ALL_CHOICES else [choice]:
            choices.pop(index, None)
        if not choices:
            self.live.pop(rid, None)

    def _check_aborts(self, sent: list[FromFrontend], *, may_have_ended: bool = False) -> list[FromFrontend]:
        """What ends on this side, and nothing else, the scheduler is told to end; but not what has ended there as well."""
        aborts = [message for message in sent if isinstance(message, Abort)]
        self._statistics["rule: what ends here is told"] += len(aborts)
        due = [one for one, is_done in self._ended_here if one in aborts or not (is_done or may_have_ended)]
        assert aborts == due, f"as {due} end, this is sent: {aborts}"
        self._ended_here.clear()
        return sent

    def acknowledge(self) -> list[FromFrontend]:
        """All that has come, at once."""
        return self.clients.acknowledge()

    def resume(self, *, by_request: bool) -> list[FromFrontend]:
        """A new scheduler is there: what the ledger wants to tell it, behind the hello. The old one may have died of a request."""
        if (label := self.clients.last_abort(self.live_choices())) is not None:
            self._abort_named(label)
        self.clients.note_death(by_request=by_request)
        for choice in self.live_choices():
            if choice.num_delivered - choice.died_at > TRIAL_TOKENS:
                choice.num_deaths = choice.num_lone_deaths = 0
            if choice.was_in_flight and by_request:
                choice.num_deaths += 1
                choice.num_lone_deaths += self._was_alone
                choice.died_at = choice.num_delivered
            choice.was_in_flight = False
        self._next_batch, self._is_greeted = 0, False
        for choices in self.live.values():
            for choice in choices.values():
                choice.begin_anew()
        messages = self._check_aborts(self.clients.resume(), may_have_ended=True)
        for message in messages:
            if isinstance(message, GenerateRequest):
                is_suspect = any(choice.num_deaths >= 2 for choice in self.live[message.rid].values())
                self._statistics["rule: what a server died of is a suspect"] += is_suspect
                self._statistics["rule: what lives is resubmitted"] += 1
                assert message.suspect == is_suspect, f"request {message.rid} should be a suspect: {is_suspect}"
                self._check_resubmission(message)
                aborted = [choice.name for choice in self.live[message.rid].values() if choice.is_aborted]
                assert not aborted, f"{aborted} goes on, which somebody was told is aborted"
        self._unsent.clear()
        self._is_lost = False
        return messages

    def _check_resubmission(self, message: GenerateRequest) -> None:
        """It is what it was, for those who live, and says whether a scheduler has seen it."""
        live, is_new = self.live[message.rid], message.rid in self._unsent
        request = next(iter(live.values())).request
        self._statistics["rule: what no scheduler has seen is not resumed"] += is_new
        assert message.resumed != is_new, f"request {message.rid} comes as resumed: {message.resumed}"
        assert sorted(message.choices.tolist()) == sorted(live), f"{message} is sent again for {sorted(live)}"
        same = ("label", "sampling", "seed", "priority", "cache_salt", "urgent", "stream")
        changed = [name for name in same if getattr(message, name) != getattr(request, name)]
        assert not changed, f"request {message.rid} is sent again with other {changed}"

    def live_choices(self) -> list[Choice]:
        return [choice for choices in self.live.values() for choice in choices.values()]

    def _check_greeting(self, hello: SchedulerHello) -> None:
        """First of all, and once: the limits."""
        s = self._settings
        num_tokens = s.num_pages * s.page_size
        self._statistics["rule: frontends are greeted with the limits"] += 1
        assert not self._is_greeted, "greeted twice"
        assert hello == SchedulerHello(num_tokens, min(s.max_request_tokens, num_tokens), s.page_size), f"{hello}"
        self._is_greeted = True

    def receive(self, message: ToFrontend) -> list[FromFrontend]:
        assert self._is_greeted or isinstance(message, SchedulerHello | Rejected), (
            f"{message} comes before the greeting"
        )
        match message:
            case TokenBatch():
                self._statistics["rule: batches come in order"] += 1
                assert message.number == self._next_batch, f"batch {message.number} came, not {self._next_batch}"
                self._next_batch += 1
                batch = self._repeat_ranges(self._lose_ranges(message)) if self._settings.lost_share else message
                replies = self._check_aborts(self.clients.take(batch))
                while self._leaving:
                    choice = self._leaving.pop()
                    replies += self.abort(choice.request.rid, choice.choice)
                return replies if self._world.waits_to_acknowledge(self) else [*replies, *self.acknowledge()]
            case Refused():
                return self._check_aborts(self.clients.take(message))
            case SchedulerHello():
                self._check_greeting(message)
            case ControlReply(call):
                self._statistics["rule: calls are answered once"] += 1
                asked = self.open_calls.pop(call, None)
                assert asked is not None, f"call {call} was answered, which has no answer to come: {message}"
                self.last_reply = message
                named = self._named_by_call.pop(call, [])
                self.clients.deliveries.record_aborted(named)
                for rid in named:
                    self._note_aborted(rid)
                self._world.note_reply(self, asked, message)
            case Rejected(reason):
                raise AssertionError(f"frontend {self.number} was rejected: {reason}")
            case LastWord(rids, indices, is_alone):
                self.clients.note_last_word(message)
                self._was_alone = is_alone
                for rid, index in zip(rids.tolist(), indices.tolist(), strict=True):
                    if index in self.live.get(rid, {}):
                        self.live[rid][index].was_in_flight = True
            case AbortLabel(_, label):
                return self._abort_named(label)
            case Load() | WeightVersion():
                pass
            case _:
                assert_never(message)
        return []

    def _abort_named(self, label: str) -> list[FromFrontend]:
        """Another frontend was told that these are aborted: no later server may go on with them."""
        rids = self._rids_named(label)
        for rid in rids:
            self._note_aborted(rid)
        sent = self.clients.abort_named(label)
        assert sent == [Abort(rid, ALL_CHOICES) for rid in rids], f"{label!r} means {rids}, and this is sent: {sent}"
        return sent

    def _rids_named(self, name: str) -> list[int]:
        return [rid for rid, live in self.live.items() if is_meant(next(iter(live.values())).request.label, name)]

    def _note_aborted(self, rid: int) -> None:
        self._statistics["rule: who is aborted by name does not go on"] += rid in self.live
        for choice in self.live.get(rid, {}).values():
            choice.may_abort = choice.is_aborted = True

    def check_complete(self) -> None:
        """At the end of the world: every request has its answer."""
        for choice in self.live_choices():
            raise AssertionError(f"{choice.name} of frontend {self.number} never ended")
        assert self._is_greeted, f"frontend {self.number} was never greeted"
        self._statistics["rule: calls are answered"] += self._num_calls
        assert not self.open_calls, f"calls of frontend {self.number} were not answered: {self.open_calls}"
        assert self._ledger.num_requests == self._ledger.num_unacknowledged == 0, "the ledger still holds something"
        self.clients.check_complete()

    def _lose_ranges(self, batch: TokenBatch) -> TokenBatch:
        keys = zip(batch.rids.tolist(), batch.choices.tolist(), strict=True)
        kept = np.array([not self._loses(*key) for key in keys], np.bool_)
        if kept.all():
            return batch
        self._statistics["lost ranges"] += int((~kept).sum())
        return replace(
            batch,
            rids=batch.rids[kept],
            choices=batch.choices[kept],
            first=batch.first[kept],
            counts=batch.counts[kept],
            cached=batch.cached[kept],
            ids=batch.ids[np.repeat(kept, batch.counts)],
        )

    def _repeat_ranges(self, batch: TokenBatch) -> TokenBatch:
        """As if a range had been asked for again needlessly: of what is known a part comes once more, before what is new."""
        rng = self._world.texts.rng
        pieces = np.split(batch.ids, np.cumsum(batch.counts)[:-1])
        first, counts = batch.first.copy(), batch.counts.copy()
        for row, (rid, index) in enumerate(zip(batch.rids.tolist(), batch.choices.tolist(), strict=True)):
            choice = self.live.get(rid, {}).get(index)
            if choice is not None and first[row] and rng.random() < 0.05:
                num_known = min(int(first[row]), 3)
                known = choice.answer.ids[first[row] - num_known : first[row]]
                pieces[row] = np.concatenate((np.array(known, np.int32), pieces[row]))
                first[row] -= num_known
                counts[row] += num_known
        return replace(batch, first=first, counts=counts, ids=np.concatenate(pieces)) if pieces else batch

    def _loses(self, rid: int, index: int) -> bool:
        """Once, and no logprobs: the scheduler keeps tokens as long as their request, but logprobs only until acknowledged."""
        choice = self.live.get(rid, {}).get(index)
        if choice is None or choice.has_asked or self._rng.random() >= self._settings.lost_share:
            return False
        spec = choice.request.logprobs
        return not (spec.output or spec.prompt_start >= 0)

    def _note(self, effect: Effect) -> None:
        """What the ledger wants done."""
        match effect:
            case NewTokens():
                self._take_tokens(effect)
            case Send(message):
                if isinstance(message, AskRange):
                    self.live[message.rid][message.choice].has_asked = True
            case ChoiceEnded(rid, choice, done):
                self._take_end(rid, choice, done)
            case RequestRefused():
                self._take_refusal(effect)
            case _:
                assert_never(effect)

    def _take_tokens(self, news: NewTokens) -> None:
        choice = self.live.get(news.rid, {}).get(news.choice)
        assert choice is not None, f"tokens of request {news.rid} were released after its end"
        first, last = choice.num_delivered, choice.num_delivered + len(news.ids)
        self._statistics["rule: tokens are released once, in order"] += 1
        assert news.ids == choice.answer.ids[first:last], f"{choice.name}: wrong tokens from {first} on"
        choice.num_delivered = last
        assert choice.cached_told in (-1, news.cached), (
            f"{choice.name}: {choice.cached_told} were cached, now {news.cached}"
        )
        choice.cached_told = news.cached
        assert news.cached <= choice.prompt_len
        if 0 <= choice.leave_at < last:
            self._leaving.append(choice)
        spec = choice.request.logprobs
        if spec.output:
            self._statistics["rule: tokens come with their logprobs"] += 1
            wanted = wanted_rows(choice, choice.prompt_len + first, choice.prompt_len + last, self._settings.vocab_size)
            assert list(news.logprobs) == wanted, f"{choice.name}: wrong logprobs"
        else:
            assert not news.logprobs
        if first == 0 and spec.prompt_start >= 0:
            self._statistics["rule: prompts come with their logprobs"] += 1
            wanted = wanted_rows(choice, spec.prompt_start, choice.prompt_len, self._settings.vocab_size)
            assert list(news.prompt_logprobs) == wanted, f"{choice.name}: wrong prompt logprobs"

    def _take_end(self, rid: int, index: int, done: RequestDone) -> None:
        choices = self.live.get(rid, {})
        choice = choices.pop(index, None)
        assert choice is not None, f"request {rid} ended twice"
        if not choices:
            del self.live[rid]
        assert choice.cached_told in (-1, done.cached_tokens), (
            f"{choice.name}: {choice.cached_told} were cached, {done}"
        )
        self._statistics["rule: each choice ends once, behind its tokens"] += 1
        assert done.num_output == choice.num_delivered, f"{choice.name}: {choice.num_delivered} tokens came, {done}"
        if done.reason == "abort":
            self._statistics["rule: aborted by somebody"] += 1
            assert choice.may_abort, f"{choice.name} was aborted by nobody"
            return
        if done.message == CONVICTION:
            assert (done.reason, done.status) == ("error", 500)
            self._convicted[_asked(choice.request)] = choice.num_delivered
            self._statistics["rule: convicted of two lone deaths"] += 1
            self._world.note_conviction(self, choice.request)
            assert choice.num_lone_deaths == 2, f"{choice.name} did not deserve that"
            self._statistics["convicted of poison" if choice.poison_at >= 0 else "convicted by chance"] += 1
            return
        assert choice.poison_at < 0 or done.num_output <= choice.poison_at, f"{choice.name} was poison, and ended well"
        s = self._settings
        may_hang = s.num_deaths + s.num_slow_steps + s.num_poisons > 0 or s.callers == "poison"
        if check_failure(needed_by(choice.request), done.status, done.message, may_hang=may_hang):
            self._statistics["rule: requests fail with their resource"] += 1
            assert done.reason == "error", f"{choice.name}: {done}"
            return
        if done.status in (503, 504):
            timeout = self._settings.waiting_timeout if done.status == 503 else self._settings.running_timeout
            assert timeout is not None and done.reason == "error", f"{choice.name} ran into a timeout that is not set"
            assert (done.retry_after_s > 0) == (done.status == 503)
            self._statistics["timed out"] += 1
            self._statistics["rule: out of time only where time is limited"] += 1
            return
        answer = choice.answer
        self._statistics[f"rule: ends as it must ({answer.reason})"] += 1
        assert (done.reason, done.matched, done.num_output) == (answer.reason, answer.matched, len(answer.ids)), (
            f"{choice.name}: {done} where {answer} was expected"
        )
        assert (done.status == 500) == (done.reason == "error")
        self._statistics["finished"] += 1

    def _take_refusal(self, refusal: RequestRefused) -> None:
        choices, status = self.live.pop(refusal.rid, None), refusal.status
        assert choices, f"request {refusal.rid} was refused after its end"
        first = next(iter(choices.values()))
        assert all(choice.num_delivered == 0 for choice in choices.values()), f"{first.name} was refused in the middle"
        num_tokens = first.prompt_len + first.request.sampling.max_new_tokens
        is_crowded = status == 429 and self._settings.max_queued < 4096 and not first.request.urgent
        is_too_long = status == 400 and not self._settings.can_fit(num_tokens)
        is_leaving = status == 503 and self._world.is_draining
        assert (refusal.retry_after_s > 0) == (status == 429), f"{first.name}: {refusal}"
        is_taken = status == 400 and any(choice.has_namesake for choice in choices.values())
        assert is_crowded or is_too_long or is_leaving or is_taken, (
            f"{first.name} was refused with {status}: {refusal.message}"
        )
        self._statistics["refused"] += 1
        self._statistics[f"rule: refused for a reason ({status})"] += 1


def _asked(request: GenerateRequest) -> Asked:
    """The same for whoever asks the same."""
    resource = needed_by(request)
    key = "" if resource is None else resource.key
    return request.prompt_ids.tobytes(), request.sampling.max_new_tokens, request.sampling.temperature, key
