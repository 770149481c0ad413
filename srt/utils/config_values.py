"""Typed access to config.json: a value that is not what it should be is a ModelError that names its key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srt.utils.model_error import ModelError

LARGEST = 2**31 - 1
"""No count or token id in a model is larger; a larger number is a mistake."""


def positive_int(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = _stated(raw, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
        raise ModelError(f"config.json: {key} must be a positive integer, not {shown(value)}.")
    return value


def positive_number(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = _stated(raw, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise ModelError(f"config.json: {key} must be a positive number, not {shown(value)}.")
    return float(value)


def flag(raw: Mapping[str, Any], key: str) -> bool:
    """False where the file does not say."""
    value = _stated(raw, key, False)
    if not isinstance(value, bool):
        raise ModelError(f"config.json: {key} must be true or false, not {shown(value)}.")
    return value


def mapping(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Empty where the file does not say."""
    value = _stated(raw, key, {})
    if not isinstance(value, dict):
        raise ModelError(f"config.json: {key} must be an object, not {shown(value)}.")
    return value


def names(raw: Mapping[str, Any], key: str) -> list[str]:
    """Empty where the file does not say."""
    value = _stated(raw, key, [])
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ModelError(f"config.json: {key} must be a list of names, not {shown(value)}.")
    return value


def token_ids(file: str, raw: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """One id or a list of them, each once; empty where `file` does not say."""
    value = _stated(raw, key, [])
    ids = value if isinstance(value, list) else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id <= LARGEST:
            raise ModelError(f"{file}: {key} must be a token id or a list of them, not {shown(value)}.")
    return tuple(dict.fromkeys(ids))


def shown(value: object) -> str:
    """The value as the user wrote it, if that is short."""
    try:
        text = repr(value)
    except ValueError:  # an integer with too many digits to print
        return "such a large number"
    return text if len(text) <= 60 else text[:57] + "..."


def _stated(raw: Mapping[str, Any], key: str, default: Any) -> Any:
    """The value, or the default where it is absent or null; ModelError if there is neither."""
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json has no {key}.")
    return value
