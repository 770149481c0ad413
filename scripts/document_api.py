"""Writes docs/api.md from the description that the server gives at /openapi.json.  `--check` only compares."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from srt.entrypoints.app import ROUTES
from srt.entrypoints.native_shapes import GenerateBody
from srt.entrypoints.openai.messages import MESSAGE_FIELDS, PART_FIELDS
from srt.entrypoints.openai.schema import ChatBody, StreamOptions
from srt.entrypoints.openapi import EVENTS, JSON, OPERATIONS, describe
from srt.entrypoints.request_schema import RequestBody
from srt.entrypoints.service import Service
from srt.sampling.foreign_fields import EMPTY, ignored, is_one_of, unsupported
from srt.sampling.foreign_table import FIELDS, VERSIONS
from srt.sampling.sampling_params import PARAMETERS
from srt.server_args import ServerArgs

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
HEAD = """\
# The HTTP API

Written by `make docs` from the server's own description, which a running server gives at `/openapi.json` with the vocabulary and
the limits of its model. Requests are described by the classes that parse them; what is not listed here is refused by name.

- Errors under `/v1` have OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`; elsewhere `{"error": {"message"}}`.
  429 and 503 come with `Retry-After`. Every answer carries `X-Request-Id`, which a client may choose.
- An error behind the first token of a stream comes as an event, and `data: [DONE]` ends the stream all the same.
- `null` means default, wherever there is one.
- With `--api-key`, everything but health and the page's files needs `Authorization: Bearer KEY`.
- A web page of another origin is refused (403), unless `--cors-allow-origins` names it.
- `/abort_request` reaches a request through any frontend. The prompts of a batch that is named `x` are `x_0`, `x_1`, …: `x` names all.
"""
# Objects within bodies that have fields of other servers too: what they are called, their family and their own fields.
WITHIN: dict[type[RequestBody], tuple[tuple[str, str, Collection[str]], ...]] = {
    GenerateBody: (("`sampling_params`", "sampling_params", PARAMETERS),),
    ChatBody: (
        ("`messages`", "message", MESSAGE_FIELDS),
        ("Text parts", "text_part", PART_FIELDS),
        ("`stream_options`", "stream_options", StreamOptions.model_fields),
    ),
}
IF_EMPTY, ONLY_NULL = "passes if empty, `false`", "passes with `null` only"
FOREIGN = """
## Fields of other servers

Every field that the request classes of {packages} define is known,
so that a client may send a whole object with all its defaults. A field that is not supported passes where its value asks for
nothing: `null`; an empty value (`""`, `[]`, `{{}}`, also with nulls in it); and the values that the first column names, as a rule
some package's default. Any other value is refused with a 400 that names the field, as is every value of a field that nobody
defines. What is described above is supported as far as it says there; what is ignored never changes an answer.
"""


def render() -> str:
    """The page: a section for each route."""
    document = describe(ROUTES, Service(ServerArgs(model_path="MODEL")))
    missing, parts = [], [HEAD]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if "501" in operation["responses"]:
                missing.append(f"| `{path}` | {operation['summary'].removeprefix('Not supported: ')} |\n")
            else:
                parts.append(_section(f"{method.upper()} {path}", operation))
    parts.append("\n## Answered with 501\n\n| path | why |\n|---|---|\n" + "".join(missing))
    parts.append(_foreign_fields())
    return "".join(parts)


def _foreign_fields() -> str:
    packages = ", ".join(f"{package} {' and '.join(found)}" for package, found in VERSIONS.items())
    parts = [FOREIGN.format(packages=packages)]
    for title, _, rows in foreign_tables():
        parts.append(f"\n{title}:\n\n| what becomes of it | fields |\n|---|---|\n")
        parts += [f"| {what} | {', '.join(f'`{name}`' for name in names)} |\n" for what, names in rows.items() if names]
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
        yield f"`{path}`", body.FAMILY, _rows(body.FAMILY, body.model_fields)
        for title, family, own in WITHIN.get(body, ()):
            yield f"{title} of `{path}`", family, _rows(family, own)


def _rows(family: str, own: Collection[str]) -> dict[str, list[str]]:
    rows: dict[str, list[str]] = {"described above": sorted(set(own) & set(FIELDS[family])), IF_EMPTY: []}
    for name, values in sorted(unsupported(family, own).items()):
        passes = [f"`{json.dumps(value)}`" for value in values if not is_one_of(value, EMPTY)]
        what = ONLY_NULL if values == (None,) else ", ".join(["passes if empty", *passes])
        rows.setdefault(what, []).append(name)
    rows[ONLY_NULL] = rows.pop(ONLY_NULL, [])
    rows["ignored"] = sorted(ignored(family, own))
    return rows


def _section(title: str, operation: dict[str, Any]) -> str:
    lines = [f"\n## {title}\n\n{' '.join(operation['description'].split())}\n"]
    fields = [(one["name"], one["schema"], one["description"]) for one in operation.get("parameters", [])]
    body = operation.get("requestBody", {}).get("content", {}).get(JSON, {}).get("schema", {})
    shown = _shown([*fields, *_fields(body)])
    if shown:
        lines.append("\n| field | type | meaning |\n|---|---|---|\n" + "".join(_row(*one) for one in shown))
    answer = operation["responses"]["200"]["content"]
    answered = list(_fields(answer.get(JSON, {}).get("schema", {})))
    if answered and len(answered) < 100 and "server_info" not in title:
        lines.append(
            "\nAnswer:\n\n| field | type | meaning |\n|---|---|---|\n" + "".join(_row(*one) for one in answered)
        )
    if EVENTS in answer:
        lines.append("\nWith `stream`, server-sent events (`data: …`) up to `data: [DONE]`.\n")
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
    for part in schema.get("anyOf", [])[:1]:
        yield from _fields(part, prefix)
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
        return f"`{schema['const']}`"
    kind = schema.get("type", "any")
    if isinstance(kind, list):
        return " or ".join(one for one in kind if one != "null")
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    least = schema.get("minimum", schema.get("exclusiveMinimum"))
    if kind in ("integer", "number") and "maximum" in schema:
        return f"{kind}, {'above ' if 'exclusiveMinimum' in schema else ''}{least} to {schema['maximum']}"
    return str(kind)


def main() -> int:
    """Write the page, or compare it."""
    page = render()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page, "utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text("utf-8") == page:
        return 0
    print(f"{PAGE} is not what the routes say: run `make docs`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
