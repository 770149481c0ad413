"""A frontend that keeps its books with the real RequestLedger, on a link that loses ranges now and then."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import assert_never

import numpy as np

from srt.managers.request_ledger import ChoiceEnded, Effect, NewTokens, RequestLedger, RequestRefused, Send
from srt.protocol.messages import (
    Abort,
    AskRange,
    FromFrontend,
    GenerateRequest,
    Refused,
    RequestDone,
    ToFrontend,
    TokenBatch,
)
from tests.scheduler.fake_frontend import FakeFrontend
from tests.scheduler.reference import Answer, logprob

LOST = 0.02  # share of ranges


class LedgerFrontend(FakeFrontend):
    """What the ledger releases must be what the world knows to be right."""

    may_resume = False  # the ledger itself resumes requests, when a scheduler is replaced

    def __init__(self, number: int, rng: random.Random) -> None:
        super().__init__(number, rng)
        self._ledger = RequestLedger()

    def add(self, request: GenerateRequest, answers: dict[int, Answer]) -> None:
        super().add(request, answers)
        self._ledger.add(request)

    def abort(self, rid: int, choice: int) -> list[Abort]:
        """The ledger forgets at once what it aborts: nothing more may be released for it."""
        for index, state in self.sent[rid].choices.items():
            if choice in (-1, index) and state.done is None:
                state.is_aborted = True
                state.done = RequestDone(rid, index, "abort", -1, len(state.ids), 0)
        effects = self._ledger.end(rid, choice)
        return [effect.message for effect in effects if isinstance(effect, Send) and isinstance(effect.message, Abort)]

    def receive(self, message: ToFrontend) -> list[FromFrontend]:
        if isinstance(message, TokenBatch):
            assert message.number == self._next_batch
            self._next_batch += 1
            effects = [*self._ledger.handle(self._lose_ranges(message)), *self._ledger.acknowledge()]
            return [reply for effect in effects for reply in self._take(effect)]
        if isinstance(message, Refused):
            return [reply for effect in self._ledger.handle(message) for reply in self._take(effect)]
        return super().receive(message)

    def _lose_ranges(self, batch: TokenBatch) -> TokenBatch:
        keys = zip(batch.rids.tolist(), batch.choices.tolist(), strict=True)
        kept = np.array([self._rng.random() >= LOST or not self._may_lose(*key) for key in keys], np.bool_)
        if kept.all():
            return batch
        self.num_asked_again += int((~kept).sum())
        return replace(
            batch,
            rids=batch.rids[kept],
            choices=batch.choices[kept],
            first=batch.first[kept],
            counts=batch.counts[kept],
            cached=batch.cached[kept],
            ids=batch.ids[np.repeat(kept, batch.counts)],
        )

    def _may_lose(self, rid: int, choice: int) -> bool:
        """Once, and no logprobs: the scheduler keeps tokens as long as their request, but logprobs only until acknowledged."""
        spec = self.sent[rid].request.logprobs
        return not (spec.output or spec.prompt_start >= 0 or self.sent[rid].choices[choice].has_asked)

    def _take(self, effect: Effect) -> list[FromFrontend]:
        match effect:
            case Send(message):
                if isinstance(message, AskRange):
                    self.sent[message.rid].choices[message.choice].has_asked = True
                return [message]
            case NewTokens():
                self._take_tokens(effect)
            case ChoiceEnded(_, _, done):
                self._take_done(done)
            case RequestRefused(rid):
                self.sent[rid].is_refused = True
            case _:
                assert_never(effect)
        return []

    def _take_tokens(self, news: NewTokens) -> None:
        sent = self.sent[news.rid]
        choice, spec = sent.choices[news.choice], sent.request.logprobs
        first = len(choice.ids)
        assert choice.done is None, f"tokens were released after the end of request {news.rid}"
        assert news.ids == choice.answer.ids[first : first + len(news.ids)], (
            f"request {news.rid}: wrong tokens from {first} on"
        )
        choice.ids += news.ids
        values = [row.logprob for row in news.logprobs]
        assert values == (choice.answer.logprobs[first : len(choice.ids)] if spec.output else [])
        choice.logprobs |= (
            dict(enumerate(choice.answer.logprobs[first : len(choice.ids)], first)) if spec.output else {}
        )
        if first == 0 and spec.prompt_start >= 0:
            wanted = [logprob(h) if i else None for i, h in enumerate(choice.prompt_hashes)][spec.prompt_start :]
            assert [row.logprob for row in news.prompt_logprobs] == wanted, (
                f"wrong prompt logprobs of request {news.rid}"
            )
            choice.prompt_logprobs = dict.fromkeys(range(spec.prompt_start, len(choice.prompt_hashes)), 0.0)

    def check_complete(self) -> None:
        super().check_complete()
        assert self._ledger.num_requests == self._ledger.num_unacknowledged == 0, "the ledger still holds something"
