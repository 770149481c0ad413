"""Answers from the engine's updates, shared by all APIs: one JSON at the end, or server-sent events as the tokens come.

A stream without tokens is kept alive by `exchange.py`, which also notices that a client has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import orjson
from msgspec.structs import replace

from srt.entrypoints.exchange import Exchange
from srt.managers.tokenizer_manager.api_types import ChoiceUpdate, GenerateInput, RequestError
from srt.managers.tokenizer_manager.tokenizer_manager import RequestHandle, TokenizerManager

DONE = b"data: [DONE]\n\n"


class Answer(Protocol):
    """The writer of one call's answer in the format of one API. `prompt` is the index of an input in its batch."""

    def add(self, prompt: int, update: ChoiceUpdate) -> None:
        """Add an update of a choice."""

    def result(self) -> Any:
        """Return the whole answer, after the last update."""

    def events(self, prompt: int, update: ChoiceUpdate) -> bytes:
        """Add an update of a choice, and return it as events; may be empty."""

    def last_events(self) -> bytes:
        """Return the events behind the last update, with what ends the API's streams; may be empty."""


def event(value: Any, name: str | None = None) -> bytes:
    """Return a server-sent event; with its name, in APIs whose events have names."""
    data = b"data: " + orjson.dumps(value) + b"\n\n"
    return data if name is None else b"event: " + name.encode() + b"\n" + data


class TextEvent:
    """A template for events that differ only in one text: the rest is encoded once."""

    __slots__ = ("_after", "_before")

    def __init__(self, make: Callable[[str], Mapping[str, object]], name: str | None = None) -> None:
        """Encode the chunk `make(text)` around its text. No value that a client chooses may follow the text in it."""
        mark = "\x00text\x00"
        self._before, _, self._after = event(make(mark), name).rpartition(orjson.dumps(mark))

    def write(self, text: str) -> bytes:
        return self._before + orjson.dumps(text) + self._after


async def answer_call(
    exchange: Exchange,
    engine: TokenizerManager,
    inputs: Sequence[GenerateInput],
    answer: Answer,
    *,
    stream: bool,
    interval: int,
) -> None:
    """Run the inputs and send their answer; raise RequestError if one is refused. In any case, no request runs on afterwards."""
    exchange.is_stream = stream
    work = (
        _stream(exchange, engine, inputs, answer, interval) if stream else _send_whole(exchange, engine, inputs, answer)
    )
    await exchange.run_while_connected(work)


async def _send_whole(
    exchange: Exchange, engine: TokenizerManager, inputs: Sequence[GenerateInput], answer: Answer
) -> None:
    async def collect(prompt: int, handle: RequestHandle) -> None:
        for update in await handle.collect():
            answer.add(prompt, update)

    await run_all(engine, inputs, collect)
    await exchange.send_json(answer.result())


async def _stream(
    exchange: Exchange, engine: TokenizerManager, inputs: Sequence[GenerateInput], answer: Answer, interval: int
) -> None:
    pacer = Pacer(interval)

    async def follow(prompt: int, handle: RequestHandle) -> None:
        writer = _EventWriter(exchange, answer, pacer, prompt)
        handle.push_to(writer)
        async for updates in handle:
            if data := writer.events(updates):
                await exchange.write(data)

    await run_all(engine, inputs, follow)
    if data := answer.last_events():
        await exchange.write(data)
    await exchange.end()


class _EventWriter:
    """A reader that writes the updates of one input to the socket, directly while the socket accepts them."""

    __slots__ = ("_answer", "_exchange", "_pacer", "_prompt")

    def __init__(self, exchange: Exchange, answer: Answer, pacer: Pacer, prompt: int) -> None:
        self._exchange = exchange
        self._answer = answer
        self._pacer = pacer
        self._prompt = prompt

    @property
    def can_accept_now(self) -> bool:
        return self._exchange.can_write_now

    def accept_now(self, updates: list[ChoiceUpdate]) -> None:
        if data := self.events(updates):
            self._exchange.write_now(data)

    def events(self, updates: list[ChoiceUpdate]) -> bytes:
        due = self._pacer.due(self._prompt, updates)
        if len(due) == 1:
            return self._answer.events(self._prompt, due[0])
        return b"".join([self._answer.events(self._prompt, update) for update in due])


async def run_all(
    engine: TokenizerManager,
    inputs: Sequence[GenerateInput],
    use: Callable[[int, RequestHandle], Awaitable[None]],
) -> None:
    """Submit all inputs and `use` their handles concurrently. The first error ends all."""
    submitted = await engine.submit_all(inputs)
    with contextlib.ExitStack() as handles:
        for handle in submitted:
            handles.enter_context(handle)
        if len(submitted) == 1:
            await use(0, submitted[0])
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                for prompt, handle in enumerate(submitted):
                    tasks.create_task(_awaited(use(prompt, handle)))
        except ExceptionGroup as group:
            first = group.exceptions[0]
            if isinstance(first, RequestError):
                raise first from None
            raise


async def _awaited(work: Awaitable[None]) -> None:
    await work


class Pacer:
    """A filter that passes updates of a choice every `interval` tokens, but the first and the last at once."""

    __slots__ = ("_held", "_interval", "_sent")

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._held: dict[tuple[int, int], ChoiceUpdate] = {}
        self._sent: dict[tuple[int, int], int] = {}  # number of tokens sent

    def due(self, prompt: int, updates: list[ChoiceUpdate]) -> list[ChoiceUpdate]:
        """Return the updates to send now. The others are kept and joined with later updates of the same choice."""
        if self._interval == 1:
            return updates
        return [due for update in updates if (due := self._pass((prompt, update.index), update)) is not None]

    def _pass(self, key: tuple[int, int], update: ChoiceUpdate) -> ChoiceUpdate | None:
        held = self._held.pop(key, None)
        whole = update if held is None else joined(held, update)
        sent = self._sent.get(key, 0)
        if sent and whole.finish is None and whole.completion_tokens - sent < self._interval:
            self._held[key] = whole
            return None
        self._sent[key] = whole.completion_tokens
        return whole


def joined(earlier: ChoiceUpdate, later: ChoiceUpdate) -> ChoiceUpdate:
    """Return two successive updates of a choice as one."""
    return replace(
        later,
        text=earlier.text + later.text,
        ids=earlier.ids + later.ids,
        output_logprobs=earlier.output_logprobs + later.output_logprobs,
        prompt_logprobs=earlier.prompt_logprobs or later.prompt_logprobs,
        prompt_ids=earlier.prompt_ids or later.prompt_ids,
    )
