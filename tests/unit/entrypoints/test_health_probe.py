"""The question whether the engine generates, asked by many."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from srt.entrypoints import health_probe
from srt.entrypoints.health_probe import HealthProbe
from srt.managers.io_struct import RequestError
from srt.managers.tokenizer_manager import TokenizerManager
from tests.unit.entrypoints.fake_engine import FakeEngine


def test_many_who_ask_at_once_cost_one_token_and_its_answer_stays_fresh_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, probe = FakeEngine(), HealthProbe()
    manager = cast(TokenizerManager, engine)

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
