"""A request for a response, as the request for a chat that it is; and refusals of that chat in the names of the Responses API."""

from __future__ import annotations

import re
from typing import Any

from srt.entrypoints.errors import ApiError
from srt.entrypoints.openai.responses.input_items import Message
from srt.entrypoints.openai.responses.members import checked_text
from srt.entrypoints.openai.responses.schema import CHOICE, FORMAT, REASONING, TEXT, TOOL, ResponsesBody
from srt.entrypoints.request_schema import bad_parameter
from srt.managers.tokenizer_manager.api_types import RequestError
from srt.sampling.parameter_checks import kind_of, show

# Fields that chats have with the same meaning.
_SAME = (
    *("model", "stream", "temperature", "top_p", "parallel_tool_calls", "top_k", "min_p", "frequency_penalty"),
    *("presence_penalty", "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "include_stop_str_in_output"),
    *("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "seed", "cache_salt", "extra_key"),
    *("priority", "routed_dp_rank", "data_parallel_rank", "chat_template_kwargs"),
)
# Names in refusals of chats -> names here, the first that fits. A name that is a common word is one only at the beginning.
_NAMES = (
    (r"^messages\b", "input"),
    (r"^tools(\[\d+\])\.function\.", r"tools\1."),
    (r"^tool_choice\.function\.", "tool_choice."),
    (r"\bresponse_format\.json_schema\b", "text.format"),
    (r"\bresponse_format\b", "text.format"),
    (r"\breasoning_effort\b", "reasoning.effort"),
    (r"\bmax_(?:completion_tokens|new_tokens|tokens)\b", "max_output_tokens"),
    (r"^rid\b", "request_id"),
)


def chat_fields(body: ResponsesBody, messages: list[Message], response_id: str) -> dict[str, Any]:
    """Return the JSON of the chat with these messages, which the instructions come before."""
    fields = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if body.instructions is not None:
        messages = [{"role": "system", "content": body.instructions}, *messages]
    text, reasoning = TEXT.check("text", body.text), REASONING.check("reasoning", body.reasoning)
    fields |= {"messages": messages, "rid": response_id, "tools": _tools(body.tools), "tool_choice": _choice(body)}
    if body.max_output_tokens is not None:
        fields["max_completion_tokens"] = body.max_output_tokens
    if "format" in text:
        fields["response_format"] = _response_format(text["format"])
    if "effort" in reasoning:
        fields["reasoning_effort"] = checked_text("reasoning.effort", reasoning["effort"])
    return fields


def _tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_tool(f"tools[{number}]", tool) for number, tool in enumerate(tools)]


def _tool(where: str, tool: dict[str, Any]) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        raise bad_parameter(f"{where}.type", f"must be function, not {show(kind)}: this server has no tools of its own")
    function = TOOL.check(where, tool)
    return {"type": function.pop("type"), "function": function}


def _choice(body: ResponsesBody) -> str | dict[str, Any]:
    choice = body.tool_choice
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise bad_parameter("tool_choice", f"must be none, auto, required or an object, not {show(choice)}")
        return choice
    if choice.get("type") != "function":
        reason = f"must be function, not {show(choice.get('type'))}: this server has no tools of its own"
        raise bad_parameter("tool_choice.type", reason)
    name = checked_text("tool_choice.name", CHOICE.check("tool_choice", choice)["name"])
    return {"type": "function", "function": {"name": name}}


def _response_format(given: object) -> dict[str, Any]:
    members = FORMAT.check("text.format", given)
    kind = members.pop("type")
    for name in members.keys() & {"name", "description"}:
        checked_text(f"text.format.{name}", members[name])
    if type(members.get("strict", True)) is not bool:
        raise bad_parameter("text.format.strict", f"must be true or false, not {kind_of(members['strict'])}")
    if kind == "json_schema":
        return {"type": kind, "json_schema": members}
    if kind not in ("text", "json_object"):
        raise bad_parameter("text.format.type", f"must be text, json_object or json_schema, not {show(kind)}")
    if members:
        raise bad_parameter(f"text.format.{next(iter(members))}", "belongs to the type json_schema")
    return {"type": kind}


def renamed(error: RequestError) -> RequestError:
    """Return the refusal of a chat with the names of the Responses API."""
    parameter = error.parameter
    if parameter is not None:
        parameter = _renamed(parameter).partition(".")[0]
    if isinstance(error, ApiError):
        return ApiError(error.status, _renamed(error.message), parameter, code=error.code)
    return RequestError(error.status, _renamed(error.message), parameter, error.retry_after_s)


def _renamed(text: str) -> str:
    for theirs, ours in _NAMES:
        text = re.sub(theirs, ours, text)
    return text
