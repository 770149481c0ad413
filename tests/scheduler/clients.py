"""The clients of a simulated frontend: the real Deliveries, LiveRequests and handles between its ledger and readers that judge.

What must come is said by the reference answer and by what the ledger has released, refused or ended: each token's text once, in
order, as soon as it is certain; nothing of a stop nor behind it; figures, logprobs and times that fit; then the end, or an error.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

from srt.managers.tokenizer_manager.api_types import ChoiceUpdate, Finish, GenerateInput, RequestError, TokenLogprob
from srt.managers.tokenizer_manager.detokenizer import OutputText
from srt.managers.tokenizer_manager.live_request import ABORTED, LiveRequest, RequestHandle
from srt.managers.tokenizer_manager.request_ledger import (
    ChoiceEnded,
    Effect,
    NewTokens,
    RequestLedger,
    RequestRefused,
    Send,
)
from srt.managers.tokenizer_manager.request_watch import RequestWatch, Watched
from srt.protocol.messages import (
    Abort,
    AbortLabel,
    AskRange,
    FromFrontend,
    GenerateRequest,
    LastWord,
    Refused,
    RequestDone,
    TokenBatch,
)
from tests.scheduler.settings import Settings
from tests.scheduler.toy_manager import ToyManager
from tests.scheduler.toy_text import TextRequest, ToyAnswer, draw_text_request, toy_tokenizer
from tests.scheduler.traffic import Choice
from tests.scheduler.virtual_loop import VirtualLoop

if TYPE_CHECKING:
    from tests.scheduler.world import World

TEXT_FAILED = "The tokens of this answer could not be decoded into text."


class Texts:
    """Draws what clients ask of texts, and how they read."""

    def __init__(self, seed: int, settings: Settings) -> None:
        self.rng = random.Random(f"texts of {seed}")
        self.tokenizer = toy_tokenizer()
        self.read_share = self.rng.choice((0.1, 0.1, 0.2, 0.5))  # of the requests
        self.stop_share = self.rng.choice((0.0, 0.3, 0.7))
        if settings.read_share is not None:
            self.read_share, self.stop_share = settings.read_share, 0.7
        self.lag_s = self.rng.choice((0.01, 0.1, 1.0))  # of slow readers


class WatchedLedger(RequestLedger):
    """The real one. Tells what it wants done before that is done, and what is ended from this side."""

    def __init__(self, note_effect: Callable[[Effect], None], note_end: Callable[[int, int], None]) -> None:
        super().__init__()
        self._note_effect = note_effect
        self._note_end = note_end
        self._ended: set[tuple[int, int]] = set()  # by what was done for the effects at hand

    def effects_of(self, message: TokenBatch | Refused) -> Iterator[Effect]:
        return self._noted(super().effects_of(message))

    def resume(self) -> Iterator[Effect]:
        return self._noted(super().resume())

    def end(self, rid: int, choice: int = -1) -> list[Effect]:
        self._note_end(rid, choice)
        self._ended.add((rid, choice))
        return super().end(rid, choice)

    def _noted(self, effects: Iterator[Effect]) -> Iterator[Effect]:
        self._ended.clear()
        for effect in effects:
            if not self._ended or not self._is_late(effect):
                self._note_effect(effect)
            yield effect

    def _is_late(self, effect: Effect) -> bool:
        """A stop was found in tokens that came together with this."""
        match effect:
            case ChoiceEnded(rid, choice, _) | Send(AskRange(rid, choice, _)):
                return (rid, choice) in self._ended
            case _:
                return False


class _Unread:
    """In the place of a LiveRequest, which costs more than all else that a simulated frontend does: nobody reads it."""

    __slots__ = ("_num_left", "has_failed", "has_one_choice", "rid", "watched")
    has_begun = True

    def __init__(self, request: GenerateRequest) -> None:
        self.rid = request.rid
        self.has_one_choice = len(request.choices) == 1
        self.has_failed = False
        self.watched: Watched | None = None
        self._num_left = len(request.choices)

    @property
    def has_ended(self) -> bool:
        return self._num_left == 0

    def add_tokens(self, news: NewTokens, now_s: float) -> bool:
        return False

    def end_choice(self, index: int, done: RequestDone) -> None:
        self.has_failed |= done.reason == "error"
        self._num_left -= not self.has_failed

    def fail(self, error: RequestError) -> None:
        pass

    def notify(self) -> None:
        pass


class _Came:
    """What the ledger has said of one choice, and what its client has of it."""

    __slots__ = (
        "_answer",
        "_text_request",
        "choice",
        "done",
        "ended_here",
        "first_s",
        "last_s",
        "num_ids",
        "num_released",
        "num_updates",
        "prompt_rows",
        *("rows", "text", "finish", "cached"),
    )

    def __init__(self, choice: Choice, text_request: TextRequest) -> None:
        self.choice = choice
        self._text_request = text_request
        self._answer: ToyAnswer | None = None
        self.num_released = 0
        self.cached = 0
        self.done: RequestDone | None = None
        self.ended_here = False  # by a stop, or by its client
        self.first_s = self.last_s = -1.0
        self.rows: list[TokenLogprob] = []
        self.prompt_rows: tuple[TokenLogprob, ...] = ()
        self.num_updates = self.num_ids = 0
        self.text = ""
        self.finish: Finish | None = None

    def note_tokens(self, news: NewTokens, now: float) -> None:
        if not self.num_released:
            self.first_s, self.prompt_rows = now, news.prompt_logprobs
        self.num_released += len(news.ids)
        self.cached = news.cached
        self.last_s = now
        self.rows += news.logprobs

    @property
    def answer(self) -> ToyAnswer:
        if self._answer is None:
            self._answer = ToyAnswer(self.choice, self._text_request)
        return self._answer

    @property
    def has_stopped(self) -> bool:
        return self._text_request.has_stops and 0 <= self.answer.stop_tokens <= self.num_released

    @property
    def num_due(self) -> int:
        return self.answer.stop_tokens if self.has_stopped else self.num_released


class Client:
    """Reads one request in one of three ways, and judges what comes."""

    def __init__(
        self,
        owner: Clients,
        choices: list[Choice],
        text_request: TextRequest,
        live: LiveRequest,
        kind: str,
        lag_s: float,
    ) -> None:
        self._owner = owner
        self._text_request = text_request
        self._live = live
        self.request = choices[0].request
        self.kind = kind
        self._lag_s = lag_s
        self.came = {choice.choice: _Came(choice, text_request) for choice in choices}
        self.error: tuple[int, str, int] | None = None  # that is due
        self.got_error: RequestError | None = None
        self.is_closed = False  # it left
        self.began_s = owner.now
        self.handle: RequestHandle = owner.loop.do(lambda: RequestHandle(live, owner.deliveries.abort))
        if kind == "push":
            self.handle.push_to(self)
        self.task = owner.loop.run(self._read(), self._late_s)

    # ---- As a reader

    @property
    def can_accept_now(self) -> bool:
        return self._lag_s == 0.0

    def accept_now(self, updates: list[ChoiceUpdate]) -> None:
        try:
            self._judge_all(updates)
        except AssertionError as error:  # which would be taken for a defect of the text
            self._owner.broken = self._owner.broken or error

    def _late_s(self) -> float:
        return self._lag_s and self._lag_s * self._owner.rng.random()

    async def _read(self) -> None:
        try:
            if self.kind == "collect":
                self._judge_all(await self.handle.collect())
            else:
                await self._iterate()
        except RequestError as error:
            self.got_error = error
            self._judge_error(error)
        if not self.is_closed:
            self._owner.leave(self.handle, is_over=self.has_ended)

    async def _iterate(self) -> None:
        while True:
            try:
                updates = await anext(self.handle, None)
            except asyncio.CancelledError:  # it does not wait for that any more, and asks again
                continue
            if updates is None:
                return
            assert updates, f"{self.name}: news that are none"
            self._judge_all(updates)

    def give_up_waiting(self) -> None:
        """For a moment."""
        if self.kind != "collect" and self.task.is_asleep and self.task.waits_for is not None:
            self.task.waits_for.cancel()

    # ---- What is due

    @property
    def name(self) -> str:
        return f"request {self.request.rid} ({self.kind})"

    @property
    def has_ended(self) -> bool:
        return self.error is not None or all(c.done is not None or c.ended_here for c in self.came.values())

    @property
    def has_all(self) -> bool:
        return all(c.finish is not None for c in self.came.values())

    def check_told(self) -> None:
        """After a message: whoever waits for what it brought was woken, or has it."""
        if self.is_closed:
            return
        statistics = self._owner.statistics
        if self.kind == "collect":
            is_due = self.has_ended
        else:
            is_due = self.error is not None or any(
                c.finish is None
                and (c.done is not None or c.has_stopped or (self._text_request.wants_tokens and c.num_ids < c.num_due))
                for c in self.came.values()
            )
        statistics["rule: readers are woken for news"] += is_due
        assert not (is_due and self.task.is_asleep), f"{self.name}: nobody wakes its reader"
        for c in self.came.values():
            if c.has_stopped and self._text_request.wants_tokens and c.done is None:
                statistics["rule: a stop ends its choice at once"] += 1
                assert c.ended_here, f"{c.choice.name} goes on behind {c.answer.stop!r}"

    # ---- What comes

    def _judge_all(self, updates: list[ChoiceUpdate]) -> None:
        for update in updates:
            self._judge(self.came[update.index], update)

    def _judge(self, c: _Came, update: ChoiceUpdate) -> None:
        choice, statistics = c.choice, self._owner.statistics
        name = choice.name
        assert c.finish is None, f"{name}: news behind the end"
        assert not self.is_closed or self.kind == "collect", f"{name}: news for one who has left"
        first, c.num_ids = c.num_ids, c.num_ids + len(update.ids)
        c.text += update.text
        c.finish = update.finish
        assert list(update.ids) == choice.answer.ids[first : c.num_ids], f"{name}: wrong ids from {first} on"
        assert update.completion_tokens == c.num_ids, (
            f"{name}: {update.completion_tokens} tokens are told, {c.num_ids} came"
        )
        due = c.num_due if self._text_request.wants_tokens else 0
        assert c.num_ids == due or self.is_closed, f"{name}: {c.num_ids} tokens came, {due} are known"
        assert (update.prompt_tokens, update.seed, update.rid) == (choice.prompt_len, choice.seed, self.request.label)
        assert update.cached_tokens == c.cached, f"{name}: {update.cached_tokens} are told to be cached, not {c.cached}"
        assert list(update.output_logprobs) == c.rows[first : c.num_ids], f"{name}: wrong rows of logprobs"
        assert all(row.token_id == token_id for row, token_id in zip(update.output_logprobs, update.ids, strict=False))
        is_first = c.num_updates == 0
        assert update.prompt_logprobs == (c.prompt_rows if is_first else ()), f"{name}: wrong rows of its prompt"
        wants_ids = is_first and self._text_request.wants_prompt_ids
        assert update.prompt_ids == (tuple(self.request.prompt_ids.tolist()) if wants_ids else ())
        c.num_updates += 1
        statistics["rule: updates bring what is new"] += 1
        if update.finish is None:
            assert update.ids, f"{name}: news that are none"
            self._judge_shown(c)
        else:
            self._judge_finish(c, update, update.finish)

    def _judge_shown(self, c: _Came) -> None:
        shown = c.answer.shown(c.num_ids)
        if shown is not None:
            self._owner.statistics["rule: text is shown as soon as it is certain"] += 1
            assert c.text == shown, f"{c.choice.name}: {c.text!r} is shown after {c.num_ids} tokens, not {shown!r}"

    def _judge_finish(self, c: _Came, update: ChoiceUpdate, finish: Finish) -> None:
        name, answer, statistics = c.choice.name, c.answer, self._owner.statistics
        if c.done is None and not (c.has_stopped and self._text_request.wants_tokens):
            assert c.ended_here or self.is_closed, f"{name} is told to have ended, which it has not"
            assert finish == Finish("abort", message=ABORTED), f"{name}: {finish}"
            statistics["rule: who leaves has what came"] += 1
            if self.is_closed:
                self._judge_shown(c)
            return
        if c.has_stopped and self._text_request.wants_tokens:
            text, wanted = answer.text_to_stop, Finish("stop", matched=answer.stop)
            kind = "in a regex" if answer.stop in self._text_request.params.stop_regex else "in a string"
            statistics[f"rule: text ends before a stop ({kind})"] += 1
        else:
            assert c.done is not None
            text, stop = answer.whole(c.num_ids) if self._text_request.wants_tokens else ("", None)
            wanted = self._wanted_finish(c, c.done, stop)
            statistics["rule: text is whole at the end"] += 1
            assert update.num_preempted == c.done.num_preempted, f"{name}: preemptions"
        assert c.text == text, f"{name}: its text is {c.text!r}, not {text!r}"
        assert finish == wanted, f"{name}: {finish}, not {wanted}"
        self._judge_times(c, update)

    def _wanted_finish(self, c: _Came, done: RequestDone, stop: str | None) -> Finish:
        answer = c.choice.answer
        if stop is not None:
            return Finish("stop", matched=stop)
        if done.reason == "abort":
            return Finish("abort", message=done.message or ABORTED)
        self._owner.statistics["rule: no tokens are shown where none are wanted"] += not self._text_request.wants_tokens
        if answer.reason == "stop" and self._text_request.wants_tokens:
            return Finish("stop", matched=answer.matched)
        return Finish("length", length=len(answer.ids) if self._text_request.wants_tokens else 0)

    def _judge_times(self, c: _Came, update: ChoiceUpdate) -> None:
        times = update.times
        assert times is not None
        is_shown = self._text_request.wants_tokens and c.first_s >= 0
        first_s, last_s = (c.first_s - self.began_s, c.last_s - self.began_s) if is_shown else (None, None)
        assert (times.arrived_s, times.first_token_s, times.last_token_s) == (self.began_s, first_s, last_s), (
            f"{c.choice.name}: {times}"
        )
        queue_s = c.done.queue_s if c.done is not None and c.done.queue_s >= 0 else None
        assert times.queue_s == queue_s or c.has_stopped, f"{c.choice.name}: {times}, not {queue_s}"
        self._owner.statistics["rule: times are told"] += 1

    def _judge_error(self, error: RequestError) -> None:
        assert error.message != TEXT_FAILED, f"{self.name}: {TEXT_FAILED}"
        assert not self.is_closed, f"{self.name}: an error for one who has left: {error}"
        assert self.error is not None, f"{self.name} has failed for no reason: {error}"
        status, message, retry_s = self.error
        assert (error.status, error.retry_after_s) == (status, retry_s or None), (
            f"{self.name}: {error.status}, not {self.error}"
        )
        assert error.message == message or not message, f"{self.name}: {error}"
        self._owner.statistics["rule: errors reach their reader last"] += 1
        for c in self.came.values() if self.kind != "collect" else ():
            assert c.num_ids == (c.num_due if self._text_request.wants_tokens else 0), (
                f"{c.choice.name}: tokens were lost before an error"
            )

    def note_failure(self, status: int, message: str) -> None:
        """All that has not ended fails."""
        if not (self.has_ended or self.is_closed):
            self.error = status, message, 0

    @property
    def has_begun(self) -> bool:
        """It has something to show."""
        shown = (c.num_released and self._text_request.wants_tokens for c in self.came.values())
        return any(shown) or any(c.done is not None or c.ended_here for c in self.came.values())

    def check_complete(self) -> None:
        assert self.task.is_done, f"{self.name}: its reader still waits"
        assert self.is_closed or self.got_error is not None or self.has_all, f"{self.name} has no end"


class Clients:
    """All of one frontend process."""

    def __init__(
        self, world: World, note_effect: Callable[[Effect], None], note_end: Callable[[int, int], None]
    ) -> None:
        self._world = world
        self.statistics = world.statistics
        self.rng = world.texts.rng
        self.loop = VirtualLoop(lambda seconds, action: world.at(world.now + seconds, action))
        self.broken: AssertionError | None = None  # what a reader found that is told at once
        self._watch = RequestWatch(now=lambda: world.now)
        self._manager = ToyManager(self._watch, self.rng, self.statistics)
        self.deliveries = self._manager.deliveries
        self._note_frontend, self._note_frontend_end = note_effect, note_end
        self.ledger = self.deliveries._ledger = WatchedLedger(self._note_effect, self._note_end)
        self._clients: dict[int, Client] = {}  # that have not read their end
        self._touched: dict[int, Client] = {}
        self._figures = Counter({"num_output_tokens": 0, "num_refused": 0, "num_gaps": 0})  # as must be told

    @property
    def now(self) -> float:
        return self._world.now

    def begin(self, choices: list[Choice]) -> list[FromFrontend]:
        texts, request = self._world.texts, choices[0].request
        if self.rng.random() >= texts.read_share:
            self.deliveries.begin(cast("LiveRequest", _Unread(request)), request)
            return self._sent()
        text_request = draw_text_request(self.rng, choices, texts.stop_share)
        live = LiveRequest(
            request,
            lambda: self._output(request, text_request),
            wants_tokens=text_request.wants_tokens,
            wants_prompt_ids=text_request.wants_prompt_ids,
            arrived_s=self.now,
            sent_s=self.now,
        )
        kind = self.rng.choice(("collect", "pull", "push") if request.stream else ("collect", "collect", "pull"))
        lag_s = self.rng.choice((0.0, texts.lag_s, texts.lag_s))
        live.watched = self._watch.began(GenerateInput(text_request.params, urgent=request.urgent), request, self.now)
        self._clients[request.rid] = Client(self, choices, text_request, live, kind, lag_s)
        self.deliveries.begin(live, request)
        return self._sent()

    def _output(self, request: GenerateRequest, text_request: TextRequest) -> OutputText:
        stream = self._world.texts.tokenizer.stream(request.prompt_ids[-16:].tolist(), text_request)
        return OutputText(stream, text_request.params, frozenset(request.sampling.stop_ids.tolist()))

    def abort(self, rid: int, index: int) -> list[FromFrontend]:
        client = self._clients.get(rid)
        if client is None:
            live = self.deliveries._live.get(rid)
            if live is None:
                return []
            if index == -1:
                self.deliveries.abort(rid)
            elif effects := self.ledger.end(rid, index):
                self.deliveries._apply(effects)
                live.end_choice(index, RequestDone(rid, index, "abort", -1, 0, 0))
                self.deliveries._forget_if_ended(live, "abort")
            return self._sent()
        if client.has_ended:
            return []
        if index == -1:
            client.is_closed = True
            client.handle.abort()
        elif not client.came[index].ended_here and client.came[index].done is None:  # as a stop in its text would
            c = client.came[index]
            self.deliveries._apply(self.ledger.end(rid, index))
            c.done = RequestDone(rid, index, "abort", -1, c.num_released, c.cached)
            client._live.end_choice(index, c.done)
            client._live.notify()
            self.deliveries._forget_if_ended(client._live, "abort")
        return self._after()

    def take(self, message: TokenBatch | Refused) -> list[FromFrontend]:
        self._manager.hear(message)
        return self._after()

    def acknowledge(self) -> list[FromFrontend]:
        self._manager.fall_idle()
        return self._sent()

    def note_last_word(self, word: LastWord) -> None:
        self._manager.hear(word)

    def note_death(self, *, by_request: bool) -> None:
        """Another scheduler is on its way."""
        self._manager.replace(by_request=by_request)

    def resume(self) -> list[FromFrontend]:
        """It is there. Meanwhile somebody may have left."""
        clients = [client for client in self._clients.values() if not (client.has_ended or client.is_closed)]
        if clients and self.rng.random() < 0.3:
            self.abort(self.rng.choice(clients).request.rid, -1)
        self._manager.greet()
        return self._after()

    def abort_named(self, label: str) -> list[FromFrontend]:
        self._manager.hear(AbortLabel(0, label))
        return self._sent()

    def last_abort(self, live: list[Choice]) -> str | None:
        """Whose end a scheduler told before it died: it did not come to that, but somebody may have its word."""
        read = [choice.request.label for choice in live if choice.request.rid in self._clients]
        return self.rng.choice(read) if read and self.rng.random() < 0.3 else None

    def leave(self, handle: RequestHandle, *, is_over: bool) -> None:
        """Whoever has read all, or an error, is done with it. Nothing more is to be said, if nothing of it runs."""
        before = len(self._manager.outgoing)
        handle.abort()
        self.statistics["rule: who has read all says nothing more"] += is_over
        said = self._manager.outgoing[before:]
        assert not is_over or not said, f"behind the end {said} is said"

    def end_process(self) -> None:
        """It dies, or ends its requests; before that a message of its may be one that the scheduler cannot take."""
        if self.rng.random() < 0.5:
            self.loop.is_over = True
            return
        self._note_frontend, self._note_frontend_end = lambda _: None, lambda *_: None  # nobody hears of it
        if self.rng.random() < 0.5:
            unbegun = [client for client in self._clients.values() if not client.has_begun]
            self._fail(unbegun, 500, "The engine rejected a message, perhaps this request: no.")
            self._manager.reject("no")
        words = ("The engine has ended: it was shut down.", "The engine has ended: it broke.")
        is_closed = self.rng.random() < 0.5
        self._fail(list(self._clients.values()), 503, words[not is_closed])
        self._manager.fall_idle()
        self._sent()
        owed = [Abort(rid, -1) for rid in self.ledger.live_rids()]
        if is_closed:
            self._manager.close()
        else:
            self._manager.die("it broke.")
        said = self._sent()
        assert said == (owed if is_closed else []), f"as its process ends, the scheduler is told {said}, not {owed}"
        self._check_empty()

    def _fail(self, clients: list[Client], status: int, message: str) -> None:
        for client in clients:
            client.note_failure(status, message)
            self.statistics["rule: all fail with their engine"] += client.error is not None

    def check_read(self) -> None:
        for client in self._clients.values() if not self.loop.is_over else ():
            client.check_complete()

    def check_complete(self) -> None:
        """At the end of the world."""
        self.check_read()
        self._check_empty()

    def _check_empty(self) -> None:
        stats = self._manager.stats()
        left = {name: value for name, value in stats.items() if name.startswith("live_") and value}
        assert not left, f"of ended requests something is left: {left}"
        told = {name: stats[name] for name in self._figures}
        assert told == self._figures, f"{told} are told, and {dict(self._figures)} there were"
        self.statistics["rule: a frontend forgets what has ended"] += 1

    def _after(self) -> list[FromFrontend]:
        touched, self._touched = self._touched, {}
        for rid, client in touched.items():
            client.check_told()
            if client.has_ended:
                self.statistics["rule: a frontend forgets what has ended"] += 1
                assert rid not in self.deliveries._live, f"{client.name} has ended, and is kept"
            if self.rng.random() < 0.05:
                client.give_up_waiting()
        if self.broken is not None:
            raise self.broken
        return self._sent()

    def _sent(self) -> list[FromFrontend]:
        messages = self._manager.outgoing.copy()
        self._manager.outgoing.clear()
        return messages

    # ---- What the ledger says

    def _note_end(self, rid: int, index: int) -> None:
        """It ends on this side."""
        client = self._clients.get(rid)
        for c in client.came.values() if client is not None else ():
            if index in (-1, c.choice.choice) and c.done is None:
                c.ended_here = True
        self._note_frontend_end(rid, index)

    def _note_effect(self, effect: Effect) -> None:
        self._note_frontend(effect)
        match effect:
            case NewTokens():
                self._figures["num_output_tokens"] += len(effect.ids)
            case RequestRefused():
                self._figures["num_refused"] += 1
            case Send():
                self._figures["num_gaps"] += isinstance(effect.message, AskRange)
                return
        client = self._clients.get(effect.rid)
        if client is None:
            return
        match effect:
            case NewTokens(choice=index):
                client.came[index].note_tokens(effect, self.now)
            case ChoiceEnded(_, index, done):
                client.came[index].done = done
                client.came[index].cached = done.cached_tokens
                if done.reason == "error" and client.error is None:
                    client.error = done.status or 500, done.message, done.retry_after_s
            case RequestRefused(_, status, message, retry_after_s):
                client.error = status, message, retry_after_s
        self._touched[effect.rid] = client
