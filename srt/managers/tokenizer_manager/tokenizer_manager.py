"""The TokenizerManager: requests in, updates of their answers out. The HTTP server uses it, and `Runtime` in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from srt.constrained.compiler import Compiler, CompilerBusy
from srt.constrained.constraint import Constraint
from srt.constrained.resource import resource_of
from srt.managers.process.runtime_switches import ControlWords
from srt.managers.process.tracer import Tracer
from srt.managers.tokenizer_manager.api_types import EngineDied, GenerateInput, RequestError
from srt.managers.tokenizer_manager.control_calls import ControlCalls
from srt.managers.tokenizer_manager.deliveries import Deliveries
from srt.managers.tokenizer_manager.frontend_metrics import FrontendMetrics
from srt.managers.tokenizer_manager.live_request import LiveRequest
from srt.managers.tokenizer_manager.live_request import RequestHandle as RequestHandle
from srt.managers.tokenizer_manager.model_facts import ModelFacts as ModelFacts
from srt.managers.tokenizer_manager.model_facts import read_model_facts
from srt.managers.tokenizer_manager.request_checks import bad, build_request, check_form, check_text, num_kept_tokens
from srt.managers.tokenizer_manager.request_watch import RequestWatch
from srt.managers.tokenizer_manager.scheduler_link import SchedulerLink
from srt.managers.tokenizer_manager.text_codec import TextCodec, load_text_files
from srt.protocol.labels import is_named
from srt.protocol.messages import (
    AbortLabel,
    ContinueGeneration,
    ControlReply,
    EngineReplaced,
    FlushCache,
    FromFrontend,
    GenerateRequest,
    GetState,
    Int32Array,
    LastWord,
    Load,
    Message,
    PauseGeneration,
    Refused,
    Rejected,
    RequestDone,
    Resource,
    Scalar,
    SchedulerHello,
    TokenBatch,
)
from srt.sampling.parameter_checks import ParameterError
from srt.sampling.sampling_params import DEFAULT_MAX_NEW_TOKENS, SamplingParams
from srt.server_args import ServerArgs
from srt.utils.chat_template import ChatTemplate, ChatTemplateError
from srt.utils.tokenizer import Tokenizer

_RETRY_AFTER_S = 1

logger = logging.getLogger(__name__)


class TokenizerManager:
    """Owner of the link to the scheduler and, through its parts, of this frontend's texts and live requests.

    Use it from one event loop only.
    """

    def __init__(
        self,
        *,
        model: ModelFacts,
        tokenizer: Tokenizer,
        template: ChatTemplate | ChatTemplateError | None,
        new_seed: Callable[[], int],
        connect: Callable[..., SchedulerLink],
        generation: int,
        max_held: int,
        watch: RequestWatch | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        """Link to the scheduler of `generation`. Programs use `TokenizerManager.connect` instead.

        connect: makes a SchedulerLink from a generation and the link's callbacks.
        max_held: number of requests that may wait while there is no scheduler.
        compiler: None refuses constraints.
        """
        self.model = model
        self.text = TextCodec(tokenizer, template, context_length=model.context_length, vocab_size=model.vocab_size)
        self._watch = watch or RequestWatch()
        self._compiler = compiler
        self._compiler_start: asyncio.Task[None] | None = None
        self._new_seed = new_seed
        self._deliveries = Deliveries(self._send, self._watch)
        self._calls = ControlCalls(self._send)
        # Labels of requests that are not sent yet. True: aborted in the meantime.
        self._labels_on_the_way: dict[str, bool] = {}
        self._num_requests = 0
        self._num_rejected = 0
        self._limits: SchedulerHello | None = None
        self._load: Load | None = None
        self._death: str | None = None
        self._next: EngineReplaced | None = None  # how to reach the next scheduler
        self._is_greeted = False  # the present scheduler has answered; before that nothing is sent to it
        self._max_held = max_held
        self._connect = connect
        self._answered = asyncio.Event()  # set when the scheduler has answered, or never will
        self._broken = asyncio.Event()
        self._link = self._link_to(generation)

    @classmethod
    async def connect(
        cls,
        *,
        index: int,
        generation: int,
        run_dir: str,
        model_folder: str,
        args: ServerArgs,
        tracer: Tracer | None = None,
    ) -> TokenizerManager:
        """Load tokenizer and model facts, connect and say hello; raise StartError for what the user must change."""
        tokenizer, template = await asyncio.to_thread(load_text_files, model_folder, args)
        model = await asyncio.to_thread(read_model_facts, model_folder, args, template)

        def connect(generation: int, **callbacks: Any) -> SchedulerLink:
            return SchedulerLink(index=index, generation=generation, run_dir=run_dir, **callbacks)

        return cls(
            model=model,
            tokenizer=tokenizer,
            template=template,
            new_seed=seed_source(args.random_seed, index),
            connect=connect,
            generation=generation,
            max_held=args.max_queued_requests,
            compiler=None
            if args.grammar_backend == "none"
            else Compiler(args.tokenizer_path or model_folder, model.vocab_size, model.eos_ids),
            watch=RequestWatch(
                index, FrontendMetrics(run_dir, index), ControlWords.open(run_dir, args), tracer, tokenizer.decode
            ),
        )

    def start_compiler(self) -> None:
        """Start the process that compiles constraints, in the background, so that the first of them does not wait for it."""
        if self._compiler is not None and self._compiler_start is None:
            self._compiler_start = asyncio.create_task(_start(self._compiler))

    async def stop_compiler(self) -> None:
        """End that process, if there is one. Requests that wait for it are refused."""
        if self._compiler_start is not None:
            self._compiler_start.cancel()
            await asyncio.wait((self._compiler_start,))
        if self._compiler is not None:
            self._compiler.close()

    # ---- The engine's state

    @property
    def limits(self) -> SchedulerHello:
        """The scheduler's limits, which requests are checked against. Available after `wait_ready`."""
        assert self._limits is not None, "the scheduler has not answered yet"
        return self._limits

    @property
    def load(self) -> Load | None:
        """The load that the scheduler reported last."""
        return self._load

    @property
    def is_ready(self) -> bool:
        """True if the scheduler has answered and its link is up."""
        return self._is_greeted and self._death is None

    @property
    def is_dead(self) -> bool:
        """True if the engine has ended for good."""
        return self._death is not None

    async def wait_ready(self) -> None:
        """Wait until the scheduler accepts requests; raise EngineDied if it never will."""
        await self._answered.wait()
        if self._death is not None:
            raise EngineDied(self._death)

    async def wait_broken(self) -> str:
        """Wait until the engine has died and return the reason. A server then ends."""
        await self._broken.wait()
        assert self._death is not None
        return self._death

    def engine_died(self, reason: str) -> None:
        """Record that the engine has ended for good: every pending call raises EngineDied. The first reason is kept."""
        if self._death is not None:
            return
        self._death = f"The engine has ended: {reason.rstrip('.')}."
        self._link.close()
        self._deliveries.fail_all(EngineDied(self._death))
        self._calls.fail(EngineDied(self._death))
        self._answered.set()
        self._broken.set()

    def engine_replaced(self, replaced: EngineReplaced) -> None:
        """Move to the next scheduler, because this one has ended. Unanswered requests and calls are sent to the next one when it is
        there; readers only notice a pause."""
        # If two messages come before the link's end is noticed, the first gives the cause of death of this link's scheduler.
        self._next = replaced if self._next is None else replace(replaced, by_request=self._next.by_request)
        if not self._is_greeted:  # otherwise its last messages may still come, and the link's end follows them
            self._go_to_next()

    def _engine_lost(self) -> None:
        """Handle the end of the link. The supervisor notices the death too, and replaces the engine or ends everything."""
        self._is_greeted = False
        self._deliveries.record_lost()
        self._go_to_next()

    def _go_to_next(self) -> None:
        replaced, self._next = self._next, None
        if replaced is not None and self._death is None:
            self._deliveries.record_death(by_request=replaced.by_request)
            self._link.drop()
            self._link = self._link_to(replaced.generation)

    def _link_to(self, generation: int) -> SchedulerLink:
        return self._connect(
            generation,
            on_message=self._handle,
            on_idle=self._deliveries.acknowledge,
            on_lost=self._engine_lost,
            on_broken=self.engine_died,
        )

    def stats(self) -> dict[str, Scalar]:
        """Return counters for /server_info and leak checks. All that begin with `live_` are 0 when nothing runs."""
        return {
            **self._deliveries.stats(),
            "live_labels": len(self._labels_on_the_way),
            "live_calls": self._calls.num_of_clients,
            "num_requests": self._num_requests,
            "num_rejected": self._num_rejected,
        }

    async def close(self) -> None:
        """Abort everything and close the link."""
        self._deliveries.abort_all()
        self.engine_died("it was shut down")
        self.text.close()
        await self.stop_compiler()

    # ---- Requests

    def sampling_params(
        self, given: Mapping[str, Any], default_max_new_tokens: int | None = DEFAULT_MAX_NEW_TOKENS
    ) -> SamplingParams:
        """Return checked parameters: `given` over the model's defaults. ParameterError names what is wrong.

        default_max_new_tokens: used if `given` has no max_new_tokens, and shortened to what fits; None: as many as fit.
        """
        return SamplingParams.from_dict(given, self.model.sampling_defaults, default_max_new_tokens)

    async def submit(self, request: GenerateInput) -> RequestHandle:
        """Check the request and send it. If it cannot be served, raise RequestError (4xx, with the parameter) and send nothing."""
        (handle,) = await self.submit_all([request])
        return handle

    async def submit_all(self, requests: Sequence[GenerateInput]) -> list[RequestHandle]:
        """Submit the requests of one call, one after the other. If one cannot be served, none runs.

        From the start, an abort finds all of them by name, including those not tokenized yet.
        """
        self._check_alive()
        labels = self._reserve_labels(requests)
        handles: list[RequestHandle] = []
        try:
            with contextlib.ExitStack() as refused:
                for label, request in zip(labels, requests, strict=True):
                    if handles:
                        await asyncio.sleep(0)  # tokenizing a large batch takes seconds: let streams run in between
                    handles.append(refused.enter_context(await self._submit(request, label)))
                refused.pop_all()
        finally:
            for label in labels[len(handles) :]:
                self._labels_on_the_way.pop(label, None)
        return handles

    def _reserve_labels(self, requests: Sequence[GenerateInput]) -> list[str]:
        """Reserve a label for each request. Raise RequestError and reserve nothing if a label is in use or a request is malformed."""
        labels: dict[str, bool] = {}
        for request in requests:
            check_form(request)
            label = secrets.token_hex(16) if request.rid is None else request.rid
            if label in labels or label in self._labels_on_the_way or self._deliveries.has_label(label):
                raise bad("rid", f"{label!r} is already the name of another request")
            labels[label] = False
        self._labels_on_the_way |= labels
        return list(labels)

    async def _submit(self, request: GenerateInput, label: str) -> RequestHandle:
        arrived_s = self._watch.now()
        seed = request.params.sampling_seed if request.params.sampling_seed is not None else self._new_seed()
        prompt_ids = await self._prompt_ids(request)
        resource = None if request.params.constraint is None else await self._grammar(request.params.constraint)
        is_aborted = self._labels_on_the_way.pop(label)
        self._check_alive()  # the engine may have died in the meantime
        if not self._is_greeted:
            self._check_room()
        tokenized_s = self._watch.now()
        message = build_request(
            request,
            prompt_ids,
            rid=self._num_requests,
            label=label,
            seed=seed,
            model=self.model,
            limits=self.limits,
            forbidden_ids=self.text.forbidden_ids(request.params.bad_words),
            resource=resource,
        )
        self._num_requests += 1
        live = self._live_request(message, request, arrived_s, tokenized_s)
        if is_aborted:
            for choice in message.choices.tolist():
                live.end_choice(choice, RequestDone(message.rid, choice, "abort", -1, 0, 0))
        else:
            live.watched = self._watch.began(request, message, arrived_s)
            self._deliveries.begin(live, message)
            self._watch.sent(message, tokenized_s)
        return RequestHandle(live, self._deliveries.abort)

    async def _grammar(self, constraint: Constraint) -> Resource:
        """Return what workers need to follow a constraint; raise RequestError if it cannot be followed, or not now."""
        if self._compiler is None:
            raise bad(constraint.source, "cannot be enforced: the server was started with --grammar-backend none")
        try:
            return resource_of(await self._compiler.compile(constraint), list(constraint.begins_after))
        except ParameterError as error:
            field = error.name.partition(".")[0].partition("[")[0]
            raise RequestError(400, f"{error.name} {error.reason}.", field) from error
        except CompilerBusy as error:
            self._check_alive()  # the compiler ends before the engine's last requests do
            raise RequestError(503, str(error), retry_after_s=_RETRY_AFTER_S) from error

    async def tokenized(self, request: GenerateInput) -> GenerateInput:
        """Return the request with its token ids in place of its text. Raises RequestError as `submit` does."""
        self._check_alive()
        check_form(request)
        ids = [int(token_id) for token_id in await self._prompt_ids(request)]
        return dataclasses.replace(request, text=None, input_ids=ids, truncate_prompt_tokens=None)

    async def _prompt_ids(self, request: GenerateInput) -> list[int] | Int32Array:
        return await self.text.prompt_ids(request, num_kept_tokens(request, self.model, self.limits))

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDied(self._death)
        if self._limits is None:
            raise RequestError(503, "The server is starting.", retry_after_s=_RETRY_AFTER_S)

    def _check_room(self) -> None:
        """Refuse the request if `max_held` requests already wait for the engine to be replaced."""
        num_held = self._deliveries.num_unsent
        if num_held >= self._max_held:
            sentence = f"The engine is being replaced, and {num_held} requests, the limit, already wait for it."
            raise RequestError(503, sentence, retry_after_s=_RETRY_AFTER_S)

    def _live_request(
        self, message: GenerateRequest, request: GenerateInput, arrived_s: float, sent_s: float
    ) -> LiveRequest:
        params = request.params
        stop_ids = frozenset(message.sampling.stop_ids.tolist())
        return LiveRequest(
            message,
            lambda: self.text.output(params, message.prompt_ids, stop_ids),
            wants_tokens=params.max_new_tokens != 0,
            wants_prompt_ids=request.wants_prompt_ids,
            arrived_s=arrived_s,
            sent_s=sent_s,
        )

    # ---- What the scheduler says

    def _handle(self, message: Message) -> None:
        match message:
            case TokenBatch() | Refused():
                self._deliveries.handle(message)
            case ControlReply():
                self._calls.handle(message)
            case Load():
                self._load = message
            case AbortLabel():
                self._abort_named(message.label)
            case SchedulerHello():
                self._greeted(message)
            case LastWord():
                self._deliveries.record_last_word(message)
            case Rejected():
                self._handle_rejection(message.reason)
            case _:
                logger.error("The scheduler sent a %s message, which frontends do not handle.", type(message).__name__)

    def _greeted(self, hello: SchedulerHello) -> None:
        self._limits = hello
        self._is_greeted = True
        self._answered.set()
        self._deliveries.resume()
        self._calls.send_again()

    def _handle_rejection(self, reason: str) -> None:
        """Handle the scheduler's report that it dropped a message of this frontend, which is a defect.

        The message can have been any request without an answer yet, so all of those fail instead of hanging.
        """
        logger.error("The scheduler rejected a message of this frontend: %s.", reason)
        self._num_rejected += 1
        if not self._is_greeted:
            self.engine_died(f"it does not understand this process ({reason})")
            return
        self._deliveries.fail_unbegun(
            RequestError(500, f"The engine rejected a message, perhaps this request: {reason}.")
        )

    # ---- Control

    async def flush_cache(self) -> tuple[bool, str]:
        """Empty the prefix cache; return (done?, sentence)."""
        reply = await self._call(FlushCache)
        return reply.ok, reply.message

    async def pause(self, mode: str) -> tuple[bool, str]:
        """Pause generation; return (done?, sentence). On return no step is in flight; requests wait until `resume`."""
        reply = await self._call(lambda call: PauseGeneration(call, mode))
        return reply.ok, reply.message

    async def resume(self) -> None:
        await self._call(ContinueGeneration)

    async def get_state(self, deep: bool = False, is_own: bool = False) -> tuple[bool, str, dict[str, Scalar]]:
        """Return (ok?, sentence, the scheduler's counters).

        deep: compare the workers' tables too.
        is_own: the frontend itself asks, not a client.
        """
        reply = await self._call(lambda call: GetState(call, deep), is_own)
        return reply.ok, reply.message, reply.values

    async def abort_label(self, label: str) -> int:
        """Abort the live requests that match `label` in all frontends, and return their number.

        A label matches one request or all of a batch; the empty label matches everything.
        """
        check_text("rid", label)
        on_the_way = self._mark_on_the_way(label)
        named = self._deliveries.named(label)  # taken now: requests sent after this call are not aborted
        reply = await self._call(lambda call: AbortLabel(call, label))
        self._deliveries.record_aborted(named)
        count = reply.values.get("num_aborted", 0)
        return on_the_way + (count if isinstance(count, int) else 0)

    def _abort_named(self, label: str) -> None:
        """Abort the requests that match `label`, at another frontend's request. The scheduler has ended those it knew already."""
        self._mark_on_the_way(label)
        self._deliveries.abort_named(label)

    def _mark_on_the_way(self, label: str) -> int:
        """Mark matching requests that are not sent yet: they are aborted when they would be sent. Return their number."""
        named = [other for other in self._labels_on_the_way if is_named(other, label)]
        self._labels_on_the_way.update(dict.fromkeys(named, True))
        return len(named)

    async def _call(self, make: Callable[[int], FromFrontend], is_own: bool = False) -> ControlReply:
        self._check_alive()
        if not self._is_greeted:
            raise RequestError(503, "The engine is being replaced.", retry_after_s=_RETRY_AFTER_S)
        return await self._calls.call(make, is_own)

    def _send(self, message: FromFrontend) -> None:
        """Send a message if the scheduler has answered. Otherwise drop it: a new scheduler is sent all live requests and calls anyway."""
        if self._is_greeted:
            self._link.send(message)


async def _start(compiler: Compiler) -> None:
    try:
        await compiler.start()
    except CompilerBusy as error:  # requests with a constraint try again, and are told
        logger.info("%s", error)


def seed_source(random_seed: int | None, frontend: int) -> Callable[[], int]:
    """Return a function that draws seeds for requests without one.

    With a random seed the result depends on (random seed, frontend, number of draws before) alone; without one it is random.
    """
    if random_seed is None:
        return lambda: int.from_bytes(os.urandom(8), "little")
    drawn = 0

    def draw() -> int:
        nonlocal drawn
        text = f"{random_seed}:{frontend}:{drawn}"
        drawn += 1
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    return draw
