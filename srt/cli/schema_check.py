"""Say in a few words whether an answer of `srt chat` is valid for a JSON Schema."""

from __future__ import annotations

import json
import re
from typing import Any

LONGEST_REASON = 200  # characters; the validator quotes the value at fault, which may be all of a long answer


def judge(text: str, schema: Any) -> str:
    """Return a phrase that says whether a text is JSON and valid for the schema, or what is wrong.

    The server needs no validator, so the package `jsonschema` may be missing.
    """
    try:
        value = json.loads(text)
    except ValueError:
        return "not JSON, or not all of it"
    except RecursionError:
        return "not checked against the schema: too deeply nested"
    try:
        import jsonschema
        from referencing import Registry
        from referencing.exceptions import Unresolvable
    except ImportError:
        return "JSON, not checked against the schema: pip install jsonschema"
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    # An empty registry: a reference never makes the validator load a page.
    validator = kind(schema, registry=Registry(), format_checker=kind.FORMAT_CHECKER)
    try:
        error = jsonschema.exceptions.best_match(validator.iter_errors(value))
    except (re.error, Unresolvable, RecursionError) as failure:
        return _shortened(f"JSON, not checked against the schema: {failure}")
    if error is None:
        return "valid JSON for the schema"
    return _shortened(f"not valid for the schema: at {error.json_path}, {error.message}")


def _shortened(reason: str) -> str:
    return reason if len(reason) <= LONGEST_REASON else reason[: LONGEST_REASON - 1] + "…"
