"""An engine for the routes' tests: it says what it is told to say. A token is a character, its id the code point."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import httpx
from msgspec.structs import replace

from srt.entrypoints.app import App
from srt.entrypoints.service import Service
from srt.entrypoints.streaming import joined
from srt.lora.adapter_names import AdapterNames
from srt.managers.tokenizer_manager.api_types import (
    ChoiceTimes,
    ChoiceUpdate,
    EngineDied,
    Finish,
    GenerateInput,
    RequestError,
    TokenLogprob,
)
from srt.managers.tokenizer_manager.model_facts import ModelFacts
from srt.managers.tokenizer_manager.request_checks import (
    build_request,
    check_form,
    check_ids,
    check_replica,
    check_text,
    num_kept_tokens,
)
from srt.managers.tokenizer_manager.tokenizer_manager import TokenizerManager
from srt.protocol.engine_work import LoadWeights
from srt.protocol.messages import ControlReply, EngineLost, EngineReplaced, Load, Scalar, SchedulerHello
from srt.sampling.sampling_params import SamplingParams
from srt.server_args import ServerArgs
from srt.utils.text_stream import TextStream
from tests.support.tokenizers import Characters

VOCAB_SIZE = 1000
CONTEXT = 4096
CACHED_TOKENS = 2


class FakeHandle:
    """Gives one batch of updates per turn of the loop; waits for ever where the script says None."""

    def __init__(self, request: GenerateInput, script: list[list[ChoiceUpdate] | RequestError | None]) -> None:
        self.request = request
        self.rid = request.rid or "drawn"
        self.is_ended = False
        self.was_aborted = False
        self._script = script
        self._failure: RequestError | None = None
        self._last: list[ChoiceUpdate] = []
        self._news = asyncio.Event()

    def finish(self, updates: list[ChoiceUpdate]) -> None:
        """What comes where the script says None."""
        self._last = updates
        self._news.set()

    def fail(self, error: RequestError) -> None:
        self._failure = error
        self._news.set()

    def __aiter__(self) -> FakeHandle:
        return self

    async def __anext__(self) -> list[ChoiceUpdate]:
        await asyncio.sleep(0)
        if not self._script:
            self.is_ended = True
            raise StopAsyncIteration
        step = self._script.pop(0)
        if step is None:
            await self._news.wait()
            step = self._failure or self._last
        if isinstance(step, RequestError):
            raise step
        assert step is not None
        return step

    def push_to(self, push: object) -> None:
        """All comes by iterating."""

    async def collect(self) -> list[ChoiceUpdate]:
        whole: dict[int, ChoiceUpdate] = {}
        async for updates in self:
            for update in updates:
                whole[update.index] = joined(whole[update.index], update) if update.index in whole else update
        return [whole[index] for index in sorted(whole)]

    def abort(self) -> None:
        if not self.is_ended:
            self.is_ended = self.was_aborted = True

    def __enter__(self) -> FakeHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class FakeEngine:
    """Answers every request with `answer`, a character a step; or as `script` says."""

    def __init__(self, answer: str = "Hello!", uses_priorities: bool = False) -> None:
        self.answer = answer
        self.uses_priorities = uses_priorities
        self.script: Callable[[GenerateInput], list[list[ChoiceUpdate] | RequestError | None]] | None = None
        self.ready = True
        self.generations: list[int] = []  # it was replaced by these
        self.handles: list[FakeHandle] = []
        self.has_submitted = asyncio.Event()
        self.broken = asyncio.Event()
        self.death = ""
        self.adapters: AdapterNames | None = None
        self.is_closed = False
        self.aborted_labels: list[str] = []
        self.num_flushes_refused = 0
        self.why_not_paused = ""
        self.paused = ""  # or the mode
        self.updates: list[tuple[LoadWeights, str, bool]] = []
        self.update_files: dict[str, bytes] = {}  # of the latest
        self.why_not_updated = ""
        self.difference = ""  # between the processes' tables
        self.text: Any = self  # it is its own codec
        self.counters: dict[str, Scalar] = {
            "num_running": 0,
            "num_waiting": 1,
            "num_total_pages": 512,
            "num_free_pages": 512,
            "num_cached_pages": 0,
            "num_pinned": 0,
        }
        self.load: Load | None = None
        self.special_texts: set[str] = set()
        self.single_tokens: dict[str, int] = {}
        self.template_variables: set[str] = set()
        self.rendered: tuple[list[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None] = ([], None)
        self.limits = SchedulerHello(max_total_num_tokens=8192, max_request_tokens=CONTEXT, page_size=16)
        self.model = ModelFacts(
            folder="/m",
            architectures=("LlamaForCausalLM",),
            model_type="llama",
            context_length=CONTEXT,
            vocab_size=VOCAB_SIZE,
            eos_ids=(0,),
            sampling_defaults={},
            has_chat_template=True,
        )

    @property
    def is_ready(self) -> bool:
        return self.ready

    @property
    def is_dead(self) -> bool:
        return self.broken.is_set()

    def sampling_params(self, given: Mapping[str, Any], default_max_new_tokens: int | None = 128) -> SamplingParams:
        return SamplingParams.from_dict(given, {}, default_max_new_tokens)

    async def submit(self, request: GenerateInput) -> FakeHandle:
        self._check(request)
        script = self.script(request) if self.script else typing_out(request, self.answer)
        handle = FakeHandle(request, script)
        self.handles.append(handle)
        self.has_submitted.set()
        return handle

    async def submit_all(self, requests: Sequence[GenerateInput]) -> list[FakeHandle]:
        with ExitStack() as refused:
            handles = [refused.enter_context(await self.submit(request)) for request in requests]
            refused.pop_all()
        return handles

    def _check(self, request: GenerateInput) -> None:
        check_form(request)
        check_replica(request, 1)
        if request.priority and not self.uses_priorities:
            raise RequestError(400, "priority needs the server option --enable-priority-scheduling.")
        build_request(request, self._prompt_ids(request), rid=0, label="", seed=0, model=self.model, limits=self.limits)

    def _prompt_ids(self, request: GenerateInput) -> list[int]:
        most = num_kept_tokens(request, self.model, self.limits)
        return prompt_ids(request)[-most if most else None :]

    async def tokenized(self, request: GenerateInput) -> GenerateInput:
        check_form(request)
        return dataclasses.replace(request, text=None, input_ids=self._prompt_ids(request), truncate_prompt_tokens=None)

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        check_text("text", text)
        return [ord(letter) for letter in text]

    async def tokenize_pair(self, first: str, second: str) -> list[int]:
        return [ord(letter) for letter in f"{first}|{second}"]

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        check_ids("tokens", ids, VOCAB_SIZE)
        return "".join(map(chr, ids))

    num_added_before = 0

    def single_token(self, text: str) -> int | None:
        return self.single_tokens.get(text)

    def is_special(self, text: str) -> bool:
        return text in self.special_texts

    def template_knows(self, variable: str) -> bool:
        return variable in self.template_variables

    def output_stream(self, params: SamplingParams, prompt_ids: Sequence[int]) -> TextStream:
        return Characters()

    def prompt_stream(self, skip_special_tokens: bool) -> TextStream:
        return Characters()

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        self.rendered = (list(messages), tools)
        return text + ("<assistant>" if add_generation_prompt else "") + str(dict(variables or {}) or "")

    async def pause(self, mode: str) -> tuple[bool, str]:
        self.paused = mode
        return not self.why_not_paused, self.why_not_paused

    async def update_weights(self, work: LoadWeights, version: str, aborts: bool) -> tuple[bool, str, int]:
        self.updates.append((work, version, aborts))
        self.update_files = _files_in(work.folder)
        return not self.why_not_updated, self.why_not_updated.replace("FOLDER", work.folder), 3

    async def rename_weights(self, version: str) -> None:
        self.limits = replace(self.limits, weight_version=version)

    async def resume(self) -> None:
        self.paused = ""

    async def flush_cache(self) -> tuple[bool, str]:
        if self.num_flushes_refused:
            self.num_flushes_refused -= 1
            return False, "2 requests are running."
        return True, "Cache flushed."

    async def get_states(self, deep: bool = False, is_own: bool = False) -> dict[int, ControlReply]:
        ok, message, values = await self.get_state(deep, is_own)
        return {0: ControlReply(0, ok, message, values)}

    async def get_state(self, deep: bool = False, is_own: bool = False) -> tuple[bool, str, dict[str, Scalar]]:
        return not (deep and self.difference), self.difference, dict(self.counters)

    async def abort_label(self, label: str) -> int:
        self.aborted_labels.append(label)
        return 1

    async def wait_ready(self) -> None:
        pass

    async def wait_broken(self) -> str:
        await self.broken.wait()
        return self.death

    def engine_died(self, reason: str) -> None:
        self.death = reason
        self.ready = False
        self.broken.set()
        for handle in self.handles:
            handle.fail(EngineDied(f"The engine has ended: {reason}."))

    def engine_changed(self, news: EngineReplaced | EngineLost) -> None:
        assert isinstance(news, EngineReplaced)
        self.generations.append(news.generation)

    async def close(self) -> None:
        self.is_closed = True

    def stats(self) -> dict[str, Scalar]:
        return {"live_requests": 0}


def prompt_ids(request: GenerateInput) -> list[int]:
    return request.input_ids if request.input_ids is not None else [ord(letter) for letter in request.text or ""]


def typing_out(request: GenerateInput, answer: str) -> list[list[ChoiceUpdate] | RequestError | None]:
    """One step per character, all choices side by side; cut by max_new_tokens."""
    limit = request.params.max_new_tokens
    said = answer if limit is None else answer[:limit]
    if not said:
        return [[_nothing_said(request, choice) for choice in range(request.params.n)]]
    return [
        [choice_update(request, said, at, choice, len(said) < len(answer)) for choice in range(request.params.n)]
        for at in range(len(said))
    ]


def _nothing_said(request: GenerateInput, choice: int) -> ChoiceUpdate:
    """Only the prompt was to be computed."""
    first = choice_update(request, "x", 0, choice)
    finish = Finish("length", length=0)
    return replace(first, text="", ids=(), completion_tokens=0, output_logprobs=(), finish=finish)


def choice_update(request: GenerateInput, said: str, at: int, choice: int = 0, cut: bool = False) -> ChoiceUpdate:
    """The update with character `at` of what is said in all."""
    finish = Finish("length", length=len(said)) if cut else Finish("stop", matched=0)
    asked, ids = request.logprobs, prompt_ids(request)
    return ChoiceUpdate(
        index=choice,
        text=said[at],
        ids=(ord(said[at]),),
        prompt_tokens=len(ids),
        completion_tokens=at + 1,
        cached_tokens=CACHED_TOKENS,
        seed=(request.params.sampling_seed or 0) + choice,
        rid=request.rid or "drawn",
        finish=finish if at == len(said) - 1 else None,
        output_logprobs=(token_logprob(ord(said[at]), asked.top),) if asked.output else (),
        prompt_logprobs=_prompt_logprobs(ids, asked.prompt_start, asked.top) if at == 0 else (),
        prompt_ids=tuple(ids) if at == 0 else (),
        times=ChoiceTimes(100.0, 0.01, 0.25, 0.25 + 0.1 * at, 0.125),
    )


def token_logprob(token_id: int, top: int) -> TokenLogprob:
    return TokenLogprob(-0.5, token_id, tuple((-0.25 - rank, 65 + rank) for rank in range(top)))


def _prompt_logprobs(ids: list[int], start: int, top: int) -> tuple[TokenLogprob, ...]:
    if start < 0:
        return ()
    all_of_them = [TokenLogprob(None, ids[0]), *(token_logprob(token_id, top) for token_id in ids[1:])]
    return tuple(all_of_them[start:])


def _files_in(folder: str) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


class World:
    """The application with a fake engine behind it, and a client in front."""

    def __init__(self, *, ready: bool = True, answer: str = "Hello!", **options: Any) -> None:
        args = ServerArgs(model_path="/m", served_model_name=("tiny", "org/big"), **options)
        self.engine = FakeEngine(answer, args.uses_priorities)
        self.service = Service(args)
        self.app = App(self.service)
        if ready:
            self.service.begin(cast(TokenizerManager, self.engine), 1.5)

    def call(self, method: str, path: str, **request: Any) -> httpx.Response:
        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **request)

        return asyncio.run(go())

    def get(self, path: str, **request: Any) -> httpx.Response:
        return self.call("GET", path, **request)

    def post(self, path: str, body: Any, **request: Any) -> httpx.Response:
        return self.call("POST", path, json=body, **request)
