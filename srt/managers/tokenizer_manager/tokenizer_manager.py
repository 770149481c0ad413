"""The TokenizerManager: requests in, updates of their answers out. The HTTP server uses it, and `Runtime` in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import astuple

from srt.constrained.compiler import Compiler, CompilerBusy
from srt.constrained.constraint import Constraint
from srt.constrained.resource import resource_of
from srt.lora.adapter_names import AdapterNames, open_names
from srt.lora.resource import with_adapter
from srt.managers.process.runtime_switches import ControlWords
from srt.managers.process.tracer import Tracer
from srt.managers.tokenizer_manager.api_types import EngineDied, GenerateInput, RequestError
from srt.managers.tokenizer_manager.frontend_metrics import FrontendMetrics
from srt.managers.tokenizer_manager.live_request import LiveRequest
from srt.managers.tokenizer_manager.live_request import RequestHandle as RequestHandle
from srt.managers.tokenizer_manager.model_facts import ModelFacts as ModelFacts
from srt.managers.tokenizer_manager.model_facts import read_model_facts
from srt.managers.tokenizer_manager.replica_client import ReplicaClient
from srt.managers.tokenizer_manager.replica_counters import combined
from srt.managers.tokenizer_manager.replica_router import ReplicaRouter
from srt.managers.tokenizer_manager.request_checks import (
    bad,
    build_request,
    check_form,
    check_replica,
    check_text,
    num_kept_tokens,
)
from srt.managers.tokenizer_manager.request_ledger import Convictions
from srt.managers.tokenizer_manager.request_watch import RequestWatch
from srt.managers.tokenizer_manager.scheduler_link import SchedulerLink, connector
from srt.managers.tokenizer_manager.text_codec import TextCodec, load_text_files
from srt.protocol.engine_work import MemoryWork, NewWeights, SameWeights, SetWeightVersion, UpdateWeights
from srt.protocol.host_messages import MeetingPoints
from srt.protocol.labels import is_named
from srt.protocol.messages import (
    AbortLabel,
    ContinueGeneration,
    ControlReply,
    EngineLost,
    EngineReplaced,
    FlushCache,
    FromFrontend,
    GenerateRequest,
    GetState,
    Int32Array,
    Load,
    PauseGeneration,
    RequestDone,
    Resource,
    Scalar,
    SchedulerHello,
)
from srt.sampling.parameter_checks import ParameterError
from srt.sampling.sampling_params import DEFAULT_MAX_NEW_TOKENS, SamplingParams
from srt.server_args import ServerArgs
from srt.utils.chat_template import ChatTemplate, ChatTemplateError
from srt.utils.tokenizer import Tokenizer

_RETRY_AFTER_S = 1

logger = logging.getLogger(__name__)


class TokenizerManager:
    """Owner of this frontend's texts and, through its replicas, of the links to their schedulers and of the live requests.

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
        generations: Sequence[int],
        max_held: int,
        watch: RequestWatch | None = None,
        compiler: Compiler | None = None,
        router: ReplicaRouter | None = None,
        adapters: AdapterNames | None = None,
    ) -> None:
        """Link to the schedulers of all replicas. Programs use `TokenizerManager.connect` instead.

        connect: makes a SchedulerLink from a generation, the scheduler's address and the link's callbacks.
        generations: the present generation of each replica.
        max_held: number of requests that may wait while there is no scheduler.
        compiler: None refuses constraints.
        adapters: None refuses LoRA adapters.
        """
        self.model = model
        self.text = TextCodec(tokenizer, template, context_length=model.context_length, vocab_size=model.vocab_size)
        self._watch = watch or RequestWatch()
        self.adapters = adapters
        self._compiler = compiler
        self._compiler_start: asyncio.Task[None] | None = None
        self._new_seed = new_seed
        self._router = router or ReplicaRouter()
        # Labels of requests that are not sent yet. True: aborted in the meantime.
        self._labels_on_the_way: dict[str, bool] = {}
        self._num_requests = 0
        self._death: str | None = None
        self._max_held = max_held
        self._answered = asyncio.Event()  # set when a scheduler has answered, or none ever will
        self._broken = asyncio.Event()
        self._replicas: list[ReplicaClient] = []
        self._convictions = Convictions()
        for number, generation in enumerate(generations):
            shared = self._watch, self._convictions, self, adapters
            self._replicas.append(ReplicaClient(number, generation, connect, *shared))

    @classmethod
    async def connect(
        cls,
        *,
        index: int,
        generations: Sequence[int],
        run_dir: str,
        model_folder: str,
        args: ServerArgs,
        tracer: Tracer | None = None,
        meeting: MeetingPoints | None = None,
    ) -> TokenizerManager:
        """Load tokenizer and model facts, connect and say hello; raise StartError for what the user must change."""
        tokenizer, template = await asyncio.to_thread(load_text_files, model_folder, args)
        model = await asyncio.to_thread(read_model_facts, model_folder, args, template)
        adapters = await asyncio.to_thread(open_names, run_dir, model_folder, args)
        return cls(
            model=model,
            tokenizer=tokenizer,
            template=template,
            new_seed=seed_source(args.random_seed, index),
            connect=connector(index, run_dir, generations, meeting),
            generations=generations,
            router=ReplicaRouter(args.load_balance_method, has_prefix_cache=not args.disable_radix_cache),
            max_held=args.max_queued_requests,
            adapters=adapters,
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
        """The least limits of all schedulers, which requests are checked against. Available after `wait_ready`."""
        limits = [replica.limits for replica in self._replicas if replica.limits is not None]
        assert limits, "no scheduler has answered yet"
        return min(limits, key=lambda one: one.max_request_tokens)

    @property
    def load(self) -> Load | None:
        """The load of all replicas, as their schedulers reported it last."""
        loads = [replica.load for replica in self._replicas if replica.load is not None]
        return sum_of_loads(loads) if loads else None

    @property
    def num_replicas(self) -> int:
        return len(self._replicas)

    @property
    def is_ready(self) -> bool:
        """True if a scheduler has answered and its link is up."""
        return self._death is None and any(replica.is_greeted for replica in self._replicas)

    @property
    def is_dead(self) -> bool:
        """True if the engine has ended for good."""
        return self._death is not None

    async def wait_ready(self) -> None:
        """Wait until a scheduler accepts requests; raise EngineDied if it never will."""
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
        for replica in self._replicas:
            replica.fail(EngineDied(self._death))
        self._answered.set()
        self._broken.set()

    def engine_changed(self, news: EngineReplaced | EngineLost) -> None:
        """Handle the supervisor's notice that a replica's engine has ended, or that the next one is starting."""
        if self._death is not None:
            return
        replica = self._replicas[news.replica]
        if isinstance(news, EngineReplaced):
            replica.replaced(news)
        else:
            replica.lost(news)

    def replica_changed(self, changed: ReplicaClient) -> None:
        """Move requests from replicas that have ended to those that serve, because one of either kind is new."""
        if changed.is_greeted:
            self._answered.set()
            self._router.forget(changed)
        elif self.num_replicas > 1:
            changed.calls.fail(changed.being_replaced(), kinds=(FlushCache, GetState, AbortLabel))
        for replica in self._replicas:
            if not replica.is_greeted:
                self._move_requests(replica)
        if changed.is_final:
            changed.fail(EngineDied("The engine has ended: the server is shutting down."))

    def _move_requests(self, replica: ReplicaClient) -> None:
        """Let other replicas continue what a replica that has ended may give away."""
        others = self._serving()
        if not others:
            return
        for rid in replica.deliveries.movable():
            other = self._router.choose(replica.deliveries.request(rid), others)
            replica.deliveries.move(rid, other.deliveries)
            other.num_sent += 1

    def _serving(self) -> list[ReplicaClient]:
        """Return the replicas whose schedulers have answered and whose links are up."""
        return [replica for replica in self._replicas if replica.is_greeted]

    def stats(self) -> dict[str, Scalar]:
        """Return counters for /server_info and leak checks. All that begin with `live_` are 0 when nothing runs."""
        counts: Counter[str] = Counter()
        for replica in self._replicas:
            counts.update(replica.deliveries.stats())
        return {
            **counts,
            "live_watched": self._watch.num_watched,
            "live_labels": len(self._labels_on_the_way),
            "live_calls": sum(replica.calls.num_of_clients for replica in self._replicas),
            "num_requests": self._num_requests,
            "num_rejected": sum(replica.num_rejected for replica in self._replicas),
        }

    async def close(self) -> None:
        """Abort everything and close the link."""
        for replica in self._replicas:
            replica.deliveries.abort_all()
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
            check_replica(request, self.num_replicas)
            label = secrets.token_hex(16) if request.rid is None else request.rid
            if label in labels or label in self._labels_on_the_way or self._is_live(label):
                raise bad("rid", f"{label!r} is already the name of another request")
            labels[label] = False
        self._labels_on_the_way |= labels
        return list(labels)

    async def _submit(self, request: GenerateInput, label: str) -> RequestHandle:
        arrived_s = self._watch.now()
        seed = request.params.sampling_seed if request.params.sampling_seed is not None else self._new_seed()
        prompt_ids = await self._prompt_ids(request)
        resource = None if request.params.constraint is None else await self._grammar(request.params.constraint)
        adapter = None if request.adapter is None else self._adapter(request.adapter)
        is_aborted = self._labels_on_the_way.pop(label)
        self._check_alive()  # the engine may have died in the meantime
        if not self.is_ready:
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
        message = message if self.adapters is None else with_adapter(message, adapter)
        self._num_requests += 1
        live = self._live_request(message, request, arrived_s, tokenized_s)
        if is_aborted:
            for choice in message.choices.tolist():
                live.end_choice(choice, RequestDone(message.rid, choice, "abort", -1, 0, 0))
        else:
            replica = self._choose_replica(request, message)
            live.replica = replica.number if self.num_replicas > 1 else None
            live.watched = self._watch.began(request, message, arrived_s)
            replica.deliveries.begin(live, message)
            replica.num_sent += 1
            self._watch.sent(message, tokenized_s)
        return RequestHandle(live, self._abort)

    def _choose_replica(self, request: GenerateInput, message: GenerateRequest) -> ReplicaClient:
        """Return the replica that begins to run a request: one that serves or, if there is none, one that will serve again."""
        conviction = self._convictions.find(message)
        if conviction is not None:  # it does not get a chance to kill another replica
            return self._replicas[conviction.replica]
        asked = request.replica
        if asked is not None and self._replicas[asked].is_greeted:
            return self._replicas[asked]
        return self._router.choose(message, self._serving() or [one for one in self._replicas if not one.is_final])

    def _abort(self, rid: int) -> None:
        """End a request from this side, whichever replica runs it."""
        for replica in self._replicas:
            replica.deliveries.abort(rid)

    def _is_live(self, label: str) -> bool:
        return any(replica.deliveries.has_label(label) for replica in self._replicas)

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

    def _adapter(self, name: str) -> Resource:
        """Return what workers need for a LoRA adapter; raise RequestError if there is none of this name."""
        if self.adapters is None:
            raise bad("lora_path", "names a LoRA adapter, but the server has none: start it with --enable-lora")
        found = self.adapters.find(name)
        if found is None:
            raise bad("lora_path", f"{name[:200]!r} is not the name of an adapter (/v1/models lists them)")
        return found

    def pin_adapters(self) -> None:
        """Tell all schedulers which adapters are pinned."""
        for replica in self._replicas:
            replica.pin_adapters()

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
        if not any(replica.limits for replica in self._replicas):
            raise RequestError(503, "The server is starting.", retry_after_s=_RETRY_AFTER_S)

    def _check_room(self) -> None:
        """Refuse the request if `max_held` requests already wait for the engine to be replaced."""
        num_held = sum(replica.deliveries.num_unsent for replica in self._replicas)
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

    # ---- Control

    async def flush_cache(self) -> tuple[bool, str]:
        """Empty the prefix caches of all replicas; return (done?, sentence)."""
        return _whether_all(await self._call(FlushCache))

    async def pause(self, mode: str) -> tuple[bool, str]:
        """Pause generation; return (done?, sentence). On return no step is in flight; requests wait until `resume`."""
        self._check_all_serve()
        return _whether_all(await self._call(lambda call: PauseGeneration(call, mode)))

    async def resume(self) -> None:
        self._check_all_serve()
        await self._call(ContinueGeneration)

    async def update_weights(self, work: NewWeights, version: str, aborts: bool) -> tuple[bool, str, int]:
        """Replace the weights of all replicas (see UpdateWeights); return (done?, sentence, number of requests that waited for it)."""
        self._check_all_serve()
        replies = await self._call(lambda call: UpdateWeights(call, work, version, aborts))
        done, sentence = _whether_all(replies)
        if len(replies) < self.num_replicas:
            done, sentence = False, f"{sentence} A replica ended meanwhile, and has its old weights: update them again."
        counts = [reply.values.get("num_paused_requests", 0) for reply in replies.values()]
        return done, sentence.strip(), sum(count for count in counts if isinstance(count, int))

    async def ask_ranks(self, work: SameWeights | MemoryWork) -> dict[int, ControlReply]:
        """Let the ranks of every replica do work that leaves the weights as they are; return their answers by replica."""
        if isinstance(work, MemoryWork):
            self._check_all_serve()
        replies = await self._call(lambda call: UpdateWeights(call, work, "", aborts=False))
        if isinstance(work, MemoryWork) and len(replies) < self.num_replicas:
            raise RequestError(503, "A replica ended meanwhile, and its memory is as before: call again.")
        return replies

    async def rename_weights(self, version: str) -> None:
        """Give the present weights another name."""
        self._check_all_serve()
        await self._call(lambda call: SetWeightVersion(call, version))

    async def get_state(self, deep: bool = False, is_own: bool = False) -> tuple[bool, str, dict[str, Scalar]]:
        """Return (ok?, sentence, the schedulers' counters), added up over the replicas that serve.

        deep: compare the workers' tables too.
        is_own: the frontend itself asks, not a client.
        """
        states = await self.get_states(deep, is_own)
        return *_whether_all(states), combined([one.values for one in states.values()])

    async def get_states(self, deep: bool = False, is_own: bool = False) -> dict[int, ControlReply]:
        """Return the state of every replica that serves."""
        return await self._call(lambda call: GetState(call, deep), is_own)

    async def abort_label(self, label: str) -> int:
        """Abort the live requests that match `label` in all frontends, and return their number.

        A label matches one request or all of a batch; the empty label matches everything.
        """
        check_text("rid", label)
        on_the_way = self._mark_on_the_way(label)
        # Taken now: requests sent after this call are not aborted.
        named = [(replica, rid) for replica in self._replicas for rid in replica.deliveries.named(label)]
        if self.num_replicas > 1:  # another replica may have to take one over before the answers come
            self._record_aborted(named)
        replies = await self._call(lambda call: AbortLabel(call, label))
        self._record_aborted(named)
        counts = [reply.values.get("num_aborted", 0) for reply in replies.values()]
        return on_the_way + sum(count for count in counts if isinstance(count, int))

    def _record_aborted(self, named: Iterable[tuple[ReplicaClient, int]]) -> None:
        for replica, rid in named:
            replica.deliveries.record_aborted([rid])

    def abort_named(self, label: str) -> None:
        """Abort the requests that match `label`, at another frontend's request. The schedulers have ended those they knew already."""
        self._mark_on_the_way(label)
        for replica in self._replicas:
            replica.deliveries.abort_named(label)

    def _mark_on_the_way(self, label: str) -> int:
        """Mark matching requests that are not sent yet: they are aborted when they would be sent. Return their number."""
        named = [other for other in self._labels_on_the_way if is_named(other, label)]
        self._labels_on_the_way.update(dict.fromkeys(named, True))
        return len(named)

    def _check_all_serve(self) -> None:
        """Raise RequestError if a replica is being replaced: it would not learn what holds for all of them."""
        self._check_alive()
        for replica in self._replicas:
            if self.num_replicas > 1 and not replica.is_greeted:
                raise replica.being_replaced()

    async def _call(self, make: Callable[[int], FromFrontend], is_own: bool = False) -> dict[int, ControlReply]:
        """Send a call to all replicas that serve, and return their answers. One that ends meanwhile is left out, unless it was the last."""
        self._check_alive()
        replicas = self._serving()
        if not replicas:
            raise RequestError(503, "The engine is being replaced.", retry_after_s=_RETRY_AFTER_S)
        calls = [replica.calls.call(make, is_own) for replica in replicas]
        if len(calls) == 1:
            return {replicas[0].number: await calls[0]}
        answers = await asyncio.gather(*calls, return_exceptions=True)
        replies = {r.number: a for r, a in zip(replicas, answers, strict=True) if isinstance(a, ControlReply)}
        if not replies:
            raise next(answer for answer in answers if isinstance(answer, BaseException))
        return replies


def sum_of_loads(loads: Iterable[Load]) -> Load:
    """Return the load of several replicas together."""
    columns = zip(*(astuple(one) for one in loads), strict=True)
    return Load(*(sum(column) for column in columns))


def _whether_all(replies: Mapping[int, ControlReply]) -> tuple[bool, str]:
    """Return whether all replies are positive, and the sentences of those that are not, or of all."""
    refusals = [reply for reply in replies.values() if not reply.ok]
    sentences = dict.fromkeys(reply.message for reply in refusals or replies.values())
    return not refusals, " ".join(sentence for sentence in sentences if sentence)


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
