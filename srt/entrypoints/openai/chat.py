"""/v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from srt.entrypoints.answers import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobLists,
    ChatMessage,
    ChatTextChunk,
    Ending,
    OutputFields,
    PromptFields,
)
from srt.entrypoints.exchange import Exchange
from srt.entrypoints.openai.answer_form import answer_constraint
from srt.entrypoints.openai.message_parts import MessageParts, OutputForm
from srt.entrypoints.openai.messages import plain_messages
from srt.entrypoints.openai.models import find_model
from srt.entrypoints.openai.parts import ChatLogprobs, Identity, Usage, finish_fields, last_chunks
from srt.entrypoints.openai.prompt_facts import PromptFacts
from srt.entrypoints.openai.refusals import refuse_agent_fields
from srt.entrypoints.openai.schema import EFFORTS, ChatBody
from srt.entrypoints.openai.tool_choice import read_tool_choice
from srt.entrypoints.openai.tools import callable_tools, checked_tools
from srt.entrypoints.request_schema import bad_parameter, checked_sampling_params, renamed
from srt.entrypoints.service import Service
from srt.entrypoints.streaming import TextEvent, answer_call, event
from srt.managers.tokenizer_manager.api_types import ChoiceUpdate, GenerateInput, RequestError
from srt.managers.tokenizer_manager.tokenizer_manager import TokenizerManager
from srt.parsers.output_parser import HARMONY, is_left_open, markers_of
from srt.parsers.tools import Tools
from srt.sampling.parameter_checks import show

_KIND, _CHUNK = "chat.completion", "chat.completion.chunk"
_NO_IDS: OutputFields = {}
_TEXT_FIELDS: tuple[Literal["content", "reasoning_content"], ...] = ("content", "reasoning_content")
_NO_TEXT: ChatDelta = {"content": ""}
_ROLE: ChatDelta = {"role": "assistant", "content": ""}


async def chat(exchange: Exchange, service: Service) -> None:
    call = parse_call(await exchange.read_json(), service, "chatcmpl-")
    body, engine = call.body, service.engine()
    usage = Usage(body)
    parts = None if call.form is None else [call.form.new_parts(engine, call.request.params) for _ in range(body.n)]
    usage.parts = parts or []
    answer = ChatAnswer(body, call.identity, usage, engine, parts)
    try:
        await answer_call(
            exchange, engine, [call.request], answer, stream=body.stream, interval=service.args.stream_interval
        )
    except RequestError as error:
        raise renamed(error, body.written_as("messages")) from error


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A checked call for the next message of a conversation. Calls of /v1/messages and /v1/responses are turned into it, too."""

    body: ChatBody
    identity: Identity
    request: GenerateInput
    form: OutputForm | None  # how reasoning and calls are written in its outputs; None: an output is content only

    @property
    def output_form(self) -> OutputForm:
        """Return how to read the outputs; if `form` is None, so that all text is content."""
        return self.form or OutputForm(None, None, Tools({}), is_open=False)


def parse_call(given: object, service: Service, prefix: str) -> ChatCall:
    """Return the call that a body of a chat asks for; raise RequestError for a wrong one. A random id begins with `prefix`."""
    refuse_agent_fields(given, has_tools=True)
    body = ChatBody.parse(given)
    model, adapter = find_model(body.model, body.lora_path, service)
    identity = Identity.new(prefix, body, model)
    request, form = parse_input(body, identity, service.engine())
    return ChatCall(body, identity, dataclasses.replace(request, adapter=adapter), form)


def parse_input(
    body: ChatBody, identity: Identity, engine: TokenizerManager
) -> tuple[GenerateInput, OutputForm | None]:
    """Return the input for the engine, and how reasoning and calls are written in its outputs. The form None says: not at all."""
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
    tools = checked_tools(body.tools) if body.tool_choice != "none" else []
    choice = read_tool_choice(body.tool_choice, tools)
    prompt = engine.text.apply_chat_template(
        messages,
        tools=tools or None,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=body.continue_final_message,
        variables={**_effort(body, engine), **body.chat_template_kwargs},
    )
    continued = messages[-1]["content"] if body.continue_final_message else None
    form = _output_form(body, engine, tools, prompt, continued)
    constraint = answer_constraint(body, engine, tools, choice, prompt, continued)
    if constraint is not None:
        params = dataclasses.replace(params, constraint=constraint)
    if form is not None and any(map(engine.text.is_special, markers_of(form.tool_call_parser, form.reasoning_parser))):
        params = dataclasses.replace(params, skip_special_tokens=False)
    request = GenerateInput(
        params=params,
        text=prompt,
        rid=identity.id,
        logprobs=body.logprob_request(),
        cache_salt=body.salt,
        priority=body.priority,
        replica=body.replica,
        stream=body.stream,
        is_logged=not body.no_logs,
        is_counted=body.log_metrics,
        wants_prompt_ids=body.return_token_ids or (form is not None and form.reasoning_parser is not None),
        add_special_tokens=body.add_special_tokens,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
    )
    return request, form


def _output_form(
    body: ChatBody, engine: TokenizerManager, tools: list[dict[str, Any]], prompt: str, continued: str | None
) -> OutputForm | None:
    calls, reasoning = engine.model.tool_call_parser, engine.model.reasoning_parser
    if tools and calls is None:
        reason = "are not supported with this model, whose chat template shows no form of calls that is known"
        raise bad_parameter("tools", f"{reason}: start the server with --tool-call-parser")
    if not tools:
        calls = None
    if reasoning not in HARMONY and not body.separate_reasoning:
        reasoning = None
    if calls is None and reasoning is None:
        return None
    return OutputForm(
        calls,
        reasoning,
        callable_tools(tools),
        is_open=reasoning is not None and is_left_open(reasoning, prompt, continued),
        separates_reasoning=body.separate_reasoning,
        streams_reasoning=body.stream_reasoning,
        parallel_calls=body.parallel_tool_calls,
    )


def _effort(body: ChatBody, engine: TokenizerManager) -> dict[str, Any]:
    """Return the template's variables for reasoning_effort."""
    effort = body.reasoning_effort
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise bad_parameter("reasoning_effort", f"must be one of {', '.join(EFFORTS)}, not {show(effort)}")
    if engine.text.template_knows("reasoning_effort"):
        return {"reasoning_effort": effort}
    switches = [name for name in ("enable_thinking", "thinking") if engine.text.template_knows(name)]
    if effort == "none" and switches:
        return dict.fromkeys(switches, False)
    raise bad_parameter("reasoning_effort", f"({effort}) is not supported by this model's chat template")


class ChatAnswer:
    """The writer of a call's answer as chat.completion objects. A choice's first chunk has the role, its last one the finish reason."""

    def __init__(
        self,
        body: ChatBody,
        identity: Identity,
        usage: Usage,
        engine: TokenizerManager,
        parts: Sequence[MessageParts] | None = None,
    ) -> None:
        """`parts` has a reader for each choice, which splits its text into reasoning, content and calls. None: all text is content."""
        self._identity = identity
        self._parts = parts
        self._usage = usage
        self._logprobs = ChatLogprobs(engine, body) if body.logprobs else None
        self._facts = PromptFacts(body, engine.text.token_text)
        self._of_prompt: PromptFields = {}
        self._whole: dict[int, ChatChoice] = {}
        self._began = [False] * body.n
        # Templates of events, by choice and field. They are used only if nothing but the text changes between events.
        self._text_events: dict[tuple[int, str], TextEvent] = {}
        self._has_plain_events = self._logprobs is None and not self._facts.has_ids and not usage.in_every_chunk

    # ---- Whole

    def add(self, prompt: int, update: ChoiceUpdate) -> None:
        """Add a choice; `update` is all of it."""
        self._usage.add(prompt, update)
        message: ChatMessage = {"role": "assistant", "content": update.text, "refusal": None}
        if self._parts is not None:
            message = self._parts[update.index].message(update)
        self._whole[update.index] = {
            "index": update.index,
            "message": message,
            "logprobs": self._write_logprobs(update),
            **self._finish(update),
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
        if self._parts is None and update.finish is None:
            fast = self._text_events.get((update.index, "content"))
            if fast is not None:
                return fast.write(update.text) if update.text else b""
        self._usage.add(prompt, update)
        events = b""
        if not self._began[update.index]:
            self._began[update.index] = True
            events = event({**self._object(update, _ROLE), **self._facts.of_prompt(update)})
        deltas: list[ChatDelta] = [{"content": update.text}] if update.text else []
        if self._parts is not None:
            deltas = self._parts[update.index].push(update)
        if self._has_plain_events:
            events += b"".join([self._text_event(update, delta) for delta in deltas])
        elif deltas or (self._logprobs is not None and update.output_logprobs) or (self._facts.has_ids and update.ids):
            first, *others = deltas or [_NO_TEXT]
            logprobs = self._write_logprobs(update) if update.output_logprobs else None
            events += event(self._object(update, first, logprobs, more=self._facts.of_output(update)))
            events += b"".join([event(self._object(update, delta)) for delta in others])
        if update.finish is not None:
            events += event(self._object(update, {}, None, self._finish(update)))
        return events

    def _text_event(self, update: ChoiceUpdate, delta: ChatDelta) -> bytes:
        """Return the event for a delta. The caller has checked that nothing but the text changes between events."""
        for field in _TEXT_FIELDS:
            text = delta.get(field)
            if text is not None:
                if (update.index, field) not in self._text_events:
                    self._text_events[update.index, field] = self._template(update, field == "content")
                return self._text_events[update.index, field].write(text)
        return event(self._object(update, delta))

    def _template(self, update: ChoiceUpdate, is_content: bool) -> TextEvent:
        return TextEvent(
            lambda text: self._object(update, {"content": text} if is_content else {"reasoning_content": text})
        )

    def _finish(self, update: ChoiceUpdate) -> Ending:
        if self._parts is None or update.finish is None:
            return finish_fields(update.finish)
        parts = self._parts[update.index]
        ending = finish_fields(parts.finish(update.finish))
        if parts.has_calls and ending["finish_reason"] == "stop":
            ending["finish_reason"] = "tool_calls"
        return ending

    def last_events(self) -> bytes:
        return last_chunks(self._identity.head(_CHUNK), self._usage)

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
