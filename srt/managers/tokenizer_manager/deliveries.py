"""Delivery of the scheduler's tokens to the readers of requests: ranges of tokens in, updates of choices out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from srt.managers.tokenizer_manager.api_types import RequestError
from srt.managers.tokenizer_manager.live_request import LiveRequest
from srt.managers.tokenizer_manager.request_ledger import (
    ALL_CHOICES,
    ChoiceEnded,
    Effect,
    NewTokens,
    RequestLedger,
    RequestRefused,
    Send,
)
from srt.managers.tokenizer_manager.request_watch import RequestWatch
from srt.protocol.messages import Abort, FromFrontend, GenerateRequest, LastWord, Refused, Scalar, TokenBatch

logger = logging.getLogger(__name__)


class Deliveries:
    """Owner of a replica's live requests and of the ledger of their tokens. Every end of a request passes through here."""

    def __init__(self, send: Callable[[FromFrontend], None], watch: RequestWatch, ledger: RequestLedger) -> None:
        self._send = send
        self._watch = watch
        self._ledger = ledger
        self._live: dict[int, LiveRequest] = {}
        self._have_news: dict[int, LiveRequest] = {}  # to be notified after the current batch
        self._is_ending: set[int] = set()  # requests with a choice that ends in the current batch
        self._received_s = 0.0  # when the current batch arrived
        self._num_refused = 0
        self._num_tokens = 0

    # ---- This side

    def begin(self, live: LiveRequest, message: GenerateRequest) -> None:
        """Register a new request and send it to the scheduler."""
        self._live[message.rid] = live
        self._apply(self._ledger.add(message, live))

    def abort(self, rid: int) -> None:
        """End a request from this side. Does nothing if it has ended."""
        self._live.pop(rid, None)
        self._watch.ended(rid, "abort")
        self._apply(self._ledger.end(rid))

    def abort_named(self, label: str) -> None:
        """Ask the scheduler to end the requests that match `label`: a client was already told that they are aborted."""
        for rid in self._ledger.named(label):
            self._ledger.record_aborted(rid)
            self._send(Abort(rid, ALL_CHOICES))

    def named(self, label: str) -> list[int]:
        return self._ledger.named(label)

    def record_aborted(self, rids: Iterable[int]) -> None:
        """Record that the scheduler ends these requests. Their last tokens are still to come."""
        for rid in rids:
            self._ledger.record_aborted(rid)

    def abort_all(self) -> None:
        """Abort every live request at the scheduler."""
        for rid in self._ledger.live_rids():
            self._apply(self._ledger.end(rid))

    def fail_all(self, error: RequestError) -> None:
        """End all requests with `error` because the scheduler is gone."""
        for live in list(self._live.values()):
            live.fail(error)
            self._watch.ended(live.rid, "error")
        self._live.clear()
        for rid in self._ledger.live_rids():
            self._ledger.end(rid)

    def fail_unbegun(self, error: RequestError) -> None:
        """Abort the requests for which nothing has come yet; their readers get `error`."""
        for live in [live for live in self._live.values() if not live.has_begun]:
            self.abort(live.rid)
            live.fail(error)

    @property
    def num_requests(self) -> int:
        return self._ledger.num_requests

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all live requests, prompts included."""
        return self._ledger.num_tokens + sum(live.num_prompt_tokens for live in self._live.values())

    @property
    def num_unsent(self) -> int:
        """Number of requests that wait for a scheduler and have been sent to none."""
        return self._ledger.num_unsent

    def has_label(self, label: str) -> bool:
        return self._ledger.has_label(label)

    def stats(self) -> dict[str, Scalar]:
        return {
            "live_requests": len(self._live),
            "live_ledger_requests": self._ledger.num_requests,
            "live_ledger_choices": self._ledger.num_choices,
            "live_ledger_tokens": self._ledger.num_tokens,
            "live_unacknowledged": self._ledger.num_unacknowledged,
            "num_refused": self._num_refused,
            "num_output_tokens": self._num_tokens,
            "num_batches": self._ledger.num_batches,
            "num_gaps": self._ledger.num_gaps,
            "num_surplus_tokens": self._ledger.num_surplus_tokens,
        }

    # ---- The scheduler's side

    def handle(self, message: TokenBatch | Refused) -> None:
        """Deliver the content of a message to the readers; raise LinkBroken if it contradicts itself."""
        self._received_s = received_s = self._watch.now()
        if isinstance(message, TokenBatch):
            self._is_ending = {done.rid for done in message.done}
        self._apply(self._ledger.effects_of(message))
        self._notify_readers()
        self._watch.received(message, received_s, self._ledger.replica)

    def record_last_word(self, word: LastWord) -> None:
        """Record what was in flight when the scheduler came to an early end."""
        self._ledger.record_last_word(word)

    def record_lost(self) -> None:
        """Record that the scheduler's link has ended; new requests wait until `resume`."""
        self._ledger.record_lost()

    def record_death(self, *, by_request: bool) -> None:
        """Record that the scheduler has died; `by_request`: a request may be the cause."""
        self._ledger.record_death(by_request=by_request)

    def resume(self) -> None:
        """Send all live requests to a new scheduler, which continues them."""
        self._received_s = self._watch.now()
        self._is_ending = set()
        self._apply(self._ledger.resume())
        self._notify_readers()

    def record_cause(self, *, by_request: bool) -> None:
        """Record whether a request may have caused the scheduler's end, as soon as that is known."""
        self._ledger.record_cause(by_request=by_request)

    def movable(self) -> list[int]:
        """Return the requests that another replica may continue, because they cannot have caused the scheduler's end."""
        return self._ledger.movable()

    def request(self, rid: int) -> GenerateRequest:
        """Return a live request as it was submitted."""
        return self._ledger.request(rid)

    def move(self, rid: int, other: Deliveries) -> None:
        """Let another replica continue a request."""
        entry, live = self._ledger.withdraw(rid), self._live.pop(rid)
        live.replica = other._ledger.replica
        other._live[rid] = live
        other._received_s = self._watch.now()
        other._is_ending = set()
        other._apply(other._ledger.adopt(entry))
        other._notify_readers()

    def acknowledge(self) -> None:
        """Acknowledge all batches received so far."""
        self._apply(self._ledger.acknowledge())

    def _apply(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case NewTokens():
                    self._deliver(effect)
                case Send():
                    self._send(effect.message)
                case ChoiceEnded():
                    self._end_choice(effect)
                case RequestRefused():
                    self._refuse(effect)

    def _deliver(self, news: NewTokens) -> None:
        live: LiveRequest = news.reader
        self._num_tokens += len(news.ids)
        try:
            has_stopped = live.add_tokens(news, self._received_s)
            if live.watched is not None:
                self._watch.tokens(live.watched, news.choice, news.ids, self._received_s)
            if live.has_one_choice and not has_stopped and live.rid not in self._is_ending:
                live.notify()  # the batch has nothing else for this request
                return
        except Exception:
            self._text_failed(live)
            return
        self._have_news[live.rid] = live
        if has_stopped:
            self._apply(self._ledger.end(live.rid, news.choice))
            self._watch.cached(live.rid, news.cached)
            self._forget_if_ended(live, "stop")

    def _end_choice(self, end: ChoiceEnded) -> None:
        live = self._live.get(end.rid)
        if live is None:
            return
        self._watch.cached(end.rid, end.done.cached_tokens)
        self._have_news[end.rid] = live
        try:
            live.end_choice(end.choice, end.done)
        except Exception:
            self._text_failed(live)
            return
        if live.has_failed:
            self._watch.ended(end.rid, "error")
            self.abort(end.rid)  # for its other choices
        self._forget_if_ended(live, end.done.reason)

    def _notify_readers(self) -> None:
        """Notify each request's reader once, even if the batch had several ranges for it."""
        have_news, self._have_news = self._have_news, {}
        for live in have_news.values():
            try:
                live.notify()
            except Exception:
                self._text_failed(live)

    def _text_failed(self, live: LiveRequest) -> None:
        """Fail a request whose text could not be decoded. The defect is confined to it: the link and other requests are sound."""
        logger.exception("The tokens of request %d could not be decoded into text.", live.rid)
        self._watch.ended(live.rid, "error")
        self.abort(live.rid)
        live.fail(RequestError(500, "The tokens of this answer could not be decoded into text."))

    def _refuse(self, refusal: RequestRefused) -> None:
        self._num_refused += 1
        self._watch.ended(refusal.rid, "refused")
        live = self._live.pop(refusal.rid, None)
        if live is not None:
            live.fail(RequestError(refusal.status, refusal.message, retry_after_s=refusal.retry_after_s or None))

    def _forget_if_ended(self, live: LiveRequest, how: str) -> None:
        if live.has_ended:
            self._live.pop(live.rid, None)
            self._watch.ended(live.rid, how)
