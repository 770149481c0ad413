"""A frontend that knows every answer beforehand, and accepts nothing else: each token once, in order, then the end, once."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from srt.protocol.messages import (
    Abort,
    AckBatch,
    AskRange,
    ControlReply,
    FromFrontend,
    GenerateRequest,
    Load,
    Refused,
    Rejected,
    RequestDone,
    SchedulerHello,
    ToFrontend,
    TokenBatch,
    TokenLogprobs,
)
from tests.scheduler.reference import Answer, logprob, prefix_hashes


@dataclass(slots=True)
class Choice:
    """One choice of a request: what it must become, and what has come."""

    answer: Answer
    ids: list[int]
    prompt_hashes: list[int]
    num_given: int  # came with the request
    logprobs: dict[int, float] = field(default_factory=dict)
    prompt_logprobs: dict[int, float] = field(default_factory=dict)
    done: RequestDone | None = None
    is_aborted: bool = False  # an abort was sent
    has_asked: bool = False  # ranges may come twice
    cached: int | None = None  # as its tokens say


@dataclass(slots=True)
class Sent:
    request: GenerateRequest
    choices: dict[int, Choice]
    is_refused: bool = False


class FakeFrontend:
    """`receive` returns what it says back; how long that takes is the world's business."""

    may_resume = True

    def __init__(self, number: int, rng: random.Random) -> None:
        self.number = number
        self.sent: dict[int, Sent] = {}
        self.replies: dict[int, ControlReply] = {}
        self.num_catch_ups = 0
        self.num_crossing_aborts = 0
        self.num_asked_again = 0
        self._next_batch = 0
        self._rng = rng
        self._is_greeted = False

    def add(self, request: GenerateRequest, answers: dict[int, Answer]) -> None:
        hashes = prefix_hashes(request.prompt_ids.tolist())
        given = {int(c): ids.tolist() for c, ids in zip(request.choices, request.output_ids, strict=True)}
        choices = {c: Choice(answers[c], list(ids), hashes, len(ids)) for c, ids in given.items()}
        self.sent[request.rid] = Sent(request, choices)

    def abort(self, rid: int, choice: int) -> list[Abort]:
        for index, state in self.sent[rid].choices.items():
            if choice in (-1, index) and state.done is None:
                state.is_aborted = True
        return [Abort(rid, choice)]

    def expect_abort(self, rid: int) -> None:
        """Somebody else may end it."""
        for choice in self.sent[rid].choices.values():
            choice.is_aborted |= choice.done is None

    def expect_aborts(self) -> None:
        for rid in self.sent:
            self.expect_abort(rid)

    def live(self) -> list[tuple[int, int]]:
        return [
            (rid, c)
            for rid, sent in self.sent.items()
            if not sent.is_refused
            for c, s in sent.choices.items()
            if not s.done
        ]

    def receive(self, message: ToFrontend) -> list[FromFrontend]:
        match message:
            case SchedulerHello():
                assert not self._is_greeted, "greeted twice"
                self._is_greeted = True
            case TokenBatch():
                return self._take_batch(message)
            case Refused(rid, status, reason):
                sent = self.sent[rid]
                assert not sent.is_refused and not any(c.done for c in sent.choices.values()) and reason
                assert status in (400, 429, 503)
                sent.is_refused = True
            case ControlReply(call):
                assert call not in self.replies, f"call {call} was answered twice"
                self.replies[call] = message
            case Rejected(reason):
                raise AssertionError(f"frontend {self.number} was rejected: {reason}")
            case Load():
                pass
        return []

    def _take_batch(self, batch: TokenBatch) -> list[FromFrontend]:
        assert batch.number == self._next_batch, f"batch {batch.number} came where {self._next_batch} was expected"
        self._next_batch += 1
        back: list[FromFrontend] = []
        start = 0
        ids = batch.ids.tolist()
        columns = (batch.rids, batch.choices, batch.first, batch.counts, batch.cached)
        for rid, choice, first, count, cached in zip(*[column.tolist() for column in columns], strict=True):
            assert count > 0, "an empty range was sent"
            self.sent[rid].choices[choice].cached = cached
            self.num_catch_ups += count > 1
            back += self._take_range(rid, choice, first, ids[start : start + count])
            start += count
        assert start == len(ids), "a batch has ids that belong to no range"
        for logprobs in batch.logprobs:
            self._take_logprobs(logprobs)
        for done in batch.done:
            self._take_done(done)
        return [*back, AckBatch(batch.number)]

    def _take_range(self, rid: int, index: int, first: int, ids: list[int]) -> list[FromFrontend]:
        choice = self.sent[rid].choices[index]
        assert choice.done is None or choice.has_asked, f"request {rid} got tokens after its end"
        if first > len(choice.ids):
            assert choice.has_asked, f"request {rid}: tokens from {first} on, {len(choice.ids)} have come"
            return []  # the range that was asked for is on its way
        assert first == len(choice.ids) or choice.has_asked, f"request {rid} got token {first} twice"
        assert choice.answer.ids[first : first + len(ids)] == ids, f"request {rid} got wrong tokens from {first} on"
        choice.ids[first:] = ids
        if self._rng.random() < 0.01 and len(choice.ids) > choice.num_given:
            return [self._lose_some(rid, index, choice)]
        return []

    def _lose_some(self, rid: int, index: int, choice: Choice) -> AskRange:
        keep = self._rng.randint(choice.num_given, len(choice.ids) - 1)
        del choice.ids[keep:]
        choice.has_asked = True
        self.num_asked_again += 1
        return AskRange(rid, index, keep)

    def _take_logprobs(self, part: TokenLogprobs) -> None:
        sent = self.sent[part.rid]
        choice, spec = sent.choices[part.choice], sent.request.logprobs
        values, first = part.chosen.tolist(), part.first
        known = choice.prompt_logprobs if part.is_prompt else choice.logprobs
        assert (spec.prompt_start >= 0) if part.is_prompt else spec.output, "logprobs that nobody asked for"
        for i, value in enumerate(values, first):
            assert i not in known or choice.has_asked, f"logprob {i} came twice"
            if part.is_prompt:
                assert (i == 0 and value != value) or value == logprob(choice.prompt_hashes[i]), (
                    f"wrong prompt logprob {i}"
                )
            else:
                assert value == choice.answer.logprobs[i], f"wrong logprob {i}"
            known[i] = value

    def _take_done(self, done: RequestDone) -> None:
        sent = self.sent[done.rid]
        choice = sent.choices[done.choice]
        assert choice.done is None or (choice.has_asked and choice.done == done), f"request {done.rid} ended twice"
        assert done.num_output == len(choice.ids) or choice.has_asked, (
            f"{done.num_output} tokens, {len(choice.ids)} came"
        )
        assert choice.cached in (None, done.cached_tokens), (
            f"{choice.cached} tokens were cached, or {done.cached_tokens}"
        )
        choice.done = done
        if done.reason == "abort":
            assert choice.is_aborted, f"request {done.rid} was aborted by nobody"
            return
        self.num_crossing_aborts += choice.is_aborted
        expected = (choice.answer.reason, choice.answer.matched, len(choice.answer.ids))
        assert (done.reason, done.matched, done.num_output) == expected, f"{done} where {expected} was expected"
        assert (done.status == 500) == (done.reason == "error")

    def check_complete(self) -> None:
        """At the end of the world: every request has its answer, and every logprob that it asked for."""
        for rid, sent in self.sent.items():
            if sent.is_refused:
                continue
            for choice in sent.choices.values():
                self._check_choice(rid, sent.request, choice)

    def _check_choice(self, rid: int, request: GenerateRequest, choice: Choice) -> None:
        assert choice.done is not None, f"request {rid} of frontend {self.number} never ended"
        assert len(choice.ids) == choice.done.num_output, f"request {rid} has {len(choice.ids)} tokens, {choice.done}"
        spec = request.logprobs
        if spec.output:
            assert sorted(choice.logprobs) == list(range(choice.num_given, len(choice.ids))), (
                f"logprobs are missing in {rid}"
            )
        if spec.prompt_start >= 0 and len(choice.ids) > choice.num_given:
            wanted = list(range(spec.prompt_start, len(request.prompt_ids)))
            assert sorted(choice.prompt_logprobs) == wanted, f"prompt logprobs are missing in {rid}"
