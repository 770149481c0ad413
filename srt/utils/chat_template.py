"""Chat templates: render the Jinja text of a model's authors in a sandbox, with the helpers that such texts expect."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

_RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt"))


class ChatTemplateError(ValueError):
    """The conversation cannot be rendered; the message is one sentence."""


class ChatTemplate:
    """A model's chat templates by name: `default`, and `tool_use` if conversations with tools have their own."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Compile the templates; ChatTemplateError if one of them is not valid."""
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"The chat template cannot be compiled: {error}.") from error
        self.source = "\n".join(sources.values())
        # gpt-oss' template has its own name for the reasoning of a message.
        self._reads_thinking = "message.thinking" in self.source and "reasoning_content" not in self.source
        self._special_tokens = dict(special_tokens)
        self._wants_objects: dict[jinja2.Template, bool] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt. With `continue_final_message` it ends after the last message's content, for the model to continue there.

        Arguments of calls are objects; a template that wants them as text gets JSON.
        """
        taken = sorted(_RESERVED & set(variables or ()))
        if taken:
            raise ChatTemplateError(f"The chat template's variable {taken[0]} cannot be set this way.")
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError("A final message is continued, or a new one begun, not both.")
        template = self._template_for(tools)
        if any(message.get("tool_calls") for message in messages) and not self._takes_objects(template):
            messages = [_with_arguments_as_text(message) for message in messages]
        if self._reads_thinking:
            messages = [_with_thinking(message) for message in messages]
        final = _FinalMessage(messages) if continue_final_message else None
        try:
            text = template.render(
                **{**self._special_tokens, **(variables or {})},
                messages=list(messages) if final is None else final.marked(),
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # the template is someone else's program and may fail in any way a program can
            raise ChatTemplateError(f"The chat template does not take this conversation: {error}.") from error
        return text if final is None else final.cut_behind(text)

    def _takes_objects(self, template: jinja2.Template) -> bool:
        """Return whether the template writes the arguments of a call from an object, told by what it does with one."""
        if template not in self._wants_objects:
            try:
                text = template.render(
                    **self._special_tokens, messages=_PROBE, tools=None, documents=None, add_generation_prompt=True
                )
                self._wants_objects[template] = "probe_key" in text and "{'probe_key'" not in text
            except Exception:  # as for `render`
                self._wants_objects[template] = False
        return self._wants_objects[template]

    def _template_for(self, tools: Sequence[Mapping[str, Any]] | None) -> jinja2.Template:
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        if len(self._templates) == 1:
            return next(iter(self._templates.values()))
        raise ChatTemplateError("The model has several chat templates, and none of them is the default.")


_CALL = {"name": "probe", "arguments": {"probe_key": "probe_value"}}
_PROBE = (
    {"role": "user", "content": "probe"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "probe0000", "type": "function", "function": _CALL}]},
    {"role": "tool", "content": "probe", "tool_call_id": "probe0000", "name": "probe"},
)


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message with its reasoning under the name `thinking`.

    Beside a call such a template takes either reasoning or content: then the content, which the client has seen, stays.
    """
    reasoning = message.get("reasoning_content")
    if not reasoning or (message.get("tool_calls") and message.get("content")):
        return message
    return {**message, "thinking": reasoning}


def _with_arguments_as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _as_text(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else _to_json(arguments)


class _FinalMessage:
    """The message to continue. It is rendered with a random mark after its last word, because the template may contain the same words."""

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        content = messages[-1].get("content") if messages else None
        if not isinstance(content, str) or not content.strip():
            raise ChatTemplateError("A final message can be continued only if it has text.")
        self._messages = messages
        self._content = content.rstrip()
        self._trailing = content[len(self._content) :]
        self._mark = uuid.uuid4().hex

    def marked(self) -> list[Mapping[str, Any]]:
        """Return the messages for the template, the final one with the mark in it."""
        *others, final = self._messages
        return [*others, {**final, "content": self._content + self._mark + self._trailing}]

    def cut_behind(self, text: str) -> str:
        """Return the rendered text up to the end of the message. Trailing space stays if the template keeps it unchanged."""
        before, mark, after = text.rpartition(self._mark)
        if not mark or not before.endswith(self._content.lstrip()):
            raise ChatTemplateError("The chat template changes the final message, so it cannot be continued.")
        return before + self._trailing if after.startswith(self._trailing) else before


class _GenerationTag(jinja2.ext.Extension):
    """The tag `{% generation %}…{% endgeneration %}`, which marks training targets; in a prompt it renders as its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads it from the class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as JSON without the HTML escapes of Jinja's own filter, because models were not trained on those."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # local time, which is what model cards mean
