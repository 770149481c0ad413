"""The TokenizerManager on a real socket, against a scheduler whose every word the test says."""

from __future__ import annotations

import asyncio
import gc
import math
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import uvloop

from srt.managers.tokenizer_manager.api_types import (
    ChoiceUpdate,
    EngineDied,
    Finish,
    GenerateInput,
    LogprobRequest,
    RequestError,
    TokenLogprob,
)
from srt.managers.tokenizer_manager.detokenizer import OutputText, TextDelta
from srt.managers.tokenizer_manager.text_codec import LONG_TEXT_CHARS
from srt.managers.tokenizer_manager.tokenizer_manager import RequestHandle, TokenizerManager, seed_source
from srt.protocol.engine_work import JoinUpdateGroup, LoadWeights, ReceiveWeights, UpdateWeights
from srt.protocol.messages import (
    Abort,
    AbortLabel,
    AskRange,
    ControlReply,
    EngineReplaced,
    FlushCache,
    FrontendHello,
    GenerateRequest,
    GetState,
    LastWord,
    Load,
    Refused,
    Rejected,
    TokenLogprobs,
    int32_array,
)
from srt.sampling.sampling_params import SamplingParams, choice_seed
from srt.server_args import ServerArgs
from srt.utils.tokenizer import Tokenizer, load_tokenizer
from tests.support.checkpoints import CheckpointFactory
from tests.support.fake_scheduler import PATIENCE_S, FakeScheduler, ended
from tests.support.server_process import all_gone

World = Callable[[TokenizerManager, FakeScheduler], Awaitable[None]]


@pytest.fixture
def play(qwen3_checkpoint: Path) -> Callable[..., None]:
    """`play(story)` runs `async def story(manager, scheduler)` with the two connected; in the end nothing may be left behind."""

    def run(story: World, runner: Callable[[Any], Any] = asyncio.run, **options: Any) -> None:
        async def main() -> None:
            async with connected(qwen3_checkpoint, **options) as (manager, scheduler):
                await scheduler.welcome()
                await manager.wait_ready()
                async with asyncio.timeout(PATIENCE_S):
                    await story(manager, scheduler)
                    await nothing_left(manager)

        runner(main())

    return run


@asynccontextmanager
async def connected(folder: Path, **options: Any) -> AsyncIterator[tuple[TokenizerManager, FakeScheduler]]:
    with tempfile.TemporaryDirectory() as run_dir:
        scheduler = FakeScheduler(run_dir)
        args = ServerArgs(model_path=str(folder), **options)
        manager = await TokenizerManager.connect(
            index=0, generations=[1], run_dir=run_dir, model_folder=str(folder), args=args
        )
        try:
            yield manager, scheduler
        finally:
            await manager.close()
            scheduler.close()


async def until(is_so: Callable[[], bool]) -> None:
    """Let the loop turn until something has arrived that nobody can wait for."""
    while not is_so():  # noqa: ASYNC110 - there is no event, on purpose: only this test looks
        await asyncio.sleep(0)


async def nothing_left(manager: TokenizerManager) -> None:
    await until(lambda: not any(value for name, value in manager.stats().items() if name.startswith("live_")))


def ask(manager: TokenizerManager, text: str = "Once upon a time", **params: Any) -> GenerateInput:
    return GenerateInput(params=manager.sampling_params(params), text=text)


async def begin(
    manager: TokenizerManager, scheduler: FakeScheduler, request: GenerateInput
) -> tuple[RequestHandle, GenerateRequest]:
    handle = await manager.submit(request)
    return handle, await scheduler.expect(GenerateRequest)


async def read_all(handle: RequestHandle) -> list[ChoiceUpdate]:
    return [update async for updates in handle for update in updates]


def whole(updates: list[ChoiceUpdate]) -> tuple[str, tuple[int, ...]]:
    return "".join(u.text for u in updates), tuple(i for u in updates for i in u.ids)


# ---- A request's life


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_an_answer_streams_and_equals_the_whole_one(play: Callable[..., None], runner: Callable[[Any], Any]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        ids = await manager.text.tokenize("there was a fox who could not sleep, né 你好")
        for stream in (True, False):
            asked = replace(ask(manager, max_new_tokens=len(ids), sampling_seed=5), wants_prompt_ids=stream)
            handle, request = await begin(manager, scheduler, asked)
            assert (request.seed, request.sampling.max_new_tokens) == (5, len(ids))
            assert request.prompt_ids.tolist() == await manager.text.tokenize("Once upon a time")
            for first, token in enumerate(ids[:-1]):
                scheduler.send_tokens(request.rid, [token], first=first, cached=2)
            end = ended(request.rid, len(ids), cached_tokens=2)
            scheduler.send_tokens(request.rid, ids[-1:], first=len(ids) - 1, done=end, cached=2)
            updates = await read_all(handle) if stream else await handle.collect()
            assert whole(updates) == (manager.text.detokenize(ids), tuple(ids))
            assert handle.prompt_ids == tuple(request.prompt_ids.tolist())
            assert updates[0].prompt_ids == (handle.prompt_ids if stream else ())
            last = updates[-1]
            assert (last.completion_tokens, last.prompt_tokens) == (len(ids), len(request.prompt_ids))
            assert (last.cached_tokens, last.seed, last.rid) == (2, 5, handle.rid)
            assert last.finish is not None
            assert (last.finish.kind, last.finish.length) == ("length", len(ids))
            assert all(update.finish is None for update in updates[:-1])

    play(story, runner)


def test_news_is_pushed_where_it_can_be_taken_and_waits_for_the_reader_where_not(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        handle, request = await begin(manager, scheduler, ask(manager, max_new_tokens=8))
        pushed: list[ChoiceUpdate] = []
        read: list[ChoiceUpdate] = []

        class Pushed:
            can_accept_now = False

            def accept_now(self, updates: list[ChoiceUpdate]) -> None:
                pushed.extend(updates)

        reader = Pushed()
        handle.push_to(reader)
        reading = asyncio.ensure_future(read_into(handle, read))
        for first, reader.can_accept_now in enumerate((False, True, True, False, False, True, False)):
            scheduler.send_tokens(request.rid, [20 + first], first=first)
            await until(lambda: sum(len(u.ids) for u in pushed + read) == first + 1)  # noqa: B023
        reader.can_accept_now = True
        scheduler.send_tokens(request.rid, [27], first=7, done=ended(request.rid, 8))
        await reading
        assert [u.ids for u in read] == [(20,), (23,), (24,), (26,)]
        assert [u.ids for u in pushed] == [(21,), (22,), (25,), (27,)]
        assert pushed[-1].finish is not None

    async def read_into(handle: RequestHandle, read: list[ChoiceUpdate]) -> None:
        async for updates in handle:
            read += updates

    play(story)


def test_a_slow_reader_gets_everything_in_one_piece(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        ids = await manager.text.tokenize("there was a fox")
        handle, request = await begin(manager, scheduler, ask(manager))
        for first, token in enumerate(ids):
            scheduler.send_tokens(request.rid, [token], first=first)
        await until(lambda: manager.stats()["num_output_tokens"] == len(ids))
        (update,) = await anext(handle)
        assert (update.text, update.ids) == ("there was a fox", tuple(ids))
        scheduler.send_tokens(request.rid, [], first=len(ids), done=ended(request.rid, len(ids)))
        await read_all(handle)

    play(story)


def test_the_eos_is_an_id_of_the_answer_and_no_text(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        eos = manager.model.eos_ids[0]
        for skip in (True, False):
            handle, request = await begin(manager, scheduler, ask(manager, skip_special_tokens=skip))
            assert request.sampling.stop_ids.tolist() == sorted(manager.model.eos_ids)
            (word,) = await manager.text.tokenize("a")
            scheduler.send_tokens(request.rid, [word, eos], done=ended(request.rid, 2, "stop", matched=eos))
            (update,) = await handle.collect()
            assert (update.text, update.ids, update.completion_tokens) == ("a", (word, eos), 2)
            assert update.finish is not None
            assert (update.finish.kind, update.finish.matched) == ("stop", eos)

    play(story)


def test_a_stop_string_ends_the_choice_here_and_aborts_it_there(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        ids = [await manager.text.tokenize(word) for word in ("a", "b", "c", "d")]
        flat = [i for word in ids for i in word]
        logprobs = LogprobRequest(output=True)
        request = replace(ask(manager, stop="bc", max_new_tokens=50), logprobs=logprobs)
        handle, message = await begin(manager, scheduler, request)
        empty = np.zeros(0, np.float32)
        rows = TokenLogprobs(message.rid, 0, False, 0, np.zeros(4, np.float32), int32_array(), empty, empty)
        scheduler.send_tokens(message.rid, flat, logprobs=[rows], cached=3)
        (update,) = await read_all(handle)
        assert (update.text, update.ids, update.completion_tokens) == ("a", tuple(flat[:3]), 3)
        assert len(update.output_logprobs) == 3
        assert update.finish is not None
        assert (update.finish.kind, update.finish.matched) == ("stop", "bc")
        assert update.cached_tokens == 3  # though the engine never came to say how the choice ended
        assert await scheduler.expect(Abort) == Abort(message.rid, 0)
        scheduler.send_tokens(message.rid, flat[:1], first=4, done=ended(message.rid, 5, "abort"))

    play(story)


def test_choices_of_one_request_end_on_their_own(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        (a,), (b,) = await manager.text.tokenize("a"), await manager.text.tokenize("b")
        handle, request = await begin(manager, scheduler, ask(manager, n=3, stop="b", sampling_seed=9))
        assert request.choices.tolist() == [0, 1, 2]
        scheduler.send_ranges(
            [(request.rid, 0, 0, [a]), (request.rid, 1, 0, [b]), (request.rid, 2, 0, [a])],
            [ended(request.rid, 1, choice=2)],
        )
        assert await scheduler.expect(Abort) == Abort(request.rid, 1)
        scheduler.send_tokens(request.rid, [a], first=1, done=ended(request.rid, 2))
        updates = await handle.collect()
        assert [u.index for u in updates] == [0, 1, 2]
        assert [u.text for u in updates] == ["aa", "", "a"]
        assert [u.seed for u in updates] == [choice_seed(9, i) for i in range(3)]
        assert [u.finish.kind for u in updates if u.finish] == ["length", "stop", "length"]

    play(story)


def test_a_gap_is_asked_for_and_batches_are_acknowledged(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        ids = await manager.text.tokenize("there was a fox")
        handle, request = await begin(manager, scheduler, ask(manager))
        scheduler.send_tokens(request.rid, ids[2:], first=2, done=ended(request.rid, len(ids)))
        assert await scheduler.expect(AskRange) == AskRange(request.rid, 0, 0)
        scheduler.send_tokens(request.rid, ids, done=ended(request.rid, len(ids)))
        assert whole(await read_all(handle)) == ("there was a fox", tuple(ids))
        await until(lambda: scheduler.acknowledged == 1)

    play(story)


def test_logprobs_of_prompt_and_output_reach_the_reader(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        params = manager.sampling_params({})
        asked = LogprobRequest(output=True, prompt_start=0, top=1, ids=(7,))
        request = GenerateInput(params=params, input_ids=[5, 6], logprobs=asked)
        handle, message = await begin(manager, scheduler, request)
        assert (message.logprobs.output, message.logprobs.prompt_start, message.logprobs.top) == (True, 0, 1)
        assert message.logprobs.ids.tolist() == [7]

        def rows(is_prompt: bool, values: list[float]) -> TokenLogprobs:
            array = np.asarray(values, np.float32)
            return TokenLogprobs(message.rid, 0, is_prompt, 0, array, int32_array([3] * len(values)), array, array)

        both = [rows(True, [math.nan, -2.0]), rows(False, [-1.0])]
        scheduler.send_tokens(message.rid, [9], logprobs=both, done=ended(message.rid, 1))
        (update,) = await handle.collect()
        assert update.prompt_logprobs == (TokenLogprob(None, 5), TokenLogprob(-2.0, 6, ((-2.0, 3),), ((-2.0, 7),)))
        assert update.output_logprobs == (TokenLogprob(-1.0, 9, ((-1.0, 3),), ((-1.0, 7),)),)

    play(story)


def test_no_tokens_at_all_means_the_prompt_alone(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        params = manager.sampling_params({"max_new_tokens": 0})
        request = GenerateInput(params=params, input_ids=[5, 6], logprobs=LogprobRequest(output=True, prompt_start=0))
        handle, message = await begin(manager, scheduler, request)
        assert message.sampling.max_new_tokens == 1
        none = np.zeros(0, np.float32)
        rows = [
            TokenLogprobs(message.rid, 0, is_prompt, 0, np.asarray(values, np.float32), int32_array(), none, none)
            for is_prompt, values in ((True, [math.nan, -2.0]), (False, [-1.0]))
        ]
        scheduler.send_tokens(message.rid, [9], logprobs=rows, done=ended(message.rid, 1, "stop", matched=9))
        (update,) = await handle.collect()
        assert update.prompt_logprobs == (TokenLogprob(None, 5), TokenLogprob(-2.0, 6))
        assert (update.text, update.ids, update.output_logprobs, update.completion_tokens) == ("", (), (), 0)
        assert update.finish == Finish("length", length=0)

    play(story)


def test_a_form_is_refused_without_a_grammar_backend(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        manager.start_compiler()
        with pytest.raises(RequestError) as caught:
            await manager.submit(ask(manager, regex="a"))
        assert (caught.value.status, caught.value.parameter) == (400, "regex")
        assert "--grammar-backend none" in caught.value.message

    play(story, grammar_backend="none")


def test_the_compiler_that_is_started_ahead_ends_with_the_manager(play: Callable[..., None]) -> None:
    processes: list[psutil.Process] = []

    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        before = psutil.Process().children()
        manager.start_compiler()
        while not processes:
            processes[:] = [child for child in psutil.Process().children() if child not in before]
            await asyncio.sleep(0.01)

    play(story)
    assert all_gone(processes)


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_many_requests_at_once_all_get_their_own_tokens(
    play: Callable[..., None], runner: Callable[[Any], Any]
) -> None:
    """Both ends send and receive as fast as they can: a message that waits in the socket unnoticed would hang this."""
    num_requests, num_tokens = 100, 20

    async def answer(scheduler: FakeScheduler) -> None:
        requests = [await scheduler.expect(GenerateRequest) for _ in range(num_requests)]
        for step in range(num_tokens):
            is_last = step + 1 == num_tokens
            done = [ended(request.rid, num_tokens) for request in requests] if is_last else []
            ranges = [(r.rid, 0, step, [int(r.prompt_ids[0]) + step]) for r in requests]
            scheduler.send_ranges(ranges, done)
            await asyncio.sleep(0)

    async def one(manager: TokenizerManager, number: int) -> None:
        request = GenerateInput(params=manager.sampling_params({}), input_ids=[number])
        _, ids = whole(await read_all(await manager.submit(request)))
        assert ids == tuple(range(number, number + num_tokens))

    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        await asyncio.gather(answer(scheduler), *[one(manager, number) for number in range(num_requests)])

    play(story, runner)


# ---- Ends that are not the model's


def test_leaving_the_block_aborts_what_runs(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        handle, request = await begin(manager, scheduler, ask(manager))
        with handle:
            scheduler.send_tokens(request.rid, [5])
            await anext(handle)
        assert await scheduler.expect(Abort) == Abort(request.rid, -1)
        assert await read_all(handle) == []
        handle.abort()
        await nothing_left(manager)
        assert not scheduler.has_received()

    play(story)


def test_a_handle_that_nobody_has_any_more_aborts(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        _, request = await begin(manager, scheduler, ask(manager))
        del _
        gc.collect()
        assert await scheduler.expect(Abort) == Abort(request.rid, -1)

    play(story)


def test_a_cancelled_wait_loses_nothing(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        handle, request = await begin(manager, scheduler, ask(manager))
        waiting = asyncio.ensure_future(anext(handle))
        await asyncio.sleep(0)
        waiting.cancel()
        (word,) = await manager.text.tokenize("a")
        scheduler.send_tokens(request.rid, [word], done=ended(request.rid, 1))
        assert whole(await read_all(handle)) == ("a", (word,))

    play(story)


def test_an_abort_by_somebody_else_is_the_finish(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        handle, request = await begin(manager, scheduler, ask(manager))
        scheduler.send_tokens(request.rid, [], done=ended(request.rid, 0, "abort"))
        (update,) = await read_all(handle)
        assert update.finish is not None
        assert (update.finish.kind, bool(update.finish.message)) == ("abort", True)

    play(story)


def test_a_refusal_reaches_the_reader_with_its_status(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        handle, request = await begin(manager, scheduler, ask(manager))
        scheduler.send(Refused(request.rid, 429, "The queue is full.", retry_after_s=7))
        with pytest.raises(RequestError, match="queue is full") as caught:
            await handle.collect()
        assert (caught.value.status, caught.value.retry_after_s) == (429, 7)

    play(story)


def test_an_error_of_one_choice_ends_the_request_behind_what_it_said(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        (word,) = await manager.text.tokenize("a")
        handle, request = await begin(manager, scheduler, ask(manager, n=2))
        failure = ended(request.rid, 1, "error", status=500, message="No finite logits.")
        scheduler.send_tokens(request.rid, [word], done=failure)
        assert await scheduler.expect(Abort) == Abort(request.rid, -1)
        (update,) = await anext(handle)
        assert (update.text, update.finish) == ("a", None)
        with pytest.raises(RequestError, match="finite logits"):
            await anext(handle)
        assert await read_all(handle) == []

    play(story)


def test_when_the_engine_ends_every_pending_call_says_so(qwen3_checkpoint: Path) -> None:
    async def main() -> None:
        async with connected(qwen3_checkpoint) as (manager, scheduler):
            await scheduler.welcome()
            await manager.wait_ready()
            (word,) = await manager.text.tokenize("a")
            handle, request = await begin(manager, scheduler, ask(manager))
            collecting = asyncio.ensure_future((await manager.submit(ask(manager))).collect())
            flushing = asyncio.ensure_future(manager.flush_cache())
            await scheduler.expect(GenerateRequest)
            await scheduler.expect(FlushCache)
            scheduler.send_tokens(request.rid, [word])
            scheduler.close()
            await until(lambda: not manager.is_ready)
            assert not manager.is_dead  # another scheduler may come
            manager.engine_died("Worker 0 ended.")
            (update,) = await anext(handle)
            assert update.text == "a"
            for pending in (anext(handle), collecting, flushing, manager.submit(ask(manager)), manager.wait_ready()):
                with pytest.raises(EngineDied, match=r"Worker 0 ended\."):
                    await asyncio.wait_for(pending, PATIENCE_S)
            assert "Worker 0 ended" in await manager.wait_broken()
            assert manager.is_dead
            manager.engine_changed(EngineReplaced(2, by_request=True))  # too late
            with pytest.raises(EngineDied):
                await manager.submit(ask(manager))
            await nothing_left(manager)

    asyncio.run(main())


# ---- When the scheduler is replaced


@asynccontextmanager
async def replaced(manager: TokenizerManager, scheduler: FakeScheduler) -> AsyncIterator[FakeScheduler]:
    """The scheduler is gone; another one is there, and has not said a word yet."""
    scheduler.close()
    successor = scheduler.successor()
    try:
        manager.engine_changed(EngineReplaced(2, by_request=True))
        await until(lambda: not manager.is_ready)
        yield successor
    finally:
        await nothing_left(manager)
        successor.close()


def test_the_next_scheduler_is_asked_to_go_on_with_all_that_has_no_answer(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        ids = await manager.text.tokenize("there was a fox who could not sleep")
        handle, request = await begin(manager, scheduler, ask(manager, max_new_tokens=len(ids), sampling_seed=5))
        scheduler.send_tokens(request.rid, ids[:2])
        (first,) = await anext(handle)
        collecting = asyncio.ensure_future((await manager.submit(ask(manager, "Twice"))).collect())
        flushing = asyncio.ensure_future(manager.flush_cache())
        await scheduler.expect(GenerateRequest)
        flush = await scheduler.expect(FlushCache)
        async with replaced(manager, scheduler) as successor:
            assert not manager.is_ready
            held = await manager.submit(ask(manager, "Thrice"))  # it waits like the others
            given_up = await manager.submit(ask(manager, "Never"))
            given_up.abort()
            await successor.welcome()
            again, second, third = [await successor.expect(GenerateRequest) for _ in range(3)]
            assert [ids.tolist() for ids in again.output_ids] == [ids[:2]]
            assert (again.rid, again.seed, again.resumed) == (request.rid, 5, True)
            assert third.prompt_ids.tolist() == await manager.text.tokenize("Thrice")
            assert await successor.expect(FlushCache) == flush
            successor.send(ControlReply(flush.call, True, "", {}))
            successor.send_tokens(request.rid, ids[2:], first=2, done=ended(request.rid, len(ids)))
            for other in (second, third):
                successor.send_tokens(other.rid, ids, done=ended(other.rid, len(ids)))
            text, rest = whole([first, *await read_all(handle)])
            assert (text, list(rest)) == (" there was a fox who could not sleep"[-len(text) :], ids)
            assert [list(update.ids) for update in (*await collecting, *await held.collect())] == [ids, ids]
            assert (await flushing)[0]
            assert manager.is_ready
            assert not successor.has_received()

    play(story)


def test_calls_that_need_a_trainer_are_not_sent_again(play: Callable[..., None]) -> None:
    """The trainer has met the ranks that are gone: the next ones would wait in vain."""

    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        receive = ReceiveWeights("group", ["norm"], ["F32"], [[1]], False)
        failing: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(manager.ask_ranks(JoinUpdateGroup("group", "host", 1, 1, 2, ""))),
            asyncio.ensure_future(manager.update_weights(receive, "", aborts=False)),
        ]
        updating = asyncio.ensure_future(manager.update_weights(LoadWeights("new"), "", aborts=False))
        *_, update = [await scheduler.expect(UpdateWeights) for _ in range(3)]
        async with replaced(manager, scheduler) as successor:
            await successor.welcome()
            assert await successor.expect(UpdateWeights) == update
            for one in failing:
                with pytest.raises(RequestError, match="call /init_weights_update_group again") as told:
                    await one
                assert told.value.status == 503
            successor.send(ControlReply(update.call, True, "", {}))
            assert (await updating)[0]
            assert not successor.has_received()

    play(story)


def test_a_scheduler_that_ends_before_it_is_ready_is_replaced_like_any_other(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        handle, request = await begin(manager, scheduler, ask(manager))
        async with replaced(manager, scheduler) as second:
            await second.expect(FrontendHello)
            second.close()
            third = second.successor()
            manager.engine_changed(EngineReplaced(3, by_request=True))
            await third.welcome()
            again = await third.expect(GenerateRequest)
            third.send_tokens(again.rid, [5], done=ended(again.rid, 1))
            (update,) = await handle.collect()
            assert (again.rid, update.ids) == (request.rid, (5,))
            await nothing_left(manager)
            third.close()

    play(story)


def test_a_request_that_was_alone_when_engines_died_gets_an_error_and_others_their_answers(
    play: Callable[..., None],
) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        poison, first = await begin(manager, scheduler, ask(manager))
        other, second = await begin(manager, scheduler, ask(manager))
        for generation in (2, 3):
            scheduler.send(LastWord(np.array([first.rid]), int32_array([0]), is_alone=True))
            manager.engine_changed(EngineReplaced(generation, by_request=True))  # before these words have arrived
            scheduler.close()
            scheduler = scheduler.successor()
            await scheduler.welcome()
            if generation == 2:
                assert (await scheduler.expect(GenerateRequest)).rid == first.rid
            assert (await scheduler.expect(GenerateRequest)).rid == second.rid
        with pytest.raises(RequestError, match="died twice while it ran this request") as failed:
            await poison.collect()
        assert failed.value.status == 500
        scheduler.send_tokens(second.rid, [5], done=ended(second.rid, 1))
        assert [update.ids for update in await other.collect()] == [(5,)]
        await nothing_left(manager)
        scheduler.close()

    play(story)


def test_only_so_many_requests_wait_for_the_next_scheduler(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        handle, _ = await begin(manager, scheduler, ask(manager))
        async with replaced(manager, scheduler) as successor:
            held = await manager.submit(ask(manager))
            with pytest.raises(
                RequestError, match="being replaced, and 1 requests, the limit, already wait for it"
            ) as refused:
                await manager.submit(ask(manager))
            assert (refused.value.status, refused.value.retry_after_s) == (503, 1)
            await successor.welcome()
            for one in (handle, held):
                again = await successor.expect(GenerateRequest)
                successor.send_tokens(again.rid, [5], done=ended(again.rid, 1))
                assert [update.ids for update in await one.collect()] == [(5,)]

    play(story, max_queued_requests=1)


def test_who_has_left_or_was_refused_takes_no_place_of_those_who_wait_for_the_next_scheduler(
    play: Callable[..., None],
) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        handle, _ = await begin(manager, scheduler, ask(manager))
        async with replaced(manager, scheduler) as successor:
            for _ in range(3):
                with pytest.raises(RequestError, match="max_new_tokens"):
                    await manager.submit(ask(manager, max_new_tokens=600))  # more than the engine can hold
                (await manager.submit(ask(manager))).abort()
            held = await manager.submit(ask(manager))
            await successor.welcome()
            for one in (handle, held):
                again = await successor.expect(GenerateRequest)
                successor.send_tokens(again.rid, [5], done=ended(again.rid, 1))
                await one.collect()

    play(story, max_queued_requests=1)


def test_who_comes_before_it_is_known_that_the_engine_is_replaced_waits_as_a_new_request(
    play: Callable[..., None],
) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        scheduler.close()
        await until(lambda: not manager.is_ready)
        held = await manager.submit(ask(manager))
        with pytest.raises(RequestError, match="1 requests, the limit, already wait for it"):
            await manager.submit(ask(manager))
        successor = scheduler.successor()
        manager.engine_changed(EngineReplaced(2, by_request=True))
        with pytest.raises(RequestError, match="1 requests, the limit, already wait for it"):
            await manager.submit(ask(manager))
        await successor.welcome()
        request = await successor.expect(GenerateRequest)
        assert not request.resumed
        successor.send_tokens(request.rid, [5], done=ended(request.rid, 1))
        await held.collect()
        await nothing_left(manager)
        successor.close()

    play(story, max_queued_requests=1)


def test_questions_are_refused_while_the_engine_is_replaced_and_held_requests_come_as_new_ones(
    play: Callable[..., None],
) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        handle, _ = await begin(manager, scheduler, ask(manager))
        async with replaced(manager, scheduler) as successor:
            held = await manager.submit(ask(manager))
            for asking in (manager.get_state(), manager.abort_label("x"), manager.pause("abort")):
                with pytest.raises(RequestError, match="The engine is being replaced") as refused:
                    await asking
                assert refused.value.status == 503
            await successor.welcome()
            for one, resumed in ((handle, True), (held, False)):
                again = await successor.expect(GenerateRequest)
                assert again.resumed == resumed
                successor.send_tokens(again.rid, [5], done=ended(again.rid, 1))
                await one.collect()

    play(story, max_queued_requests=1)


@pytest.mark.parametrize("is_asked_here", [True, False])
def test_what_somebody_was_told_is_aborted_does_not_come_to_life_again(
    play: Callable[..., None], is_asked_here: bool
) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        aborted, request = await begin(manager, scheduler, replace(ask(manager), rid="mine_0"))
        other, second = await begin(manager, scheduler, replace(ask(manager), rid="other"))
        if is_asked_here:
            asking = asyncio.ensure_future(manager.abort_label("mine"))
            asked = await scheduler.expect(AbortLabel)
            later, third = await begin(manager, scheduler, replace(ask(manager), rid="mine_1"))  # not meant by it
            scheduler.send(ControlReply(asked.call, True, "", {"num_aborted": 1}))
            assert await asking == 1
        else:
            scheduler.send(AbortLabel(99, "mine"))
            assert await scheduler.expect(Abort) == Abort(request.rid, -1)
        scheduler.send_tokens(request.rid, [5])  # its end does not come any more
        async with replaced(manager, scheduler) as successor:
            await successor.welcome()
            assert (await successor.expect(GenerateRequest)).rid == second.rid
            (update,) = await aborted.collect()
            assert update.finish is not None
            assert (update.ids, update.finish.kind) == ((5,), "abort")
            if is_asked_here:
                assert (await successor.expect(GenerateRequest)).rid == third.rid
                later.abort()
                await successor.expect(Abort)
            assert not successor.has_received()
            other.abort()

    play(story)


def test_bytes_that_are_no_message_end_the_link(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        handle, _ = await begin(manager, scheduler, ask(manager))
        scheduler.send_raw(b"nonsense")
        with pytest.raises(EngineDied):
            await handle.collect()

    play(story)


def test_another_protocol_is_told_from_a_dead_engine(qwen3_checkpoint: Path) -> None:
    async def main() -> None:
        async with connected(qwen3_checkpoint) as (manager, scheduler):
            await scheduler.expect(FrontendHello)
            scheduler.send(Rejected("another protocol"))
            with pytest.raises(EngineDied, match="another protocol"):
                await asyncio.wait_for(manager.wait_ready(), PATIENCE_S)

    asyncio.run(main())


def test_a_message_that_was_dropped_leaves_no_request_hanging(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        running, first = await begin(manager, scheduler, ask(manager))
        scheduler.send_tokens(first.rid, [5])
        await anext(running)
        lost, second = await begin(manager, scheduler, ask(manager))
        scheduler.send(Rejected("broken"))
        with pytest.raises(RequestError, match="broken"):
            await lost.collect()
        assert await scheduler.expect(Abort) == Abort(second.rid, -1)
        scheduler.send_tokens(first.rid, [6], first=1, done=ended(first.rid, 2))
        assert (await read_all(running))[-1].finish is not None

    play(story)


def test_closing_aborts_what_runs(qwen3_checkpoint: Path) -> None:
    async def main() -> None:
        async with connected(qwen3_checkpoint) as (manager, scheduler):
            await scheduler.welcome()
            await manager.wait_ready()
            handle, request = await begin(manager, scheduler, ask(manager))
            await manager.close()
            assert await scheduler.expect(Abort) == Abort(request.rid, -1)
            with pytest.raises(EngineDied):
                await handle.collect()

    asyncio.run(main())


# ---- What is refused before anything is sent

WRONG: dict[str, tuple[Callable[[GenerateInput], GenerateInput], str, str]] = {
    "both": (lambda r: replace(r, input_ids=[5]), "text", "exactly one"),
    "neither": (lambda r: replace(r, text=None), "text", "exactly one"),
    "empty text": (lambda r: replace(r, text=""), "text", "no tokens"),
    "empty ids": (lambda r: replace(r, text=None, input_ids=[]), "input_ids", "no tokens"),
    "half a surrogate pair": (lambda r: replace(r, text="a\ud800"), "text", "surrogate"),
    "no text": (lambda r: replace(r, text=5), "text", "must be a string"),  # type: ignore[arg-type]
    "no ids": (lambda r: replace(r, text=None, input_ids=["x"]), "input_ids", "list of integers"),  # type: ignore[list-item]
    "boolean ids": (lambda r: replace(r, text=None, input_ids=[True]), "input_ids", "list of integers"),
    "id too large": (lambda r: replace(r, text=None, input_ids=[512]), "input_ids", "id 512, .* vocabulary of 512"),
    "id negative": (lambda r: replace(r, text=None, input_ids=[-1]), "input_ids", "id -1, .* vocabulary of 512"),
    "id huge": (lambda r: replace(r, text=None, input_ids=[10**5000]), "input_ids", "bits"),
    "too long": (lambda r: replace(r, text=None, input_ids=[5] * 512), "input_ids", "512 tokens.* holds 512"),
    "rid empty": (lambda r: replace(r, rid=""), "rid", "empty"),
    "rid long": (lambda r: replace(r, rid="x" * 257), "rid", "at most 256"),
    "rid broken": (lambda r: replace(r, rid="\udfff"), "rid", "surrogate"),
    "salt broken": (lambda r: replace(r, cache_salt="\udfff"), "cache_salt", "surrogate"),
    "priority": (lambda r: replace(r, priority=10**6 + 1), "priority", "from -1000000 to 1000000"),
    "top": (lambda r: replace(r, logprobs=LogprobRequest(top=129)), "top_logprobs_num", "0 to 128"),
    "logprob ids": (lambda r: replace(r, logprobs=LogprobRequest(ids=(512,))), "token_ids_logprob", "vocabulary"),
    "many ids": (lambda r: replace(r, logprobs=LogprobRequest(ids=(1,) * 129)), "token_ids_logprob", "at most 128"),
    "prompt start": (lambda r: replace(r, logprobs=LogprobRequest(prompt_start=-2)), "logprob_start_len", "-1"),
    "start too far": (
        lambda r: replace(r, logprobs=LogprobRequest(prompt_start=99)),
        "logprob_start_len",
        "has only 7 tokens",
    ),
    "no boolean": (lambda r: replace(r, logprobs=LogprobRequest(output=1)), "return_logprob", "true"),  # type: ignore[arg-type]
    "stop id": (lambda r: replace(r, params=SamplingParams(stop_token_ids=(512,))), "stop_token_ids", "512"),
    "bias id": (lambda r: replace(r, params=SamplingParams(logit_bias=((512, 1.0),))), "logit_bias", "512"),
    "word of many tokens": (lambda r: replace(r, params=SamplingParams(bad_words=("hello",))), "bad_words", "3 tokens"),
    "cut to nothing": (lambda r: replace(r, truncate_prompt_tokens=0), "truncate_prompt_tokens", "at least 1"),
    "wish": (lambda r: replace(r, params=SamplingParams(max_new_tokens=512)), "max_new_tokens", "is 512, .* fit"),
    "minimum": (
        lambda r: replace(r, params=SamplingParams(min_new_tokens=512, max_new_tokens=None)),
        "min_new_tokens",
        "is 512, .* fit",
    ),
}


def test_a_request_that_cannot_be_served_is_refused_by_its_parameters_name(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        for case, (spoil, parameter, text) in WRONG.items():
            with pytest.raises(RequestError, match=text) as caught:
                await manager.submit(spoil(ask(manager)))
            assert (caught.value.status, caught.value.parameter) == (400, parameter), case
            assert parameter in caught.value.message, case
        handle, request = await begin(manager, scheduler, ask(manager))
        assert (request.rid, scheduler.has_received()) == (0, False)
        handle.abort()

    play(story)


def test_a_default_limit_is_shortened_to_what_fits_and_no_limit_is_all_that_fits(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        for default in (128, None):
            params = manager.sampling_params({}, default)
            handle, request = await begin(manager, scheduler, GenerateInput(params=params, input_ids=[5] * 500))
            assert request.sampling.max_new_tokens == 12
            handle.abort()
            await scheduler.expect(Abort)

    play(story)


@pytest.mark.parametrize(
    ("params", "num_kept"),
    [({"max_new_tokens": 12}, 500), ({}, 384), ({"max_new_tokens": 0}, 511), ({"min_new_tokens": 200}, 312)],
)
def test_a_prompt_is_cut_to_what_leaves_room_for_the_output(
    play: Callable[..., None], params: dict[str, Any], num_kept: int
) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        given = replace(ask(manager, **params), text=None, input_ids=list(range(512)) * 2, truncate_prompt_tokens=-1)
        handle, request = await begin(manager, scheduler, given)
        assert request.prompt_ids.tolist() == list(range(512))[-num_kept:]
        assert (await manager.tokenized(given)).input_ids == request.prompt_ids.tolist()
        handle.abort()
        with pytest.raises(RequestError, match=r"^max_new_tokens is 512, but with a prompt of 1 tokens only 511 fit"):
            await manager.submit(replace(given, params=SamplingParams(max_new_tokens=512)))

    play(story)


def test_a_name_that_runs_is_taken_until_its_request_ends(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        named = replace(ask(manager), rid="mine")
        handle, _ = await begin(manager, scheduler, named)
        assert handle.rid == "mine"
        with pytest.raises(RequestError, match="mine") as caught:
            await manager.submit(named)
        assert caught.value.parameter == "rid"
        handle.abort()
        await scheduler.expect(Abort)
        again, _ = await begin(manager, scheduler, named)
        again.abort()

    play(story)


def test_a_name_is_taken_while_its_text_is_tokenized(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        long = GenerateInput(params=SamplingParams(), text="a b" * LONG_TEXT_CHARS, rid="mine")
        results = await asyncio.gather(manager.submit(long), manager.submit(long), return_exceptions=True)
        assert [one.parameter for one in results if isinstance(one, RequestError)] == ["text", "rid"]

    play(story)


def test_an_abort_reaches_a_request_whose_text_is_still_tokenized(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_encode = threading.Event()

    def encode(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        assert may_encode.wait(PATIENCE_S)
        return [5, 6]

    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        monkeypatch.setattr(Tokenizer, "encode", encode)
        for label in ("mine", ""):
            may_encode.clear()
            text = "a" * (LONG_TEXT_CHARS + 1)
            long = GenerateInput(params=SamplingParams(n=2, max_new_tokens=1), text=text, rid="mine")
            submitting = asyncio.ensure_future(manager.submit(long))
            await until(lambda: manager.stats()["live_labels"] == 1)
            aborting = asyncio.ensure_future(manager.abort_label(label))
            call = await scheduler.expect(AbortLabel)
            scheduler.send(ControlReply(call.call, True, "", {"num_aborted": 0}))
            assert await aborting == 1
            may_encode.set()
            updates = await (await submitting).collect()
            assert [update.finish.kind for update in updates if update.finish] == ["abort", "abort"]
            assert not scheduler.has_received()
            await nothing_left(manager)

    play(story)


def test_an_abort_reaches_prompts_of_a_batch_that_wait_for_others_to_be_tokenized(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_encode = threading.Event()

    def encode(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        assert len(text) < LONG_TEXT_CHARS or may_encode.wait(PATIENCE_S)
        return [5, 6]

    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        monkeypatch.setattr(Tokenizer, "encode", encode)
        texts = ["short", "a" * (LONG_TEXT_CHARS + 1), "short", "short", "short"]
        batch = [GenerateInput(params=SamplingParams(), text=text, rid=f"b_{i}") for i, text in enumerate(texts)]
        submitting = asyncio.ensure_future(manager.submit_all(batch))
        sent = await scheduler.expect(GenerateRequest)
        aborting = asyncio.ensure_future(manager.abort_label("b"))
        call = await scheduler.expect(AbortLabel)
        scheduler.send_tokens(sent.rid, [], done=ended(sent.rid, 0, "abort"))
        scheduler.send(ControlReply(call.call, True, "", {"num_aborted": 1}))
        assert await aborting == 5
        may_encode.set()
        for handle in await submitting:
            (update,) = await handle.collect()
            assert update.finish is not None
            assert update.finish.kind == "abort"
        assert not scheduler.has_received()

    play(story)


def test_a_batch_of_which_one_is_refused_leaves_nothing_and_its_names_are_free(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        batch = [replace(ask(manager), rid=f"b_{i}") for i in range(4)]
        for wrong in (replace(batch[2], text="word " * 100_000), replace(batch[2], rid="b_0")):
            with pytest.raises(RequestError):
                await manager.submit_all([*batch[:2], wrong, batch[3]])
            await nothing_left(manager)
        handles = await manager.submit_all(batch)
        assert [handle.rid for handle in handles] == ["b_0", "b_1", "b_2", "b_3"]
        for handle in handles:
            handle.abort()

    play(story)


def test_others_on_the_loop_go_on_while_a_large_batch_is_submitted(play: Callable[..., None]) -> None:
    """Short prompts are tokenized on the loop: a batch of thousands must not keep it to itself."""

    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        seen = set[Any]()

        async def look() -> None:
            while True:
                seen.add(manager.stats()["live_labels"])
                await asyncio.sleep(0)

        looking = asyncio.ensure_future(look())
        for handle in await manager.submit_all([ask(manager) for _ in range(20)]):
            handle.abort()
        looking.cancel()
        assert len(seen) > 10

    play(story)


def test_an_abort_that_another_frontend_was_told_ends_what_is_tokenized_and_what_crossed_it_on_the_wire(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_encode = threading.Event()

    def encode(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        assert may_encode.wait(PATIENCE_S)
        return [5, 6]

    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        sent, request = await begin(manager, scheduler, replace(ask(manager), rid="mine_0"))
        other, _ = await begin(manager, scheduler, replace(ask(manager), rid="other"))
        monkeypatch.setattr(Tokenizer, "encode", encode)
        long = GenerateInput(params=SamplingParams(), text="a" * (LONG_TEXT_CHARS + 1), rid="mine_1")
        submitting = asyncio.ensure_future(manager.submit(long))
        await until(lambda: manager.stats()["live_labels"] == 1)
        scheduler.send(AbortLabel(99, "mine"))
        assert await scheduler.expect(Abort) == Abort(request.rid, -1)
        scheduler.send_tokens(request.rid, [], done=ended(request.rid, 0, "abort"))
        may_encode.set()
        for handle in (sent, await submitting):
            (update,) = await handle.collect()
            assert update.finish is not None
            assert update.finish.kind == "abort"
        other.abort()

    play(story)


def test_a_text_that_is_far_too_long_is_refused_by_its_beginning(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, add_special_tokens)

    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        monkeypatch.setattr(Tokenizer, "encode", counted)
        long = ask(manager, "word " * 100_000)
        with pytest.raises(RequestError, match=r"text has more than 8192 tokens, but the model's context holds 4096"):
            await manager.submit(long)
        assert len(encoded) == 1
        assert encoded[0] == 16 * 4096

    play(story)


def test_a_text_that_cannot_be_made_fails_its_request_alone(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    push = OutputText.push

    def push_but_13(self: OutputText, ids: Sequence[int]) -> TextDelta:
        assert 13 not in ids
        return push(self, ids)

    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        monkeypatch.setattr(OutputText, "push", push_but_13)
        broken, first = await begin(manager, scheduler, ask(manager))
        sound, second = await begin(manager, scheduler, ask(manager))
        scheduler.send_ranges([(first.rid, 0, 0, [13]), (second.rid, 0, 0, [5])])
        with pytest.raises(RequestError, match="could not be decoded"):
            await broken.collect()
        assert await scheduler.expect(Abort) == Abort(first.rid, -1)
        scheduler.send_tokens(second.rid, [6], first=1, done=ended(second.rid, 2))
        assert (await sound.collect())[0].ids == (5, 6)

    play(story)


def test_nothing_is_taken_before_the_scheduler_is_ready(qwen3_checkpoint: Path) -> None:
    async def main() -> None:
        async with connected(qwen3_checkpoint) as (manager, scheduler):
            hello = await scheduler.expect(FrontendHello)
            assert hello.frontend == 0
            assert not manager.is_ready
            with pytest.raises(RequestError) as caught:
                await manager.submit(ask(manager))
            assert caught.value.status == 503

    asyncio.run(main())


def test_a_long_text_leaves_the_loop_to_others(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        text = "once upon a time " * LONG_TEXT_CHARS
        tokenizing = asyncio.ensure_future(manager.text.tokenize(text))
        turns = 0
        while not tokenizing.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns > 1
        assert load_tokenizer(manager.model.folder).decode(tokenizing.result()) == text

    play(story)


# ---- Seeds, control, text


def test_seeds_are_drawn_anew_or_from_the_servers_seed() -> None:
    fixed, same, other = seed_source(7, 0), seed_source(7, 0), seed_source(7, 1)
    drawn = [fixed() for _ in range(50)]
    assert drawn == [same() for _ in range(50)]
    assert len({*drawn, *[other() for _ in range(50)], *[seed_source(None, 0)() for _ in range(50)]}) == 150
    assert all(0 <= seed < 1 << 64 for seed in drawn)


def test_calls_are_answered_by_number(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        flush = asyncio.ensure_future(manager.flush_cache())
        state = asyncio.ensure_future(manager.get_state(deep=True))
        abort = asyncio.ensure_future(manager.abort_label("x"))
        flush_call = (await scheduler.expect(FlushCache)).call
        state_call = await scheduler.expect(GetState)
        abort_call = await scheduler.expect(AbortLabel)
        assert (state_call.deep, abort_call.label) == (True, "x")
        scheduler.send(ControlReply(abort_call.call, True, "", {"num_aborted": 3}))
        scheduler.send(ControlReply(state_call.call, True, "well", {"num_running": 1}))
        scheduler.send(ControlReply(99, True, "nobody asked", {}))
        scheduler.send(ControlReply(flush_call, False, "requests run", {}))
        assert await flush == (False, "requests run")
        assert await state == (True, "well", {"num_running": 1})
        assert await abort == 3

    play(story)


def test_calls_that_no_client_makes_are_not_counted(play: Callable[..., None]) -> None:
    """The page's own question comes each second: who looks whether a server is at rest must not find it."""

    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        calls = [asyncio.ensure_future(manager.get_state(is_own=is_own)) for is_own in (True, False)]
        asked = [(await scheduler.expect(GetState)).call for _ in calls]
        assert manager.stats()["live_calls"] == 1
        scheduler.send(ControlReply(asked[1], True, "", {}))
        await calls[1]
        assert manager.stats()["live_calls"] == 0
        scheduler.send(ControlReply(asked[0], True, "", {}))
        await calls[0]
        assert manager.stats()["live_calls"] == 0

    play(story)


def test_the_last_load_is_known(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        load = Load(num_running=1, num_waiting=2, num_free_pages=3, num_steps=4)
        scheduler.send(load)
        await until(lambda: manager.load == load)

    play(story)


def test_the_models_facts_come_from_its_files(checkpoint: CheckpointFactory) -> None:
    folder = checkpoint("qwen3", generation_config={"do_sample": True, "temperature": 0.6, "top_k": 20})

    async def main() -> None:
        async with connected(folder, sampling_defaults="model", context_length=100) as (manager, _):
            assert (manager.model.context_length, manager.model.vocab_size) == (100, 512)
            assert manager.model.architectures == ("Qwen3ForCausalLM",)
            assert manager.model.has_chat_template
            params = manager.sampling_params({"top_k": 3})
            assert (params.temperature, params.top_k) == (0.6, 3)
        async with connected(folder, sampling_defaults="openai") as (manager, _):
            assert manager.sampling_params({}).temperature == 1.0

    asyncio.run(main())


def test_a_conversation_becomes_a_prompt(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        text = manager.text.apply_chat_template([{"role": "user", "content": "Hello"}])
        assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        with pytest.raises(RequestError) as caught:
            manager.text.apply_chat_template([{"content": "no role"}])
        assert (caught.value.status, caught.value.parameter) == (400, "messages")

    play(story)


def test_more_tokens_than_the_context_holds_are_not_decoded(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        most = manager.model.context_length
        assert manager.text.detokenize([5] * most)
        with pytest.raises(RequestError, match=f"^tokens has {most + 1} tokens, but the model's context holds {most}"):
            manager.text.detokenize([5] * (most + 1))

    play(story)


def test_one_token_has_text_and_bytes(play: Callable[..., None]) -> None:
    async def story(manager: TokenizerManager, scheduler: FakeScheduler) -> None:
        (word,) = await manager.text.tokenize("a")
        assert (manager.text.token_text(word), manager.text.token_bytes(word)) == ("a", b"a")
        ids = await manager.text.tokenize("你")
        assert b"".join(map(manager.text.token_bytes, ids)) == "你".encode()

    play(story)
