"""Writes docs/api.md from the description that the server gives at /openapi.json.  `--check` only compares."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from scripts.generated_page import write_or_check
from srt.entrypoints.app import ROUTES
from srt.entrypoints.native_shapes import GenerateBody
from srt.entrypoints.openai.messages import MESSAGE_FIELDS, PART_FIELDS
from srt.entrypoints.openai.schema import ChatBody, StreamOptions
from srt.entrypoints.openapi import EVENTS, JSON, OPERATIONS, STATUSES, describe
from srt.entrypoints.request_schema import RequestBody
from srt.entrypoints.service import Service
from srt.sampling.foreign_fields import EMPTY, ignored, is_one_of, unsupported
from srt.sampling.foreign_table import FIELDS, VERSIONS
from srt.sampling.sampling_params import CONSTRAINTS, PARAMETERS
from srt.server_args import ServerArgs

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
HEAD = """\
# The HTTP API

Every route with its fields. `make docs` writes this page from what a running server describes at `/openapi.json`; that
description also has the limits of its model. A field that is not listed here is refused by name.

| topic | rule |
|---|---|
| `null` | means the default of any field |
| errors under `/v1` | have OpenAI's shape: `{"error": {"message", "type", "param", "code"}}` |
| errors under `/v1/messages` | have Anthropic's: `{"type": "error", "error": {"type", "message"}, "request_id"}` |
| errors elsewhere | `{"error": {"message"}}` |
| an error after the first token of a stream | comes as an event; `data: [DONE]` follows where the stream would end with it |
| ids | every answer has the header `X-Request-Id`; a client may choose it |
| keys | with `--api-key`, all routes need `Authorization: Bearer KEY`, except health and the page's files |
| keys under `/v1/messages` | may also come as `x-api-key: KEY` |
| web pages of other origins | are refused (403), unless `--cors-allow-origins` names them |
| aborts | `/abort_request` works through any frontend |
| batches | the prompts of a batch named `x` are named `x_0`, `x_1`, …; aborting `x` ends them all |

## Statuses

429 and 503 come with the header `Retry-After`.

| status | meaning |
|---|---|
"""
# Objects within bodies that have fields of other servers too: what they are called, their family and their own fields.
WITHIN: dict[type[RequestBody], tuple[tuple[str, str, Collection[str]], ...]] = {
    GenerateBody: (("`sampling_params`", "sampling_params", {*PARAMETERS, *CONSTRAINTS}),),
    ChatBody: (
        ("`messages`", "message", MESSAGE_FIELDS),
        ("Text parts", "text_part", PART_FIELDS),
        ("`stream_options`", "stream_options", StreamOptions.model_fields),
    ),
}
# How streams end, by the tag of an operation.
ENDS = {
    "": " (`data: …`) up to `data: [DONE]`",
    "OpenAI responses": " with names, from `event: response.created` to the one that says how it ended",
    "Anthropic": " with names, from `event: message_start` to `event: message_stop`; an error is `event: error`",
}
ANSWER = "\nAnswer:\n\n"
LONG = 20  # rows of a table that is not repeated
DESCRIBED = "described above"
IF_EMPTY, ONLY_NULL = "passes if empty, `false`", "passes with `null` only"
FOREIGN = """
## Fields of other servers

A client may send a whole object with all its defaults: every field of these packages' request classes is known here.
The packages are {packages}.

- A field that is described above works as it says there. It is not repeated here.
- An unsupported field passes if its value asks for nothing: `null`, an empty value (`""`, `[]`, `{{}}`, also with nulls
  inside), or one of the values named in the first column. Most of these are some package's default.
- Any other value is refused with a 400 that names the field.
- An ignored field passes with any value, and never changes an answer.
- A field that no package defines is refused.
"""


def render() -> str:
    """Return the page: a section for each operation, whose title has all of its routes."""
    document = describe(ROUTES, Service(ServerArgs(model_path="MODEL")))
    missing: dict[str, list[str]] = {}
    sections: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if "501" in operation["responses"]:
                reason = operation["summary"].removeprefix("Not supported: ")
                missing.setdefault(reason, []).append(f"`{path}`")
            else:
                sections.setdefault(_section(operation), []).append(f"{method.upper()} {path}")
    parts = [HEAD, *(f"| {status} | {text} |\n" for status, text in STATUSES.items())]
    parts += _sections(sections)
    parts.append("\n## Answered with 501\n\n| why | paths |\n|---|---|\n")
    parts += [f"| {reason} | {', '.join(paths)} |\n" for reason, paths in missing.items()]
    return "".join([*parts, _foreign_fields()])


def _sections(sections: dict[str, list[str]]) -> Iterator[str]:
    """The sections with their titles. A long table of an answer is written once."""
    first: dict[str, str] = {}
    for section, routes in sections.items():
        before, answer, behind = section.partition(ANSWER)
        table, gap, after = behind.partition("\n\n")
        title = first.setdefault(table, routes[0])
        if table.count("\n") > LONG and title != routes[0]:
            answer, table = f"\nAnswer: that of `{title}`.", ""
        yield f"\n## {', '.join(routes)}\n\n{before}{answer}{table}{gap}{after}"


def _foreign_fields() -> str:
    packages = ", ".join(f"{package} {' and '.join(found)}" for package, found in VERSIONS.items())
    parts = [FOREIGN.format(packages=packages)]
    for title, _, rows in foreign_tables():
        shown = [(what, names) for what, names in rows.items() if names and what != DESCRIBED]
        if shown:
            parts.append(f"\n{title}:\n\n| what becomes of it | fields |\n|---|---|\n")
            parts += [f"| {what} | {', '.join(f'`{name}`' for name in names)} |\n" for what, names in shown]
    return "".join(parts)


def foreign_tables() -> Iterator[tuple[str, str, dict[str, list[str]]]]:
    """Title, family and rows of a table for each endpoint with a body, and for each kind of object within one: what becomes of every
    field that another package defines there."""
    bodies: dict[type[RequestBody], str] = {}
    for path, methods in ROUTES.items():
        for handler in methods.values():
            if handler in OPERATIONS and (body := OPERATIONS[handler].body) is not None:
                bodies.setdefault(body, path)
    for body, path in bodies.items():
        if not body.FAMILY:
            continue  # a route that no other server has
        yield f"`{path}`", body.FAMILY, _rows(body.FAMILY, body.model_fields)
        for title, family, own in WITHIN.get(body, ()):
            yield f"{title} of `{path}`", family, _rows(family, own)


def _rows(family: str, own: Collection[str]) -> dict[str, list[str]]:
    rows: dict[str, list[str]] = {DESCRIBED: sorted(set(own) & set(FIELDS[family])), IF_EMPTY: []}
    for name, values in sorted(unsupported(family, own).items()):
        passes = [f"`{json.dumps(value)}`" for value in values if not is_one_of(value, EMPTY)]
        what = ONLY_NULL if values == (None,) else ", ".join(["passes if empty", *passes])
        rows.setdefault(what, []).append(name)
    rows[ONLY_NULL] = rows.pop(ONLY_NULL, [])
    rows["ignored"] = sorted(ignored(family, own))
    return rows


def _section(operation: dict[str, Any]) -> str:
    lines = [f"{operation['description']}\n"]
    fields = [(one["name"], one["schema"], one["description"]) for one in operation.get("parameters", [])]
    body = operation.get("requestBody", {}).get("content", {}).get(JSON, {}).get("schema", {})
    shown = _shown([*fields, *_fields(body)])
    if shown:
        lines.append("\n| field | type | meaning |\n|---|---|---|\n" + "".join(_row(*one) for one in shown))
    answer = operation["responses"]["200"]["content"]
    answered = list(_fields(answer.get(JSON, {}).get("schema", {})))
    if answered and len(answered) < 100 and "server_info" not in operation["operationId"]:
        lines.append(f"{ANSWER}| field | type | meaning |\n|---|---|---|\n" + "".join(_row(*one) for one in answered))
    if EVENTS in answer and JSON in answer:
        lines.append(f"\nWith `stream`, server-sent events{ENDS.get(operation['tags'][0], ENDS[''])}.\n")
    others = [status for status in operation["responses"] if status != "200"]
    lines.append(f"\nOther statuses: {', '.join(others)}.\n")
    return "".join(lines)


def _shown(fields: list[tuple[str, Any, str]]) -> list[tuple[str, Any, str]]:
    return [one for one in fields if not one[2].startswith(("Not supported yet", "Accepted and ignored"))]


def _fields(schema: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """(path, schema, text) of every field, those of objects within it behind a dot."""
    for name, part in schema.get("properties", {}).items():
        yield prefix + name, part, part.get("description", "")
        yield from _fields(part, f"{prefix}{name}.")
    objects = [part for part in schema.get("anyOf", []) if "properties" in part]
    if len(objects) == 1:
        yield from _fields(objects[0], prefix)
    if isinstance(schema.get("items"), dict):
        yield from _fields(schema["items"], prefix)


def _row(name: str, schema: dict[str, Any], text: str) -> str:
    if "default" in schema:
        text += f" Default: `{json.dumps(schema['default'])}`."
    cells = [f"`{name}`", _kind(schema), text]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _kind(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(kind for kind in map(_kind, schema["anyOf"]) if kind != "null"))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"] if value is not None)
    if "const" in schema:
        value = schema["const"]
        return f"`{value if isinstance(value, str) else json.dumps(value)}`"
    kind = schema.get("type", "any")
    if isinstance(kind, list):
        return " or ".join(one for one in kind if one != "null")
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    least = schema.get("minimum", schema.get("exclusiveMinimum"))
    if kind in ("integer", "number") and "maximum" in schema:
        return f"{kind}, {'above ' if 'exclusiveMinimum' in schema else ''}{least} to {schema['maximum']}"
    return str(kind)


if __name__ == "__main__":
    raise SystemExit(write_or_check(PAGE, render(), "the routes say"))
