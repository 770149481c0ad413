"""How a call runs, whatever the API."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from srt.entrypoints.streaming import run_all
from srt.managers.io_struct import GenerateInput
from srt.sampling.sampling_params import SamplingParams
from tests.unit.entrypoints.fake_engine import FakeEngine


def test_others_on_the_loop_go_on_while_a_large_batch_is_submitted() -> None:
    """Short prompts are tokenized on the loop: a batch of thousands must not keep it to itself."""
    seen: list[int] = []

    async def go() -> None:
        engine = FakeEngine()

        async def look() -> None:
            while len(engine.handles) < 20:
                seen.append(len(engine.handles))
                await asyncio.sleep(0)

        async def use(prompt: int, handle: Any) -> None:
            await handle.collect()

        inputs = [GenerateInput(SamplingParams(), text="hi") for _ in range(20)]
        looking = asyncio.create_task(look())
        await run_all(cast(Any, engine), inputs, use)
        await looking

    asyncio.run(go())
    assert len(set(seen)) > 10
