"""Text in, text out: a frontend's link to the scheduler. Used by the HTTP server and, in process, by `Runtime`."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from srt.managers.control_words import ControlWords
from srt.managers.detokenizer import OutputText
from srt.managers.frontend_metrics import FrontendMetrics
from srt.managers.io_struct import EngineDied, GenerateInput, RequestError
from srt.managers.live_request import LiveRequest
from srt.managers.live_request import RequestHandle as RequestHandle
from srt.managers.model_facts import ModelFacts as ModelFacts
from srt.managers.model_facts import read_model_facts
from srt.managers.request_checks import bad, build_request, check_form, check_ids, check_text
from srt.managers.request_ledger import ALL_CHOICES, ChoiceEnded, Effect, NewTokens, RequestLedger, RequestRefused, Send
from srt.managers.request_watch import RequestWatch
from srt.managers.scheduler_link import SchedulerLink
from srt.managers.tracer import Tracer
from srt.protocol.labels import is_named
from srt.protocol.messages import (
    Abort,
    AbortLabel,
    ContinueGeneration,
    ControlReply,
    FlushCache,
    FromFrontend,
    GenerateRequest,
    GetState,
    Int32Array,
    Load,
    Message,
    PauseGeneration,
    Refused,
    Rejected,
    RequestDone,
    Scalar,
    SchedulerHello,
    TokenBatch,
    int32_array,
)
from srt.sampling.sampling_params import DEFAULT_MAX_NEW_TOKENS, SamplingParams
from srt.server_args import ServerArgs
from srt.utils.chat_template import ChatTemplate, ChatTemplateError
from srt.utils.tokenizer import Tokenizer, load_chat_template, load_tokenizer

LONG_TEXT_CHARS = 8192  # a longer one is tokenized in a thread: the loop's other streams would feel it
HEAD_CHARS_PER_TOKEN = (
    16  # of a text with more, the beginning is tokenized first: as a rule it is too long, and that shows it
)
_TOKENIZING_THREADS = 2
_IDS_AT_ONCE = 1 << 15
_RETRY_AFTER_S = 1

logger = logging.getLogger(__name__)


class TokenizerManager:
    """Owner of the tokenizer, the link to the scheduler and all live requests of this frontend. One event loop only."""

    def __init__(
        self,
        *,
        model: ModelFacts,
        tokenizer: Tokenizer,
        template: ChatTemplate | ChatTemplateError | None,
        new_seed: Callable[[], int],
        connect: Callable[..., SchedulerLink],
        watch: RequestWatch | None = None,
    ) -> None:
        """Use `TokenizerManager.connect`. `connect` gets the three callbacks of a SchedulerLink."""
        self._watch = watch or RequestWatch()
        self.model = model
        self._tokenizer = tokenizer
        self._template = template
        self._new_seed = new_seed
        self._ledger = RequestLedger()
        self._live: dict[int, LiveRequest] = {}
        self._have_news: dict[int, LiveRequest] = {}  # of the batch at hand
        self._taken_s = 0.0  # when it came
        self._labels_on_the_way: dict[
            str, bool
        ] = {}  # of requests that are being tokenized; True: and were aborted meanwhile
        self._calls: dict[int, asyncio.Future[ControlReply]] = {}
        self._num_requests = 0
        self._num_calls = 0
        self._num_refused = 0
        self._num_rejected = 0
        self._num_tokens = 0
        self._limits: SchedulerHello | None = None
        self._load: Load | None = None
        self._death: str | None = None
        self._answered = asyncio.Event()  # the scheduler has, or it never will
        self._broken = asyncio.Event()
        self._threads = ThreadPoolExecutor(_TOKENIZING_THREADS, thread_name_prefix="tokenize")
        self._link = connect(on_message=self._take, on_idle=self._acknowledge, on_broken=self.engine_died)

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
        """Load tokenizer and model facts, connect, say hello. StartError for what the user must change."""
        tokenizer, template, model = await asyncio.to_thread(_load, model_folder, args)

        def connect(**callbacks: Any) -> SchedulerLink:
            return SchedulerLink(index=index, generation=generation, run_dir=run_dir, **callbacks)

        return cls(
            model=model,
            tokenizer=tokenizer,
            template=template,
            new_seed=seed_source(args.random_seed, index),
            connect=connect,
            watch=RequestWatch(
                index, FrontendMetrics(run_dir, index), ControlWords.open(run_dir, args), tracer, tokenizer.decode
            ),
        )

    # ---- The engine's state

    @property
    def limits(self) -> SchedulerHello:
        """What requests are checked against. Only after `wait_ready`."""
        assert self._limits is not None, "the scheduler has not answered yet"
        return self._limits

    @property
    def load(self) -> Load | None:
        """The scheduler's last word on its load."""
        return self._load

    @property
    def is_ready(self) -> bool:
        """The scheduler has answered and the link is whole."""
        return self._limits is not None and self._death is None

    async def wait_ready(self) -> None:
        """Return when the scheduler takes requests; EngineDied if it never will."""
        await self._answered.wait()
        if self._death is not None:
            raise EngineDied(self._death)

    async def wait_broken(self) -> str:
        """Return, with the reason, when the engine has died. A server ends then."""
        await self._broken.wait()
        assert self._death is not None
        return self._death

    def engine_died(self, reason: str) -> None:
        """Tell it what the link cannot: every pending call raises EngineDied. The first reason stays."""
        if self._death is not None:
            return
        self._death = f"The engine has ended: {reason.rstrip('.')}."
        self._link.close()
        for live in list(self._live.values()):
            live.fail(EngineDied(self._death))
            self._watch.ended(live.rid, "error")
        self._live.clear()
        for rid in self._ledger.live_rids():
            self._ledger.end(rid)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineDied(self._death))
        self._answered.set()
        self._broken.set()

    def stats(self) -> dict[str, Scalar]:
        """Counters for /server_info and leak checks; all that begin with `live_` are 0 when nothing runs."""
        return {
            "live_requests": len(self._live),
            "live_labels": len(self._labels_on_the_way),
            "live_ledger_requests": self._ledger.num_requests,
            "live_ledger_choices": self._ledger.num_choices,
            "live_ledger_tokens": self._ledger.num_tokens,
            "live_unacknowledged": self._ledger.num_unacknowledged,
            "live_calls": len(self._calls),
            "live_watched": self._watch.num_watched,
            "num_requests": self._num_requests,
            "num_refused": self._num_refused,
            "num_rejected": self._num_rejected,
            "num_output_tokens": self._num_tokens,
            "num_batches": self._ledger.num_batches,
            "num_gaps": self._ledger.num_gaps,
            "num_surplus_tokens": self._ledger.num_surplus_tokens,
        }

    async def close(self) -> None:
        """Abort everything and let go of the link."""
        for rid in self._ledger.live_rids():
            self._apply(self._ledger.end(rid))
        self.engine_died("it was shut down")
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- Requests

    def sampling_params(
        self, given: Mapping[str, Any], default_max_new_tokens: int | None = DEFAULT_MAX_NEW_TOKENS
    ) -> SamplingParams:
        """`given` over the model's defaults, checked; ParameterError names what is wrong. Without max_new_tokens in `given` a request
        gets `default_max_new_tokens`, or less where less fits; None: all that fits."""
        return SamplingParams.from_dict(given, self.model.sampling_defaults, default_max_new_tokens)

    async def submit(self, request: GenerateInput) -> RequestHandle:
        """Check the request and send it. RequestError (4xx, naming the parameter) if it cannot be served; then nothing was sent."""
        self._check_alive()
        check_form(request)
        label = secrets.token_hex(16) if request.rid is None else request.rid
        if label in self._labels_on_the_way or self._ledger.has_label(label):
            raise bad("rid", f"{label!r} is the name of a request that runs")
        arrived_s = self._watch.now()
        seed = request.params.sampling_seed if request.params.sampling_seed is not None else self._new_seed()
        self._labels_on_the_way[label] = False
        try:
            prompt_ids = await self._prompt_ids(request)
        finally:
            is_aborted = self._labels_on_the_way.pop(label)
        self._check_alive()  # it may have died meanwhile
        tokenized_s = self._watch.now()
        message = build_request(
            request,
            prompt_ids,
            rid=self._num_requests,
            label=label,
            seed=seed,
            model=self.model,
            limits=self.limits,
        )
        self._num_requests += 1
        live = self._live_request(message, request, arrived_s)
        if is_aborted:
            for choice in message.choices.tolist():
                live.end_choice(choice, RequestDone(message.rid, choice, "abort", -1, 0, 0))
        else:
            self._live[message.rid] = live
            self._watch.began(request, message, arrived_s)
            self._apply(self._ledger.add(message))
            self._watch.sent(message, tokenized_s)
        return RequestHandle(live, self._abort)

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDied(self._death)
        if self._limits is None:
            raise RequestError(503, "The server is starting.", retry_after_s=_RETRY_AFTER_S)

    async def _prompt_ids(self, request: GenerateInput) -> list[int] | Int32Array:
        if request.text is None:
            return request.input_ids or []
        most = self.model.context_length
        head = request.text[: max(HEAD_CHARS_PER_TOKEN * most, 2 * LONG_TEXT_CHARS)]
        if len(head) < len(request.text) and len(await self._encode(head, request.add_special_tokens)) > 2 * most:
            raise bad("text", f"has more than {2 * most} tokens, but the model's context holds {most}")
        return await self._encode(request.text, request.add_special_tokens)

    async def _encode(self, text: str, add_special_tokens: bool) -> Int32Array:
        if len(text) <= LONG_TEXT_CHARS:
            return int32_array(self._tokenizer.encode(text, add_special_tokens))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._encode_long, text, add_special_tokens)

    def _encode_long(self, text: str, add_special_tokens: bool) -> Int32Array:
        """In pieces, between which the loop may run: all at once half a million ids would take it 14 ms."""
        ids = self._tokenizer.encode(text, add_special_tokens)
        pieces = [int32_array(ids[at : at + _IDS_AT_ONCE]) for at in range(0, len(ids), _IDS_AT_ONCE)]
        return np.concatenate(pieces) if pieces else int32_array()

    def _live_request(self, message: GenerateRequest, request: GenerateInput, began_s: float) -> LiveRequest:
        params = request.params
        stop_ids = frozenset(message.sampling.stop_ids.tolist())
        tail = message.prompt_ids[-16:].tolist()

        def new_output() -> OutputText:
            stream = self._tokenizer.text_stream(tail, params.skip_special_tokens, params.spaces_between_special_tokens)
            return OutputText(stream, params, stop_ids)

        return LiveRequest(
            message,
            new_output,
            wants_tokens=params.max_new_tokens != 0,
            wants_prompt_ids=request.wants_prompt_ids,
            began_s=began_s,
        )

    def _abort(self, rid: int) -> None:
        """End a request from this side; nothing if it has ended."""
        self._live.pop(rid, None)
        self._watch.ended(rid, "abort")
        self._apply(self._ledger.end(rid))

    # ---- What the scheduler says

    def _take(self, message: Message) -> None:
        match message:
            case TokenBatch() | Refused():
                self._taken_s = taken_s = self._watch.now()
                self._apply(self._ledger.handle(message))
                self._tell_readers()
                self._watch.took(message, taken_s)
            case ControlReply():
                call = self._calls.get(message.call)
                if call is not None and not call.done():
                    call.set_result(message)
            case Load():
                self._load = message
            case AbortLabel():
                self._abort_named(message.label)
            case SchedulerHello():
                self._limits = message
                self._answered.set()
            case Rejected():
                self._take_rejection(message.reason)
            case _:
                logger.error("The scheduler sent %s, which is not for frontends.", type(message).__name__)

    def _take_rejection(self, reason: str) -> None:
        """A message of ours was dropped: a defect. It may have been any request that had no answer yet, so those fail: none hangs."""
        logger.error("The scheduler could not take a message: %s.", reason)
        self._num_rejected += 1
        if self._limits is None:
            self.engine_died(f"it does not understand this process ({reason})")
            return
        for live in [live for live in self._live.values() if not live.has_begun]:
            self._abort(live.rid)
            live.fail(RequestError(500, f"The engine could not take a request: {reason}."))

    def _acknowledge(self) -> None:
        self._apply(self._ledger.acknowledge())

    def _apply(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case NewTokens():
                    self._deliver(effect)
                case Send():
                    self._link.send(effect.message)
                case ChoiceEnded():
                    self._end_choice(effect)
                case RequestRefused():
                    self._refuse(effect)

    def _deliver(self, news: NewTokens) -> None:
        live = self._live.get(news.rid)
        if live is None:
            return
        self._num_tokens += len(news.ids)
        self._have_news[news.rid] = live
        try:
            has_stopped = live.take_tokens(news, self._taken_s)
        except Exception:
            self._text_failed(live)
            return
        self._watch.tokens(news.rid, news.choice, news.ids, self._taken_s)
        if has_stopped:
            self._apply(self._ledger.end(news.rid, news.choice))
            self._watch.cached(news.rid, news.cached)
            self._forget_if_ended(live, "stop")

    def _end_choice(self, end: ChoiceEnded) -> None:
        live = self._live.get(end.rid)
        if live is None:
            return
        self._watch.cached(end.rid, end.done.cached_tokens)
        self._have_news[end.rid] = live
        try:
            live.end_choice(end.choice, end.done)
        except Exception:
            self._text_failed(live)
            return
        if live.has_failed:
            self._watch.ended(end.rid, "error")
            self._abort(end.rid)  # its other choices
        self._forget_if_ended(live, end.done.reason)

    def _tell_readers(self) -> None:
        """Once for each request, however many ranges the batch had for it."""
        have_news, self._have_news = self._have_news, {}
        for live in have_news.values():
            try:
                live.tell()
            except Exception:
                self._text_failed(live)

    def _text_failed(self, live: LiveRequest) -> None:
        """A defect, but one of this answer's text alone: the link and all other requests are sound."""
        logger.exception("The text of request %d could not be made.", live.rid)
        self._watch.ended(live.rid, "error")
        self._abort(live.rid)
        live.fail(RequestError(500, "The text of this answer could not be made."))

    def _refuse(self, refusal: RequestRefused) -> None:
        self._num_refused += 1
        self._watch.ended(refusal.rid, "refused")
        live = self._live.pop(refusal.rid, None)
        if live is not None:
            live.fail(RequestError(refusal.status, refusal.message, retry_after_s=refusal.retry_after_s or None))

    def _forget_if_ended(self, live: LiveRequest, how: str) -> None:
        if live.has_ended:
            self._live.pop(live.rid, None)
            self._watch.ended(live.rid, how)

    # ---- Text

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        check_text("text", text)
        ids: list[int] = (await self._encode(text, add_special_tokens)).tolist()
        return ids

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if len(ids) > self.model.context_length:  # decoding millions would take the loop seconds
            raise bad("tokens", f"has {len(ids)} tokens, but the model's context holds {self.model.context_length}")
        check_ids("tokens", ids, self.model.vocab_size)
        return self._tokenizer.decode(ids, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token by itself, as logprobs show it."""
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The same as the bytes it stands for, which need not be whole characters."""
        return self._tokenizer.token_bytes(token_id)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text, special tokens included: submit it with add_special_tokens=False. RequestError 400 if the template refuses."""
        if self._template is None:
            raise RequestError(400, "This model has no chat template: the server needs --chat-template.", "messages")
        if isinstance(self._template, ChatTemplateError):
            raise RequestError(400, str(self._template), "messages")
        try:
            text = self._template.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=variables,
            )
        except ChatTemplateError as error:
            raise RequestError(400, str(error), "messages") from error
        check_text("messages", text)
        return text

    # ---- Control

    async def flush_cache(self) -> tuple[bool, str]:
        """(done?, sentence)."""
        reply = await self._call(FlushCache)
        return reply.ok, reply.message

    async def pause(self, mode: str) -> tuple[bool, str]:
        """(done?, sentence). When it returns no step is in flight; requests wait until `resume`."""
        reply = await self._call(lambda call: PauseGeneration(call, mode))
        return reply.ok, reply.message

    async def resume(self) -> None:
        await self._call(ContinueGeneration)

    async def get_state(self, deep: bool = False) -> tuple[bool, str, dict[str, Scalar]]:
        """(ok?, sentence, the scheduler's counters). `deep` compares the workers' tables too."""
        reply = await self._call(lambda call: GetState(call, deep))
        return reply.ok, reply.message, reply.values

    async def abort_label(self, label: str) -> int:
        """Abort the live requests that are named so, whichever frontend has them: one, all of a batch, or with the empty label
        everything. Returns how many."""
        check_text("rid", label)
        on_the_way = self._mark_on_the_way(label)
        reply = await self._call(lambda call: AbortLabel(call, label))
        count = reply.values.get("num_aborted", 0)
        return on_the_way + (count if isinstance(count, int) else 0)

    def _abort_named(self, label: str) -> None:
        """Another frontend was told to abort these. The scheduler has ended those that it knew."""
        self._mark_on_the_way(label)
        for live in self._live.values():
            if is_named(live.label, label):
                self._link.send(Abort(live.rid, ALL_CHOICES))

    def _mark_on_the_way(self, label: str) -> int:
        """What is being tokenized and named so is aborted as soon as it would be sent. Returns how many."""
        named = [other for other in self._labels_on_the_way if is_named(other, label)]
        self._labels_on_the_way.update(dict.fromkeys(named, True))
        return len(named)

    async def _call(self, make: Callable[[int], FromFrontend]) -> ControlReply:
        self._check_alive()
        number = self._num_calls
        self._num_calls += 1
        answer: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        try:
            self._link.send(make(number))
            return await answer
        finally:
            del self._calls[number]


def _load(folder: str, args: ServerArgs) -> tuple[Tokenizer, ChatTemplate | ChatTemplateError | None, ModelFacts]:
    tokenizer_folder = folder if args.tokenizer_path is None else args.tokenizer_path
    tokenizer = load_tokenizer(tokenizer_folder)
    template: ChatTemplate | ChatTemplateError | None
    try:
        template = load_chat_template(tokenizer_folder, tokenizer.special_tokens, args.chat_template)
    except ChatTemplateError as error:
        logger.warning("%s Chat requests will be refused.", error)
        template = error
    return tokenizer, template, read_model_facts(folder, args, has_chat_template=isinstance(template, ChatTemplate))


def seed_source(random_seed: int | None, frontend: int) -> Callable[[], int]:
    """Draws the seeds of requests that bring none: a function of (random seed, frontend, how many before), or of nothing at all."""
    if random_seed is None:
        return lambda: int.from_bytes(os.urandom(8), "little")
    drawn = 0

    def draw() -> int:
        nonlocal drawn
        text = f"{random_seed}:{frontend}:{drawn}"
        drawn += 1
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    return draw
