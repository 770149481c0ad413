"""/v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

from srt.entrypoints.answers import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobLists,
    ChatTextChunk,
    Ending,
    OutputFields,
    PromptFields,
)
from srt.entrypoints.exchange import Exchange
from srt.entrypoints.openai.messages import plain_messages
from srt.entrypoints.openai.models import check_model
from srt.entrypoints.openai.parts import ChatLogprobs, Identity, Usage, finish_fields, last_chunks
from srt.entrypoints.openai.prompt_facts import PromptFacts
from srt.entrypoints.openai.refusals import refuse_agent_fields
from srt.entrypoints.openai.schema import ChatBody
from srt.entrypoints.request_schema import bad_parameter, checked_sampling_params, renamed
from srt.entrypoints.service import Service
from srt.entrypoints.streaming import TextEvent, answer_call, event
from srt.managers.tokenizer_manager.api_types import ChoiceUpdate, GenerateInput, RequestError
from srt.managers.tokenizer_manager.tokenizer_manager import TokenizerManager

_KIND, _CHUNK = "chat.completion", "chat.completion.chunk"
_NO_IDS: OutputFields = {}
_ROLE: ChatDelta = {"role": "assistant", "content": ""}


async def chat(exchange: Exchange, service: Service) -> None:
    given = await exchange.read_json()
    refuse_agent_fields(given)
    body = ChatBody.parse(given)
    model = check_model(body.model, service)
    engine = service.engine()
    identity = Identity.new("chatcmpl", body, model)
    usage = Usage(body)
    request = parse_input(body, identity, engine)
    answer = ChatAnswer(body, identity, usage, engine)
    try:
        await answer_call(
            exchange, engine, [request], answer, stream=body.stream, interval=service.args.stream_interval
        )
    except RequestError as error:
        raise renamed(error, body.written_as("messages")) from error


def parse_input(body: ChatBody, identity: Identity, engine: TokenizerManager) -> GenerateInput:
    body.check_limits()
    add_generation_prompt = not body.continue_final_message
    if body.add_generation_prompt is not None:
        add_generation_prompt = body.add_generation_prompt
    if body.continue_final_message and add_generation_prompt:
        raise bad_parameter("continue_final_message", "and add_generation_prompt exclude each other")
    params = checked_sampling_params(
        body.sampling(), lambda given: engine.sampling_params(given, None), body.written_as("messages")
    )
    messages = plain_messages(body.messages)
    if body.continue_final_message and messages[-1]["role"] != "assistant":
        raise bad_parameter("continue_final_message", "needs a last message with the role assistant")
    prompt = engine.text.apply_chat_template(
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=body.continue_final_message,
        variables=body.chat_template_kwargs,
    )
    return GenerateInput(
        params=params,
        text=prompt,
        rid=identity.id,
        logprobs=body.logprob_request(),
        cache_salt=body.salt,
        priority=body.priority,
        stream=body.stream,
        is_logged=not body.no_logs,
        is_counted=body.log_metrics,
        wants_prompt_ids=body.return_token_ids,
        add_special_tokens=body.add_special_tokens,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
    )


class ChatAnswer:
    """The writer of a call's answer as chat.completion objects. A choice's first chunk has the role, its last one the finish reason."""

    def __init__(self, body: ChatBody, identity: Identity, usage: Usage, engine: TokenizerManager) -> None:
        self._identity = identity
        self._usage = usage
        self._logprobs = ChatLogprobs(engine, body) if body.logprobs else None
        self._facts = PromptFacts(body, engine.text.token_text)
        self._of_prompt: PromptFields = {}
        self._whole: dict[int, ChatChoice] = {}
        self._began = [False] * body.n
        # By choice, a template for events that differ only in text. None before the first text, or if more than the text changes.
        self._text_events: list[TextEvent | None] = [None] * body.n

    # ---- Whole

    def add(self, prompt: int, update: ChoiceUpdate) -> None:
        """Add a choice; `update` is all of it."""
        self._usage.add(prompt, update)
        self._whole[update.index] = {
            "index": update.index,
            "message": {"role": "assistant", "content": update.text, "refusal": None},
            "logprobs": self._write_logprobs(update),
            **finish_fields(update.finish),
            "seed": update.seed,
            **self._facts.of_output(update),
        }
        self._of_prompt = self._facts.of_prompt(update)

    def result(self) -> ChatCompletion:
        return {
            **self._identity.head(_KIND),
            "choices": [self._whole[index] for index in sorted(self._whole)],
            "usage": self._usage.write(),
            **self._of_prompt,
            **self._usage.sglext(),
        }

    # ---- Streamed

    def events(self, prompt: int, update: ChoiceUpdate) -> bytes:
        fast = self._text_events[update.index]
        if fast is not None and update.finish is None:
            return fast.write(update.text) if update.text else b""
        self._usage.add(prompt, update)
        events = b""
        if not self._began[update.index]:
            self._began[update.index] = True
            events = event({**self._object(update, _ROLE), **self._facts.of_prompt(update)})
        if self._logprobs is not None and update.output_logprobs:
            events += self._chunk(update, {"content": update.text}, self._write_logprobs(update))
        elif update.text or (self._facts.has_ids and update.ids):
            events += self._chunk(update, {"content": update.text})
            if self._logprobs is None and not self._facts.has_ids and not self._usage.in_every_chunk:
                self._text_events[update.index] = TextEvent(lambda text: self._object(update, {"content": text}))
        if update.finish is not None:
            finish = finish_fields(update.finish)
            events += event(self._object(update, {}, None, finish))
        return events

    def last_events(self) -> bytes:
        return last_chunks(self._identity.head(_CHUNK), self._usage)

    def _chunk(self, update: ChoiceUpdate, delta: ChatDelta, logprobs: ChatLogprobLists | None = None) -> bytes:
        """Return the event with an update's text, logprobs and ids."""
        return event(self._object(update, delta, logprobs, more=self._facts.of_output(update)))

    def _object(
        self,
        update: ChoiceUpdate,
        delta: ChatDelta,
        logprobs: ChatLogprobLists | None = None,
        finish: Ending | None = None,
        more: OutputFields = _NO_IDS,
    ) -> ChatTextChunk:
        choice: ChatChunkChoice = {
            "index": update.index,
            "delta": delta,
            "logprobs": logprobs,
            **(finish or finish_fields(None)),
            "seed": update.seed,
            **more,
        }
        return {**self._identity.head(_CHUNK), "choices": [choice], **self._usage.in_chunk()}

    def _write_logprobs(self, update: ChoiceUpdate) -> ChatLogprobLists | None:
        return None if self._logprobs is None else self._logprobs.write(update.output_logprobs)
