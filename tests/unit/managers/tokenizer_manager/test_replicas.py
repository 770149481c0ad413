"""A frontend with two replicas, on real sockets: a test says what their schedulers and the supervisor say."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from srt.managers.tokenizer_manager.api_types import EngineDied, GenerateInput, RequestError
from srt.managers.tokenizer_manager.request_ledger import CONVICTION
from srt.managers.tokenizer_manager.tokenizer_manager import RequestHandle, TokenizerManager
from srt.protocol.engine_work import MemoryWork, ReleaseMemory, ResumeMemory, UpdateWeights
from srt.protocol.messages import (
    Abort,
    AbortLabel,
    ControlReply,
    EngineLost,
    EngineReplaced,
    FlushCache,
    GenerateRequest,
    GetState,
    LastWord,
    Load,
    int32_array,
)
from srt.server_args import ServerArgs
from tests.support.fake_scheduler import PATIENCE_S, FakeScheduler, ended

Story = Callable[[TokenizerManager, FakeScheduler, FakeScheduler], Awaitable[None]]


@pytest.fixture
def play(qwen3_checkpoint: Path) -> Callable[[Story], None]:
    """`play(story)` runs `async def story(manager, first, second)` with a manager and the schedulers of its two replicas."""

    def run(story: Story) -> None:
        async def main() -> None:
            async with connected(qwen3_checkpoint) as (manager, first, second):
                async with asyncio.timeout(PATIENCE_S):
                    await story(manager, first, second)
                    await until(lambda: not any(v for n, v in manager.stats().items() if n.startswith("live_")))

        asyncio.run(main())

    return run


@asynccontextmanager
async def connected(folder: Path) -> AsyncIterator[tuple[TokenizerManager, FakeScheduler, FakeScheduler]]:
    with tempfile.TemporaryDirectory() as run_dir:
        first, second = FakeScheduler(run_dir, 1), FakeScheduler(run_dir, 2)
        args = ServerArgs(model_path=str(folder), dp_size=2)
        manager = await TokenizerManager.connect(
            index=0, generations=[1, 2], run_dir=run_dir, model_folder=str(folder), args=args
        )
        try:
            await first.welcome()
            await second.welcome(max_request_tokens=400)
            await until(lambda: len(manager._serving()) == 2)
            yield manager, first, second
        finally:
            await manager.close()
            first.close()
            second.close()


async def until(is_so: Callable[[], bool]) -> None:
    """Let the loop turn until something has arrived that nobody can wait for."""
    while not is_so():  # noqa: ASYNC110 - there is no event, on purpose: only this test looks
        await asyncio.sleep(0)


def ask(manager: TokenizerManager, replica: int | None = None, **params: Any) -> GenerateInput:
    return GenerateInput(params=manager.sampling_params({"max_new_tokens": 8, **params}), text="Once", replica=replica)


async def begin(
    manager: TokenizerManager, scheduler: FakeScheduler, replica: int, **params: Any
) -> tuple[RequestHandle, GenerateRequest]:
    handle = await manager.submit(ask(manager, replica, **params))
    return handle, await scheduler.expect(GenerateRequest)


async def answer(scheduler: FakeScheduler, handle: RequestHandle, first: int = 0) -> GenerateRequest:
    """Give the tokens that are missing of eight to the request that the scheduler gets next, and read the whole answer."""
    request = await scheduler.expect(GenerateRequest)
    scheduler.send_tokens(request.rid, range(10 + first, 18), first=first, done=ended(request.rid, 8))
    (update,) = await handle.collect()
    assert list(update.ids) == list(range(10, 18))
    return request


def test_a_request_goes_to_the_replica_that_it_names_and_says_which_one_ran_it(play: Callable[[Story], None]) -> None:
    async def story(manager: TokenizerManager, first: FakeScheduler, second: FakeScheduler) -> None:
        for replica, scheduler in enumerate((first, second)):
            handle, request = await begin(manager, scheduler, replica)
            scheduler.send_tokens(request.rid, range(8), done=ended(request.rid, 8))
            (update,) = await handle.collect()
            assert update.replica == replica
        assert manager.limits.max_request_tokens == 400  # the lesser of both
        with pytest.raises(
            RequestError, match=r"routed_dp_rank must be an integer from 0 to 1 \(see --dp-size\), not 2"
        ):
            await manager.submit(ask(manager, 2))

    play(story)


def test_the_other_replica_continues_at_once_what_one_leaves_when_a_process_of_it_is_killed(
    play: Callable[[Story], None],
) -> None:
    async def story(manager: TokenizerManager, first: FakeScheduler, second: FakeScheduler) -> None:
        handle, request = await begin(manager, first, 0, sampling_seed=5)
        first.send_tokens(request.rid, [10, 11])
        first.send(LastWord(np.array([request.rid]), int32_array([0]), is_alone=True))
        manager.engine_changed(EngineLost(0, by_request=False))
        first.close()
        again = await second.expect(GenerateRequest)
        assert (again.rid, again.seed, again.resumed, again.suspect) == (request.rid, 5, True, False)
        assert [ids.tolist() for ids in again.output_ids] == [[10, 11]]
        second.send_tokens(again.rid, range(12, 18), first=2, done=ended(again.rid, 8))
        (update,) = await handle.collect()
        assert (list(update.ids), update.replica) == (list(range(10, 18)), 1)
        assert manager.is_ready

    play(story)


def test_what_was_in_flight_waits_for_its_own_replica_unless_the_death_came_from_outside(
    play: Callable[[Story], None],
) -> None:
    async def story(manager: TokenizerManager, first: FakeScheduler, second: FakeScheduler) -> None:
        running, suspect = await begin(manager, first, 0)
        waiting, innocent = await begin(manager, first, 0)
        first.send(LastWord(np.array([suspect.rid]), int32_array([0]), is_alone=True))
        first.close()
        assert (await answer(second, waiting)).rid == innocent.rid
        manager.engine_changed(EngineLost(0, by_request=True))
        successor = FakeScheduler(first._run_dir, 3)
        manager.engine_changed(EngineReplaced(3, by_request=True))
        await successor.welcome()
        assert (await answer(successor, running)).rid == suspect.rid
        assert not second.has_received()
        successor.close()

    play(story)


def test_nothing_moves_if_nobody_knows_what_was_in_flight_until_the_cause_is_known(
    play: Callable[[Story], None],
) -> None:
    async def story(manager: TokenizerManager, first: FakeScheduler, second: FakeScheduler) -> None:
        handle, request = await begin(manager, first, 0)
        first.close()
        await until(lambda: len(manager._serving()) == 1)
        assert not second.has_received()
        manager.engine_changed(EngineLost(0, by_request=False))
        assert (await answer(second, handle)).rid == request.rid

    play(story)


def test_a_request_that_killed_a_replica_twice_is_never_tried_on_another(play: Callable[[Story], None]) -> None:
    async def story(manager: TokenizerManager, first: FakeScheduler, second: FakeScheduler) -> None:
        poison, request = await begin(manager, first, 0)
        scheduler = first
        for generation in (3, 5):
            scheduler.send(LastWord(np.array([request.rid]), int32_array([0]), is_alone=True))
            scheduler.close()
            manager.engine_changed(EngineReplaced(generation, by_request=True))
            scheduler = FakeScheduler(first._run_dir, generation)
            await scheduler.welcome()
            if generation == 3:
                await scheduler.expect(GenerateRequest)
        with pytest.raises(RequestError, match=CONVICTION):
            await poison.collect()
        again = await manager.submit(ask(manager, 1))  # even if another replica is named
        assert (await scheduler.expect(GenerateRequest)).suspect
        again.abort()
        await scheduler.expect(Abort)
        assert not second.has_received()
        scheduler.close()

    play(story)


def test_requests_wait_for_whichever_replica_is_back_first(play: Callable[[Story], None]) -> None:
    async def story(manager: TokenizerManager, first: FakeScheduler, second: FakeScheduler) -> None:
        for scheduler in (first, second):
            scheduler.close()
        await until(lambda: not manager.is_ready)
        held = await manager.submit(ask(manager, 0))
        manager.engine_changed(EngineReplaced(4, by_request=False, replica=1))
        successor = FakeScheduler(first._run_dir, 4)
        await successor.welcome()
        assert not (await answer(successor, held)).resumed
        successor.close()

    play(story)


def test_an_abort_reaches_all_replicas_also_what_one_has_just_taken_over(play: Callable[[Story], None]) -> None:
    async def story(manager: TokenizerManager, first: FakeScheduler, second: FakeScheduler) -> None:
        handle, _ = await begin(manager, first, 0)
        aborting = asyncio.ensure_future(manager.abort_label(""))
        await first.expect(AbortLabel)
        call = await second.expect(AbortLabel)
        first.close()  # before it has answered
        manager.engine_changed(EngineLost(0, by_request=False))
        (update,) = await handle.collect()
        assert update.finish is not None and update.finish.kind == "abort"
        second.send(ControlReply(call.call, True, "", {"num_aborted": 2}))
        assert await aborting == 2
        assert not second.has_received()

    play(story)


def test_control_calls_reach_all_replicas_and_a_pause_needs_all_of_them(play: Callable[[Story], None]) -> None:
    async def story(manager: TokenizerManager, first: FakeScheduler, second: FakeScheduler) -> None:
        flushing = asyncio.ensure_future(manager.flush_cache())
        for scheduler, sentence in ((first, ""), (second, "2 requests run.")):
            call = await scheduler.expect(FlushCache)
            scheduler.send(ControlReply(call.call, not sentence, sentence, {}))
        assert await flushing == (False, "2 requests run.")
        asking = asyncio.ensure_future(manager.get_state())
        for number, scheduler in enumerate((first, second)):
            call_of_state = await scheduler.expect(GetState)
            values = {
                "num_steps": 5,
                "page_size": 16,
                "decode_step_us": 2 * number,
                "is_paused": number == 1,
                "row_tokens": 5,
            }
            scheduler.send(ControlReply(call_of_state.call, True, "", {**values, "max_rows_in_step": number}))
        combined = {
            "num_steps": 10,
            "page_size": 16,
            "decode_step_us": 1.0,
            "is_paused": True,
            "row_tokens": 5,
            "max_rows_in_step": 1,
        }
        assert await asking == (True, "", combined)
        first.close()
        await until(lambda: len(manager._serving()) == 1)
        for needing_all in (manager.pause("abort"), manager.resume()):
            with pytest.raises(RequestError, match=r"Replica 0 is being replaced\."):
                await needing_all

    play(story)


@pytest.mark.parametrize("work", [ReleaseMemory(["weights"]), ResumeMemory(["weights"])])
def test_memory_is_lent_by_all_replicas_or_the_caller_is_told(play: Callable[[Story], None], work: MemoryWork) -> None:
    async def story(manager: TokenizerManager, first: FakeScheduler, second: FakeScheduler) -> None:
        asking = asyncio.ensure_future(manager.ask_ranks(work))
        for scheduler in (first, second):
            call = await scheduler.expect(UpdateWeights)
        second.send(ControlReply(call.call, True, "", {}))
        first.close()
        await until(lambda: len(manager._serving()) == 1)
        with pytest.raises(RequestError, match=r"Replica 0 is being replaced\."):
            await manager.ask_ranks(work)
        manager.engine_changed(EngineLost(0, by_request=False, is_final=True))  # its reply will never come
        with pytest.raises(RequestError, match="A replica ended meanwhile, and its memory is as before"):
            await asking

    play(story)


def test_a_control_call_is_forgotten_whose_client_leaves_as_it_is_sent(play: Callable[[Story], None]) -> None:
    async def story(manager: TokenizerManager, first: FakeScheduler, second: FakeScheduler) -> None:
        asking = asyncio.ensure_future(manager.get_state())
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await first.expect(GetState)
        await second.expect(GetState)
        assert manager.stats()["live_calls"] == 0

    play(story)


def test_the_end_of_the_server_is_heard_behind_a_replacement_that_is_not_linked_yet(
    play: Callable[[Story], None],
) -> None:
    async def story(manager: TokenizerManager, first: FakeScheduler, second: FakeScheduler) -> None:
        handle, _ = await begin(manager, first, 0)
        manager.engine_changed(EngineReplaced(3, by_request=True))  # and the link's end is not noticed yet
        manager.engine_changed(EngineLost(0, by_request=True, is_final=True))
        with pytest.raises(EngineDied, match="shutting down"):
            await handle.collect()

    play(story)


def test_what_cannot_move_fails_when_its_replica_does_not_come_back(play: Callable[[Story], None]) -> None:
    async def story(manager: TokenizerManager, first: FakeScheduler, second: FakeScheduler) -> None:
        suspect, request = await begin(manager, first, 0)
        other, _ = await begin(manager, second, 1)
        first.send(LastWord(np.array([request.rid]), int32_array([0]), is_alone=True))
        first.close()
        await until(lambda: len(manager._serving()) == 1)
        manager.engine_changed(EngineLost(0, by_request=True, is_final=True))
        with pytest.raises(EngineDied, match="shutting down"):
            await suspect.collect()
        assert manager.is_ready
        other.abort()
        await second.expect(Abort)

    play(story)


def test_without_a_name_the_replica_with_less_to_do_is_chosen_and_later_the_one_with_the_prefix(
    play: Callable[[Story], None],
) -> None:
    async def story(manager: TokenizerManager, first: FakeScheduler, second: FakeScheduler) -> None:
        first.send(Load(5, 0, 100, 1))
        await until(lambda: manager.load is not None)
        prompt = list(range(100))
        for _ in range(3):
            request = GenerateInput(params=manager.sampling_params({"max_new_tokens": 8}), input_ids=prompt)
            handle = await manager.submit(request)
            await answer(second, handle)
            second.send(Load(9, 0, 100, 1))  # busier than the other by now, but not by much
            await until(lambda: manager.load == Load(14, 0, 200, 2))
        assert not first.has_received()

    play(story)
