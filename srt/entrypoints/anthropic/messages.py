"""/v1/messages: the next message of a conversation. A call is written as that of a chat, and takes the same way to the model."""

from __future__ import annotations

import dataclasses
from typing import Any

from srt.entrypoints.anthropic.answers import TokenCount
from srt.entrypoints.anthropic.blocks import chat_messages, refuse_open_call
from srt.entrypoints.anthropic.message_answer import MessageAnswer
from srt.entrypoints.anthropic.schema import CountTokensBody, MessagesBody, PromptBody
from srt.entrypoints.anthropic.settings import chat_output_config, chat_thinking, shows_thinking
from srt.entrypoints.anthropic.tools import chat_tool_choice, chat_tools
from srt.entrypoints.exchange import Exchange
from srt.entrypoints.openai.chat import ChatCall, parse_call
from srt.entrypoints.request_schema import bad_parameter, renamed
from srt.entrypoints.service import Service
from srt.entrypoints.streaming import answer_call
from srt.managers.tokenizer_manager.api_types import RequestError
from srt.managers.tokenizer_manager.tokenizer_manager import TokenizerManager

# A chat's fields -> Anthropic's, for the texts of errors.
_WRITTEN_AS = {
    "response_format.json_schema.schema": "output_config.format.schema",
    "reasoning_effort": "output_config.effort",
    "max_new_tokens": "max_tokens",
    "stop": "stop_sequences",
    "input_ids": "messages",
    "tokens": "messages",
    "text": "messages",
}
_TOOL_WRITTEN_AS = (
    ("].function.parameters", "].input_schema"),
    ("].function.", "]."),
    ("tool_choice (required)", "tool_choice (any)"),
)


async def create_message(exchange: Exchange, service: Service) -> None:
    """Generate the next message of a conversation, in Anthropic's shape."""
    body = MessagesBody.parse(await exchange.read_json())
    engine = service.engine()
    try:
        call = _parse(body, service, {**_sampling(body), "stream": body.stream})
        # As in Anthropic's newer models, an answer ends where the model's context does.
        request = dataclasses.replace(call.request, params=dataclasses.replace(call.request.params, may_shorten=True))
        answer = MessageAnswer(
            call.identity,
            call.output_form.new_parts(engine, request.params),
            max_tokens=body.max_tokens,
            shows_thinking=shows_thinking(body.thinking),
        )
        await answer_call(
            exchange, engine, [request], answer, stream=body.stream, interval=service.args.stream_interval
        )
    except RequestError as error:
        raise _in_own_words(error) from error


async def count_tokens(exchange: Exchange, service: Service) -> None:
    """Count the tokens of the prompt that /v1/messages would make of the same fields.

    A text that is far too long for the model is refused, as /v1/messages refuses it: counting all of it could take a minute.
    """
    body = CountTokensBody.parse(await exchange.read_json())
    try:
        request = await service.engine().tokenized(_parse(body, service, {}).request)
    except RequestError as error:
        raise _in_own_words(error) from error
    answer: TokenCount = {"input_tokens": len(request.input_ids or ())}
    await exchange.send_json(answer)


def _in_own_words(error: RequestError) -> RequestError:
    """Return an error of a chat with the names that this API has."""
    own = renamed(error, _WRITTEN_AS)
    for theirs, ours in _TOOL_WRITTEN_AS:
        own.message = own.message.replace(theirs, ours)
    return own


def _parse(body: PromptBody, service: Service, fields: dict[str, Any]) -> ChatCall:
    """Return the call of a chat that the body asks for, with these fields of a chat; raise RequestError for a wrong one."""
    return parse_call({**_prompt(body, service.engine()), **fields}, service, "msg_")


def _prompt(body: PromptBody, engine: TokenizerManager) -> dict[str, Any]:
    """Return the fields of a chat that make the same prompt."""
    messages = chat_messages(body.system, body.messages)
    refuse_open_call(messages)
    chat: dict[str, Any] = {"model": body.model, "messages": messages}
    if messages[-1]["role"] == "assistant":
        chat["continue_final_message"] = True
    if body.tools:
        chat["tools"] = chat_tools(body.tools)
    if body.tool_choice is not None:
        chat |= chat_tool_choice(body.tool_choice)
    if body.thinking is not None:
        chat |= chat_thinking(body.thinking, engine)
    if body.output_config is not None:
        chat |= chat_output_config(body.output_config, engine)
    return chat


def _sampling(body: MessagesBody) -> dict[str, Any]:
    if any(not stop for stop in body.stop_sequences):
        raise bad_parameter("stop_sequences", "must not contain an empty string")
    return {
        "max_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences or None,
    }
