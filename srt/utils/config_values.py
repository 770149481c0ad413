"""Typed access to config.json: a value of the wrong type or range raises a ModelError that names its key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srt.utils.model_error import ModelError

LARGEST = 2**31 - 1
"""Upper limit of every count and token id; a larger number is a mistake."""


def positive_int(raw: Mapping[str, Any], key: str, default: int | None = None, most: int = LARGEST) -> int:
    value = _stated(raw, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        limit = "" if most == LARGEST else f" of at most {most}"
        raise ModelError(f"config.json: {key} must be a positive integer{limit}, not {shown(value)}.")
    return value


def positive_number(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = _stated(raw, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise ModelError(f"config.json: {key} must be a positive number, not {shown(value)}.")
    return float(value)


def flag(raw: Mapping[str, Any], key: str) -> bool:
    """Return the boolean at `key`; False if it is absent."""
    value = _stated(raw, key, False)
    if not isinstance(value, bool):
        raise ModelError(f"config.json: {key} must be true or false, not {shown(value)}.")
    return value


def mapping(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the object at `key`; empty if it is absent."""
    value = _stated(raw, key, {})
    if not isinstance(value, dict):
        raise ModelError(f"config.json: {key} must be an object, not {shown(value)}.")
    return value


def names(raw: Mapping[str, Any], key: str) -> list[str]:
    """Return the list of names at `key`; empty if it is absent."""
    value = _stated(raw, key, [])
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ModelError(f"config.json: {key} must be a list of names, not {shown(value)}.")
    return value


def token_ids(file: str, raw: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Return the token id or list of token ids at `key` without duplicates; empty if `file` has none."""
    value = _stated(raw, key, [])
    ids = value if isinstance(value, list) else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id <= LARGEST:
            raise ModelError(f"{file}: {key} must be a token id or a list of them, not {shown(value)}.")
    return tuple(dict.fromkeys(ids))


def shown(value: object) -> str:
    """Return the value as the user wrote it, shortened to 60 characters."""
    try:
        text = repr(value)
    except ValueError:  # an integer with too many digits to print
        return "such a large number"
    return text if len(text) <= 60 else text[:57] + "..."


def _stated(raw: Mapping[str, Any], key: str, default: Any) -> Any:
    """Return the value, or `default` if it is absent or null; ModelError if both are missing."""
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json has no {key}.")
    return value
