"""A running request: the text of its choices, and the part its reader has not fetched yet. A slow reader gets many pieces as one.

`stop_matcher.py` decides how much of the text is held back, because it may begin a stop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from msgspec.structs import replace

from srt.managers.tokenizer_manager.api_types import ChoiceTimes, ChoiceUpdate, Finish, RequestError, TokenLogprob
from srt.managers.tokenizer_manager.detokenizer import OutputText
from srt.managers.tokenizer_manager.request_ledger import NewTokens
from srt.managers.tokenizer_manager.request_watch import Watched
from srt.protocol.messages import GenerateRequest, RequestDone
from srt.sampling.sampling_params import choice_seed

ABORTED = "The request was aborted."


class Reader(Protocol):
    """A consumer that gets updates by a call, in the same turn of the event loop in which they arrive."""

    @property
    def can_accept_now(self) -> bool: ...

    def accept_now(self, updates: list[ChoiceUpdate]) -> None:
        """Consume `updates`. Called only while `can_accept_now` is true."""


@dataclass(slots=True)
class _Choice:
    """A choice of a live request: its totals, and the text, ids and logprobs that the reader has not fetched yet."""

    index: int
    output: OutputText
    seed: int
    num_tokens: int = 0
    first_token_s: float | None = None  # seconds since the request arrived
    last_token_s: float | None = None
    queue_s: float | None = None
    cached_tokens: int = 0
    num_preempted: int = 0
    num_verified: int = 0
    num_verified_ids: int = 0
    weight_version: str = ""
    finish: Finish | None = None
    is_news: bool = False  # there is something to fetch
    is_first: bool = True  # no update has been fetched yet
    is_over: bool = False  # the reader has fetched the finish
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class LiveRequest:
    """The frontend's state of one running request. The TokenizerManager feeds it; a RequestHandle reads it."""

    __slots__ = (
        *("rid", "label", "seed", "_prompt_ids", "_num_prompt", "_told_prompt_ids", "_num_over", "_choices"),
        *(
            "has_one_choice",
            "watched",
            "_only",
            "_wants_tokens",
            "_arrived_s",
            "_sent_s",
            "_wants_all",
            "_error",
            "_wake",
            "replica",
        ),
        "_reader",
    )

    def __init__(
        self,
        request: GenerateRequest,
        new_output: Callable[[], OutputText],
        *,
        wants_tokens: bool = True,
        wants_prompt_ids: bool = False,
        arrived_s: float = 0.0,
        sent_s: float = 0.0,
    ) -> None:
        """Prepare a choice for each entry of `request.choices`.

        wants_tokens: False for a request that only computes its prompt. The engine draws at least one token; that one is not shown.
        arrived_s, sent_s: clock times at which the request reached this process and is sent to the scheduler.
        """
        self.rid = request.rid
        self.replica: int | None = None  # that runs it, if the server has several
        self.label = request.label
        self.seed = request.seed
        self._prompt_ids = request.prompt_ids
        self._num_prompt = len(request.prompt_ids)
        self._told_prompt_ids = self.prompt_ids if wants_prompt_ids else ()  # one tuple, shared by all choices
        self._num_over = 0  # number of choices whose finish was fetched
        self._choices = {
            index: _Choice(index, new_output(), choice_seed(request.seed, index)) for index in request.choices.tolist()
        }
        self.has_one_choice = len(self._choices) == 1
        self._only = self._choices.get(0) if self.has_one_choice else None
        self.watched: Watched | None = None
        self._wants_tokens = wants_tokens
        self._arrived_s = arrived_s
        self._sent_s = sent_s
        self._wants_all = False  # the reader waits for the end
        self._error: RequestError | None = None
        self._wake: asyncio.Future[None] | None = None  # set while the reader waits
        self._reader: Reader | None = None

    # ---- The manager's side

    def add_tokens(self, news: NewTokens, now_s: float) -> bool:
        """Add tokens of a choice that arrived at `now_s`. Return True if their text completed a stop: later tokens are dropped."""
        choice = self._only or self._choices[news.choice]
        if choice.finish is not None:
            return False
        choice.cached_tokens = news.cached
        if news.prompt_logprobs:
            choice.prompt_logprobs = choice.prompt_logprobs or news.prompt_logprobs
        if not self._wants_tokens:
            return False
        delta = choice.output.push(news.ids)
        choice.text += delta.text
        choice.ids += news.ids if delta.num_tokens == len(news.ids) else news.ids[: delta.num_tokens]
        if news.logprobs:
            choice.logprobs += news.logprobs[: delta.num_tokens]
        choice.num_tokens += delta.num_tokens
        choice.last_token_s = now_s - self._arrived_s
        if choice.first_token_s is None:
            choice.first_token_s = choice.last_token_s
        if delta.stop is not None:
            self._finish(choice, Finish("stop", matched=delta.stop))
            return True
        choice.is_news = True
        return False

    def end_choice(self, index: int, done: RequestDone) -> None:
        choice = self._choices[index]
        if choice.finish is not None:
            return
        choice.cached_tokens = done.cached_tokens
        choice.num_preempted = done.num_preempted
        choice.num_verified, choice.num_verified_ids = done.num_verified, done.num_verified_ids
        choice.weight_version = done.weight_version
        choice.queue_s = None if done.queue_s < 0 else done.queue_s
        if done.reason == "error":
            message = done.message or "The engine failed on this request."
            self.fail(RequestError(done.status or 500, message, retry_after_s=done.retry_after_s or None))
            return
        delta = choice.output.finish()
        choice.text += delta.text
        self._finish(choice, _finish_of(done, choice.num_tokens, delta.stop))

    def fail(self, error: RequestError) -> None:
        """Raise `error` in the reader once it has fetched what came so far. Does nothing if all choices have ended."""
        if self._error is None and not self.has_ended:
            self._error = error
            self._wake_reader()

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return tuple(self._prompt_ids.tolist())

    @property
    def num_prompt_tokens(self) -> int:
        return self._num_prompt

    @property
    def has_begun(self) -> bool:
        """True if a token or an end has come for some choice."""
        return any(choice.num_tokens or choice.finish for choice in self._choices.values())

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    @property
    def has_ended(self) -> bool:
        return all(choice.finish is not None for choice in self._choices.values())

    def _finish(self, choice: _Choice, finish: Finish) -> None:
        choice.finish = finish
        choice.is_news = True

    def notify(self) -> None:
        """Deliver the updates that the batch brought: push them to the reader, or wake it."""
        reader = self._reader
        if reader is None:
            if not self._wants_all or self.has_ended:
                self._wake_reader()
        elif self._error is not None or not reader.can_accept_now:
            self._wake_reader()
        else:
            reader.accept_now(self._pop_updates())
            if self.is_closed:
                self._wake_reader()

    def _wake_reader(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    # ---- The reader's side

    def close(self) -> None:
        """Stop reading; a waiting reader wakes and sees the end."""
        for choice in self._choices.values():
            choice.is_over = True
        self._num_over = len(self._choices)
        self._wake_reader()

    def push_to(self, reader: Reader) -> None:
        """Let `notify` pass updates to `reader` while its `can_accept_now` is true; otherwise they wake the iterating reader."""
        self._reader = reader

    async def next_updates(self) -> list[ChoiceUpdate]:
        """Return the updates since the last call; wait if there are none. An empty list is the end; an error is raised last."""
        while True:
            updates = self._pop_updates()
            if updates or self.is_closed:
                return updates
            if self._error is not None:
                self.close()
                raise self._error
            await self._wait()

    def _pop_updates(self) -> list[ChoiceUpdate]:
        only = self._only
        if only is not None:
            return [self._pop_update(only)] if only.is_news and not only.is_over else []
        return [self._pop_update(choice) for choice in self._choices.values() if choice.is_news and not choice.is_over]

    async def _wait(self) -> None:
        """Wait for `notify`, `fail` or `close`. Only one reader may wait."""
        self._wake = asyncio.get_running_loop().create_future()
        await self._wake

    async def all_updates(self) -> list[ChoiceUpdate]:
        """Wait for the end and return one update for each choice."""
        self._wants_all = True
        while not self.has_ended and self._error is None and not self.is_closed:
            await self._wait()
        if self._error is not None:
            self.close()
            raise self._error
        for choice in self._choices.values():
            choice.finish = choice.finish or Finish("abort", message=ABORTED)
        return [self._pop_update(choice) for choice in self._choices.values()]

    @property
    def is_closed(self) -> bool:
        """True if the reader closed the request or has fetched every finish."""
        return self._num_over == len(self._choices)

    def _pop_update(self, choice: _Choice) -> ChoiceUpdate:
        update = ChoiceUpdate(
            choice.index,
            choice.text,
            tuple(choice.ids),
            self._num_prompt,
            choice.num_tokens,
            choice.cached_tokens,
            choice.seed,
            self.label,
            choice.finish,
        )
        if choice.is_first or choice.logprobs or choice.finish is not None:
            update = self._with_more(update, choice)
        choice.text, choice.ids = "", []
        if choice.logprobs:
            choice.logprobs = []
        choice.is_first = choice.is_news = False
        if choice.finish is not None and not choice.is_over:
            choice.is_over = True
            self._num_over += 1
        return update

    def _with_more(self, update: ChoiceUpdate, choice: _Choice) -> ChoiceUpdate:
        """Return `update` with the fields that most updates lack: logprobs, prompt ids, times."""
        times = None
        if choice.finish is not None:
            times = ChoiceTimes(
                self._arrived_s,
                self._sent_s - self._arrived_s,
                choice.first_token_s,
                choice.last_token_s,
                choice.queue_s,
            )
        return replace(
            update,
            output_logprobs=tuple(choice.logprobs),
            prompt_logprobs=choice.prompt_logprobs if choice.is_first else (),
            prompt_ids=self._told_prompt_ids if choice.is_first else (),
            num_preempted=choice.num_preempted,
            num_verified=choice.num_verified,
            num_verified_ids=choice.num_verified_ids,
            weight_version=choice.weight_version,
            times=times,
            replica=self.replica,
        )


def _finish_of(done: RequestDone, num_tokens: int, stop: str | None) -> Finish:
    if stop is not None:  # completed by the U+FFFD of an unfinished last character
        return Finish("stop", matched=stop)
    if done.reason == "stop" and num_tokens:
        return Finish("stop", matched=done.matched if done.matched >= 0 else None)
    if done.reason in ("stop", "length"):
        return Finish("length", length=num_tokens)
    return Finish("abort", message=done.message or ABORTED)


class RequestHandle:
    """A submitted request. Use it as `with handle:`: leaving the block aborts what has not finished.

        with await manager.submit(request) as handle:
            async for updates in handle:  # list[ChoiceUpdate]: all that arrived since the last round
                …

    Iteration ends after the last choice's finish. It raises RequestError if the scheduler refuses the request, and EngineDied if
    the engine ends. Cancelling a waiting `anext(handle)` loses nothing: the next one continues. A handle that is dropped aborts too.
    """

    def __init__(self, live: LiveRequest, abort: Callable[[int], None]) -> None:
        self._live = live
        self._abort = abort
        self._loop = asyncio.get_running_loop()

    @property
    def rid(self) -> str:
        """The label: the client's, or a random one if the client gave none."""
        return self._live.label

    @property
    def seed(self) -> int:
        return self._live.seed

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self._live.prompt_ids

    def __aiter__(self) -> RequestHandle:
        return self

    async def __anext__(self) -> list[ChoiceUpdate]:
        updates = await self._live.next_updates()
        if not updates:
            raise StopAsyncIteration
        return updates

    def push_to(self, reader: Reader) -> None:
        """Pass updates to `reader` in the turn of the event loop in which they arrive. The rest, and the end, come by iterating."""
        self._live.push_to(reader)

    async def collect(self) -> list[ChoiceUpdate]:
        """Wait for the end and return one complete update per choice, in order.

        Use it instead of iterating; it is cheaper. After an `abort` in between, the updates hold what came until then, with the
        finish "abort".
        """
        return await self._live.all_updates()

    def abort(self) -> None:
        """Abort the choices that still run; iteration then ends without further updates. Does nothing after the end."""
        self._abort(self._live.rid)
        self._live.close()

    def __enter__(self) -> RequestHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def __del__(self) -> None:
        # The garbage collector may run in any thread, but the manager may be used only in its event loop's thread.
        if not (self._live.has_ended or self._live.is_closed or self._loop.is_closed()):
            with contextlib.suppress(RuntimeError):  # the loop was closed just now: nothing runs any more
                self._loop.call_soon_threadsafe(self._abort, self._live.rid)
