"""Anthropic's `thinking` and `output_config`, written as fields of a chat."""

from __future__ import annotations

from typing import Any

from srt.entrypoints.openai.schema import EFFORTS
from srt.entrypoints.request_schema import bad_parameter
from srt.managers.tokenizer_manager.tokenizer_manager import TokenizerManager
from srt.sampling.parameter_checks import kind_of, show

_KINDS = ("enabled", "disabled", "adaptive")
_DISPLAYS = (None, "summarized", "omitted")
_SWITCHES = ("enable_thinking", "thinking")  # variables of chat templates
_USUAL_EFFORT = "high"  # what Anthropic's API takes an absent effort for
_EFFORTS = tuple(effort for effort in EFFORTS if effort not in ("none", "minimal"))
MIN_BUDGET = 1024
THINKING_SCHEMA: dict[str, Any] = {
    "properties": {
        "type": {
            "enum": list(_KINDS),
            "description": "enabled, adaptive: the template's switch is on; disabled: it is off.",
        },
        "budget_tokens": {
            "type": ["integer", "null"],
            "minimum": MIN_BUDGET,
            "description": "Needed by enabled. The reasoning ends where the model ends it, or at max_tokens.",
        },
        "display": {"enum": list(_DISPLAYS), "description": "omitted: the answer has no thinking blocks."},
    },
    "required": ["type"],
    "additionalProperties": False,
}
OUTPUT_CONFIG_SCHEMA: dict[str, Any] = {
    "properties": {
        "effort": {
            "enum": [*_EFFORTS, None],
            "description": "How much the model reasons, for chat templates with reasoning_effort. `high` passes with any.",
        },
        "format": {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {
                        "type": {"const": "json_schema", "description": "The kind of form."},
                        "schema": {"type": "object", "description": "A JSON Schema that the answer is valid by."},
                    },
                    "required": ["type", "schema"],
                    "additionalProperties": False,
                },
                {"type": "null"},
            ],
            "description": "The form of the answer.",
        },
        "task_budget": {"type": "null", "description": "Not supported yet: only null is accepted."},
    },
    "additionalProperties": False,
}


def shows_thinking(thinking: dict[str, Any] | None) -> bool:
    """Return whether the answer has blocks with the reasoning."""
    return thinking is None or thinking.get("display") != "omitted"


def chat_thinking(thinking: dict[str, Any], engine: TokenizerManager) -> dict[str, Any]:
    """Return a chat's variables of the template that ask for the same; raise RequestError (400) if the model cannot do it."""
    kind = thinking.get("type")
    if kind not in _KINDS:
        raise bad_parameter("thinking.type", f"must be one of {', '.join(_KINDS)}, not {show(kind)}")
    for member in thinking:
        if member not in THINKING_SCHEMA["properties"]:
            raise bad_parameter(f"thinking.{member[:100]}", "is not a known field")
    if thinking.get("display") not in _DISPLAYS:
        raise bad_parameter("thinking.display", f"must be summarized or omitted, not {show(thinking['display'])}")
    _check_budget(kind, thinking.get("budget_tokens"))
    switches = [name for name in _SWITCHES if engine.text.template_knows(name)]
    if switches:
        return {"chat_template_kwargs": dict.fromkeys(switches, kind != "disabled")}
    always_reasons = engine.model.reasoning_parser is not None
    if (kind == "enabled" and not always_reasons) or (kind == "disabled" and always_reasons):
        raise bad_parameter(
            "thinking.type", f"({kind}) is not supported by this model, whose chat template has no switch for it"
        )
    return {}


def _check_budget(kind: str, budget: object) -> None:
    if kind != "enabled":
        if budget is not None:
            raise bad_parameter("thinking.budget_tokens", f"does not belong to the type {kind}")
        return
    if type(budget) is not int or budget < MIN_BUDGET:
        shown = show(budget) if type(budget) is int else kind_of(budget)
        raise bad_parameter("thinking.budget_tokens", f"must be an integer of at least {MIN_BUDGET}, not {shown}")


def chat_output_config(config: dict[str, Any], engine: TokenizerManager) -> dict[str, Any]:
    """Return the fields of a chat that ask for the same effort and form."""
    for member, value in config.items():
        if member not in OUTPUT_CONFIG_SCHEMA["properties"]:
            raise bad_parameter(f"output_config.{member[:100]}", "is not a known field")
        if member == "task_budget" and value is not None:
            raise bad_parameter("output_config.task_budget", "is not supported yet")
    effort = config.get("effort")
    if effort is not None and effort not in _EFFORTS:
        raise bad_parameter("output_config.effort", f"must be one of {', '.join(_EFFORTS)}, not {show(effort)}")
    if effort == _USUAL_EFFORT and not engine.text.template_knows("reasoning_effort"):
        effort = None
    fields = {} if effort is None else {"reasoning_effort": effort}
    form = config.get("format")
    return fields if form is None else {**fields, "response_format": _response_format(form)}


def _response_format(form: object) -> dict[str, Any]:
    where = "output_config.format"
    if not isinstance(form, dict):
        raise bad_parameter(where, f"must be an object, not {kind_of(form)}")
    if form.get("type") != "json_schema":
        raise bad_parameter(f"{where}.type", f"must be json_schema, not {show(form.get('type'))}")
    for member in form:
        if member not in ("type", "schema"):
            raise bad_parameter(f"{where}.{member[:100]}", "is not a known field")
    if not isinstance(form.get("schema"), dict):
        raise bad_parameter(f"{where}.schema", f"must be an object, not {kind_of(form.get('schema'))}")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"]}}
