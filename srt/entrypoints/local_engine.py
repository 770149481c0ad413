"""The engine inside a Python program: its processes, and a frontend on an event loop in a thread of this process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections import deque
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from srt.entrypoints.adapters import LoadAdapterBody, UnloadAdapterBody, load, unload
from srt.entrypoints.answers import Generated, RenamedWeights, Succeeded, UpdatedWeights, WeightHashes
from srt.entrypoints.embeddings.answer_types import Encoded, Ranked, Scores
from srt.entrypoints.embeddings.bodies import DimensionsBody, EncodeBody, RerankBody, ScoreBody
from srt.entrypoints.embeddings.embedding_routes import encoded, encoded_answer
from srt.entrypoints.embeddings.rerank import ranked
from srt.entrypoints.embeddings.score import scores_of
from srt.entrypoints.embeddings.served_routes import CLASSIFY, ENCODE, GENERATE, RERANK, SCORE, check_served
from srt.entrypoints.embeddings.vectors import embedding, pooling_of
from srt.entrypoints.engine_process import EngineProcess
from srt.entrypoints.memory_loan import ReleaseBody, ResumeBody, release, resume
from srt.entrypoints.native import model_facts, server_facts
from srt.entrypoints.native_shapes import NativeAnswer, NativeCall, parse_generate
from srt.entrypoints.request_schema import renamed
from srt.entrypoints.service import Service
from srt.entrypoints.streaming import Pacer, run_all
from srt.entrypoints.weight_groups import DestroyGroupBody, InitGroupBody, ReceiveBody, join, leave, receive
from srt.entrypoints.weight_saving import SaveBody, save
from srt.entrypoints.weights import (
    NamedBody,
    RenameBody,
    UpdateFromDiskBody,
    checksums,
    named_weight,
    rename,
    update_from_disk,
    update_from_tensors,
)
from srt.managers.tokenizer_manager import request_watch
from srt.managers.tokenizer_manager.api_types import ChoiceUpdate, EngineDied, RequestError
from srt.managers.tokenizer_manager.tokenizer_manager import RequestHandle, TokenizerManager
from srt.protocol.messages import EngineLost, EngineReplaced, EngineStarted, Failed, ServerReady
from srt.server_args import ServerArgs
from srt.utils.errors import StartError
from srt.utils.logs import show_lines_of

Result = TypeVar("Result")
Answer = Generated
REASON_S = 5.0  # for the supervisor to say why the engine has ended
LAST_CALLS_S = 1.0  # for pending calls to learn that the engine has ended


class LocalEngine:
    """Owner of the engine's processes and of the frontend's thread, for a Runtime.

    The coroutines below run on that thread's event loop; `run` and `run_async` wait for them from other threads and loops.
    """

    def __init__(self, process: EngineProcess, args: ServerArgs) -> None:
        self.process = process
        self.started = EngineStarted("", [], "", 0, None)
        self._args = args
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="srt-runtime", daemon=True)
        self._service = Service(args)
        self._manager: TokenizerManager | None = None
        # By replica: the last that came before the engine was connected.
        self._engine_news: dict[int, EngineReplaced | EngineLost] = {}
        self._death: str | None = None  # why the engine is gone; None while it lives
        self._dead = asyncio.Event()

    def start(self, timeout_s: float | None = None) -> None:
        """Wait until the engine accepts requests; raise StartError with the reason if it never will, or not within `timeout_s`."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        too_late = StartError(f"The engine did not start within launch_timeout ({timeout_s} s).")
        started = self.process.wait_started(timeout_s)
        if started is None:
            raise too_late
        self.started = started
        self._service = Service(self._args, self.started.frontend, Path(self.started.run_dir))
        show_lines_of(request_watch.__name__, f"frontend {self.started.frontend}", self._args.log_format)
        self._thread.start()
        try:
            self.run(asyncio.wait_for(self._connect(), None if deadline_s is None else deadline_s - time.monotonic()))
        except TimeoutError:
            raise too_late from None

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Wait for `work` in this thread. An exception that ends the wait early, such as KeyboardInterrupt, cancels `work`."""
        future = self._submit(work)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise EngineDied(self._death or "The call was cancelled.") from None
        except BaseException:
            future.cancel()
            raise

    async def run_async(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Wait for `work` in a coroutine of another loop. Cancelling the wait cancels `work`, and the reverse."""
        return await asyncio.wrap_future(self._submit(work))

    def close_stream(self, chunks: Chunks) -> None:
        if not self.process.is_ours:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed, and all requests have ended
            self._loop.call_soon_threadsafe(chunks.close)

    def shutdown(self) -> None:
        """End everything, and block until the processes are gone. Does nothing in a fork, which shares the loop's descriptors."""
        if not self.process.is_ours:
            return
        if self._thread is threading.current_thread():  # a callback of the loop dropped the last reference
            self.process.stop()
            self._loop.stop()
            return
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._disconnect(), self._loop).result()
        self.process.stop()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    def _submit(self, work: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        reason = (
            self._death
            if self.process.is_ours
            else "A Runtime can be used only in the process that created it, not in a fork."
        )
        if reason is not None:
            work.close()
            raise EngineDied(reason)
        return asyncio.run_coroutine_threadsafe(self._explained(work), self._loop)

    async def _explained(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await `work`, and translate its errors for the caller.

        After EngineDied, wait for the supervisor's reason: the link to the scheduler breaks first, but only the supervisor knows why.
        In refusals, rename /generate's `text` to `prompt`, its name in the Python API.
        """
        try:
            return await work
        except EngineDied as error:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._dead.wait(), REASON_S)
            raise EngineDied(self._death or error.message) from None
        except RequestError as error:
            raise renamed(error, {"text": "prompt"}) from None

    # ---- Calls, on the loop

    async def answer(self, body: dict[str, Any]) -> Any:
        """Return the whole answer to a /generate body."""
        engine = self._service.engine()
        check_served(GENERATE, engine.model)
        call = parse_generate(body, engine.sampling_params)
        answer = self._new_answer(call)

        async def collect(prompt: int, handle: RequestHandle) -> None:
            for update in await handle.collect():
                answer.add(prompt, update)

        await run_all(engine, call.inputs, collect)
        return answer.result()

    async def encode(self, body: dict[str, Any]) -> Encoded | list[Encoded]:
        """Return the answer to an /encode body."""
        parsed = DimensionsBody.parse(body)
        return await self._encoded(ENCODE, parsed, parsed.dimensions)

    async def classify(self, body: dict[str, Any]) -> Encoded | list[Encoded]:
        """Return the answer to a /classify body."""
        return await self._encoded(CLASSIFY, EncodeBody.parse(body), None)

    async def _encoded(self, path: str, body: EncodeBody, dimensions: int | None) -> Encoded | list[Encoded]:
        engine = self._service.engine()
        check_served(path, engine.model)
        vectors, is_batch = await encoded(engine, body, dimensions)
        pooling = pooling_of(engine)
        answers = [encoded_answer(engine, one, embedding(one, pooling, dimensions).tolist()) for one in vectors]
        return answers if is_batch else answers[0]

    async def rerank(self, body: dict[str, Any]) -> list[Ranked]:
        """Return the answer to a /v1/rerank body."""
        engine = self._service.engine()
        check_served(RERANK, engine.model)
        return await ranked(engine, RerankBody.parse(body))

    async def score(self, body: dict[str, Any]) -> Scores:
        """Return the answer to a /v1/score body."""
        engine = self._service.engine()
        check_served(SCORE, engine.model)
        return await scores_of(engine, ScoreBody.parse(body), self._args.model_names()[0])

    async def open_stream(self, body: dict[str, Any]) -> Chunks:
        """Send the requests of a streamed call. If one is refused, raise RequestError and run none."""
        engine = self._service.engine()
        check_served(GENERATE, engine.model)
        call = parse_generate({**body, "stream": True}, engine.sampling_params)
        answer = self._new_answer(call, incremental=self._args.incremental_streaming_output)
        return Chunks(await engine.submit_all(call.inputs), answer, Pacer(self._args.stream_interval))

    def _new_answer(self, call: NativeCall, *, incremental: bool = False) -> NativeAnswer:
        engine = self._service.engine()
        return NativeAnswer(
            call,
            engine.text.token_text,
            incremental=incremental,
            num_drafts=self._args.num_drafts,
            is_deterministic=self._args.enable_deterministic_inference,
            weight_version=lambda: engine.limits.weight_version,
        )

    async def flush_cache(self) -> bool:
        done, _ = await self._service.engine().flush_cache()
        return done

    async def abort(self, label: str) -> int:
        return await self._service.engine().abort_label(label)

    async def load_adapter(self, name: str, folder: str, pinned: bool) -> dict[str, str]:
        body = LoadAdapterBody.parse({"lora_name": name, "lora_path": folder, "pinned": pinned})
        return (await load(body, self._service))["loaded_adapters"]

    async def unload_adapter(self, name: str) -> dict[str, str]:
        return unload(UnloadAdapterBody.parse({"lora_name": name}), self._service)["loaded_adapters"]

    async def update_weights(self, body: dict[str, Any]) -> UpdatedWeights:
        return await update_from_disk(UpdateFromDiskBody.parse(body), self._service)

    async def update_tensors(self, file: bytes, version: str, aborts: bool) -> UpdatedWeights:
        return await update_from_tensors(file, version, self._service, aborts=aborts)

    async def join_update_group(self, body: dict[str, Any]) -> None:
        await join(InitGroupBody.parse(body), self._service)

    async def receive_weights(self, body: dict[str, Any]) -> UpdatedWeights:
        return await receive(ReceiveBody.parse(body), self._service)

    async def leave_update_group(self, body: dict[str, Any]) -> None:
        await leave(DestroyGroupBody.parse(body), self._service)

    async def release_memory(self, body: dict[str, Any]) -> None:
        await release(ReleaseBody.parse(body), self._service)

    async def resume_memory(self, body: dict[str, Any]) -> None:
        await resume(ResumeBody.parse(body), self._service)

    async def save_weights(self, body: dict[str, Any]) -> Succeeded:
        return await save(SaveBody.parse(body), self._service)

    async def weight_hashes(self) -> WeightHashes:
        return await checksums(self._service)

    async def named_weight(self, body: dict[str, Any]) -> list[Any]:
        return await named_weight(NamedBody.parse(body), self._service)

    async def rename_weights(self, body: dict[str, Any]) -> RenamedWeights:
        return await rename(RenameBody.parse(body), self._service)

    async def server_info(self) -> dict[str, Any]:
        return await server_facts(self._service)

    async def model_info(self) -> dict[str, Any]:
        return model_facts(self._service)

    async def start_profile(self, output_dir: str | None, num_steps: int | None) -> str:
        return str(self._service.profiler.start(output_dir, num_steps))

    async def stop_profile(self) -> dict[str, Any]:
        return await self._service.profiler.stop()

    async def freeze_gc(self) -> None:
        self._service.control.freeze_gc()

    # ---- The link's beginning and end, on the loop

    async def _connect(self) -> None:
        """Load the tokenizer while the workers load their weights, then wait for them."""
        ready: asyncio.Future[float] = self._loop.create_future()
        self._loop.add_reader(self.process.fileno(), self._hear_supervisor, ready)
        connecting = asyncio.create_task(self._make_manager())
        try:
            await asyncio.wait((ready, connecting), return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:  # the launch timeout has passed
            connecting.cancel()
            raise
        # Either both are done, or one has failed: its error is raised here.
        startup_s = ready.result() if ready.done() else 0.0
        manager = await connecting
        await manager.wait_ready()
        self._service.begin(manager, startup_s)
        manager.start_compiler()

    async def _make_manager(self) -> TokenizerManager:
        """Create the manager and store it at once, so that it is closed however the start ends: an unclosed socket would hang the
        program when the garbage collector finds its context."""
        self._manager = await TokenizerManager.connect(
            index=self.started.frontend,
            generations=self.started.engines,
            run_dir=self.started.run_dir,
            model_folder=self.started.model_folder,
            args=self._args,
        )
        for news in self._engine_news.values():
            self._manager.engine_changed(news)
        return self._manager

    def _hear_supervisor(self, ready: asyncio.Future[float]) -> None:
        while (message := self.process.receive()) is not None:
            match message:
                case ServerReady(startup_s) if not ready.done():
                    ready.set_result(startup_s)
                case EngineReplaced() | EngineLost():
                    if self._manager is not None:
                        self._manager.engine_changed(message)
                    else:
                        self._engine_news[message.replica] = message
                case Failed(reason):
                    self._loop.remove_reader(self.process.fileno())
                    if not ready.done():
                        ready.set_exception(StartError(reason))
                    self._died(reason)
                    return
                case _:
                    pass

    def _died(self, reason: str) -> None:
        self._death = self._death or reason
        self._dead.set()
        if self._manager is not None:
            self._manager.engine_died(self._death)

    async def _disconnect(self) -> None:
        self._loop.remove_reader(self.process.fileno())
        self._died("The Runtime was shut down.")
        if self._manager is not None:
            await self._manager.stop_compiler()
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        if pending:
            _, late = await asyncio.wait(pending, timeout=LAST_CALLS_S)
            for task in late:
                task.cancel()
        if self._manager is not None:
            await self._manager.close()


class Chunks:
    """The chunks of one streamed call, in order of arrival. Use it only on the engine's event loop."""

    def __init__(self, handles: list[RequestHandle], answer: NativeAnswer, pacer: Pacer) -> None:
        self._live = dict(enumerate(handles))
        self._answer = answer
        self._pacer = pacer
        self._rounds: dict[int, asyncio.Task[list[ChoiceUpdate] | None]] = {}
        self._due: deque[Answer] = deque()

    async def next(self) -> Answer | None:
        """Return the next chunk, or None at the end. After a cancelled wait, the next call returns it."""
        while not self._due and self._live:
            for prompt, handle in self._live.items():
                if prompt not in self._rounds:
                    self._rounds[prompt] = asyncio.create_task(_next_round(handle))
            await asyncio.wait(self._rounds.values(), return_when=asyncio.FIRST_COMPLETED)
            try:
                self._collect_finished_rounds()
            except BaseException:
                self.close()
                raise
        return self._due.popleft() if self._due else None

    def close(self) -> None:
        """Abort the requests that still run."""
        for task in self._rounds.values():
            task.cancel()
        for handle in self._live.values():
            handle.abort()
        self._rounds.clear()
        self._live.clear()

    def _collect_finished_rounds(self) -> None:
        for prompt in [prompt for prompt, task in self._rounds.items() if task.done()]:
            updates = self._rounds.pop(prompt).result()
            if updates is None:
                del self._live[prompt]
                continue
            for update in self._pacer.due(prompt, updates):
                self._due.append(self._answer.chunk(self._answer.add(prompt, update)))


async def _next_round(handle: RequestHandle) -> list[ChoiceUpdate] | None:
    """Return all updates since the last round; None after the end."""
    return await anext(handle, None)
