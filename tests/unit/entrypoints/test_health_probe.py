"""The question whether the engine generates, asked by many."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from msgspec.structs import replace

from srt.entrypoints import health_probe
from srt.entrypoints.health_probe import HealthProbe
from srt.managers.tokenizer_manager.api_types import ChoiceUpdate, Finish, GenerateInput, RequestError
from srt.managers.tokenizer_manager.tokenizer_manager import TokenizerManager
from tests.unit.entrypoints.fake_engine import FakeEngine, typing_out


def test_many_who_ask_at_once_cost_one_token_and_its_answer_stays_fresh_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, probe = FakeEngine(), HealthProbe()
    manager = cast(TokenizerManager, engine)

    monkeypatch.setattr(health_probe, "FRESH_S", 3600.0)

    async def go() -> None:
        await asyncio.gather(*(probe.run(manager) for _ in range(10)))
        await probe.run(manager)
        assert len(engine.handles) == 1
        monkeypatch.setattr(health_probe, "FRESH_S", 0.0)
        await probe.run(manager)
        assert len(engine.handles) == 2

    asyncio.run(go())


def test_a_failure_is_told_to_all_who_ask_and_forgotten_then(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, probe = FakeEngine(), HealthProbe()
    manager = cast(TokenizerManager, engine)

    async def go() -> None:
        engine.script = lambda request: [RequestError(500, "No pages.")]
        told = await asyncio.gather(*(probe.run(manager) for _ in range(3)), return_exceptions=True)
        assert [str(error) for error in told] == ["No token could be generated: No pages."] * 3
        engine.script = None
        await probe.run(manager)

    asyncio.run(go())


def test_who_leaves_does_not_take_the_question_from_others() -> None:
    engine, probe = FakeEngine(), HealthProbe()
    manager = cast(TokenizerManager, engine)

    async def go() -> None:
        first, second = (asyncio.create_task(probe.run(manager)) for _ in range(2))
        await engine.has_submitted.wait()
        first.cancel()
        await second
        assert first.cancelled()

    asyncio.run(go())


def test_a_probe_that_somebody_aborts_says_nothing_and_is_asked_again() -> None:
    engine, probe = FakeEngine(), HealthProbe()
    manager = cast(TokenizerManager, engine)

    def aborted_at_first(request: GenerateInput) -> list[list[ChoiceUpdate] | RequestError | None]:
        answer = typing_out(request, "Hello!")
        if len(engine.handles) == 2:
            return answer
        assert isinstance(answer[0], list)
        (only,) = answer[0]
        return [[replace(only, text="", ids=(), completion_tokens=0, finish=Finish("abort"))]]

    async def go() -> None:
        engine.script = aborted_at_first
        await probe.run(manager)
        assert len(engine.handles) == 3

    asyncio.run(go())
