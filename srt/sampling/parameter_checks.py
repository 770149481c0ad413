"""Checks of sampling parameters: an object per kind of value, which checks a client's value and describes itself in JSON Schema.

A check takes (name, value) and returns the value as `SamplingParams` holds it, or raises ParameterError with a sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

MAX_STOP_REGEX_CHARS = 256


class ParameterError(ValueError):
    """Raised for a parameter that the client must change; `name` is the client's name for it."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} {reason}")
        self.name = name
        self.reason = reason


class Check(Protocol):
    def __call__(self, name: str, value: Any) -> Any: ...

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the accepted values."""


@dataclass(frozen=True, slots=True)
class Integer:
    least: int
    most: int

    def __call__(self, name: str, value: Any) -> int:
        if type(value) is not int:
            raise ParameterError(name, f"must be an integer, not {kind_of(value)}")
        if not self.least <= value <= self.most:
            raise ParameterError(name, f"must be at least {self.least} and at most {self.most}, not {show(value)}")
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.least, "maximum": self.most}


@dataclass(frozen=True, slots=True)
class Number:
    least: float
    most: float
    open_low: bool = False  # `least` itself is refused

    def __call__(self, name: str, value: Any) -> float:
        if type(value) not in (int, float):
            raise ParameterError(name, f"must be a number, not {kind_of(value)}")
        if not ((self.least < value if self.open_low else self.least <= value) and value <= self.most):  # NaN fails too
            raise ParameterError(
                name,
                f"must be {'above' if self.open_low else 'at least'} {self.least:g} and at most {self.most:g}, not {show(value)}",
            )
        return float(value)

    def schema(self) -> dict[str, Any]:
        return {
            "type": "number",
            "exclusiveMinimum" if self.open_low else "minimum": self.least,
            "maximum": self.most,
        }


@dataclass(frozen=True, slots=True)
class Boolean:
    def __call__(self, name: str, value: Any) -> bool:
        if type(value) is not bool:
            raise ParameterError(name, f"must be true or false, not {kind_of(value)}")
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class TopK:
    def __call__(self, name: str, value: Any) -> int:
        if type(value) is not int:
            raise ParameterError(name, f"must be an integer, not {kind_of(value)}")
        if value < -1:
            raise ParameterError(name, f"must be -1 or 0 (all), or at least 1, not {show(value)}")
        return -1 if value in (-1, 0) or value >= 1 << 30 else value

    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": -1}


@dataclass(frozen=True, slots=True)
class Strings:
    """A string or a list of strings."""

    most: int
    most_chars: int

    def __call__(self, name: str, value: Any) -> tuple[str, ...]:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
            raise ParameterError(name, "must be a string or a list of strings")
        if len(items) > self.most:
            raise ParameterError(name, f"may have at most {self.most} entries, not {len(items)}")
        if any(not item for item in items):
            raise ParameterError(name, "must not contain an empty string")
        if any(len(item) > self.most_chars for item in items):
            raise ParameterError(name, f"may have at most {self.most_chars} characters per entry")
        if not all(is_unicode(item) for item in items):
            raise ParameterError(name, "has half of a surrogate pair, which is not a character")
        return tuple(items)

    def schema(self) -> dict[str, Any]:
        one = {"type": "string", "minLength": 1, "maxLength": self.most_chars}
        return {"anyOf": [one, {"type": "array", "items": one, "maxItems": self.most}]}


@dataclass(frozen=True, slots=True)
class Expressions:
    """A regular expression or a list of them."""

    most: int

    def __call__(self, name: str, value: Any) -> tuple[str, ...]:
        patterns = self._strings(name, value)
        for pattern in patterns:
            try:
                matches_nothing = compile_stop_regex(pattern).search("") is not None
            except ValueError as error:
                raise ParameterError(
                    name, f"has an expression that cannot be compiled ({error}): {show(pattern)}"
                ) from error
            if matches_nothing:
                raise ParameterError(name, f"has an expression that matches the empty text: {show(pattern)}")
        return patterns

    def schema(self) -> dict[str, Any]:
        return self._strings.schema()

    @property
    def _strings(self) -> Strings:
        return Strings(self.most, MAX_STOP_REGEX_CHARS)


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A token id or a list of them. `check_vocabulary` later compares them with the vocabulary."""

    most: int

    def __call__(self, name: str, value: Any) -> tuple[int, ...]:
        items = [value] if type(value) is int else value
        if not isinstance(items, (list, tuple)) or not all(type(item) is int for item in items):
            raise ParameterError(name, "must be a list of token ids")
        if len(items) > self.most:
            raise ParameterError(name, f"may have at most {self.most} entries, not {len(items)}")
        return tuple(items)

    def schema(self) -> dict[str, Any]:
        one = {"type": "integer", "minimum": 0, "format": "token-id"}
        return {"anyOf": [{"type": "array", "items": one, "maxItems": self.most}, one]}


@dataclass(frozen=True, slots=True)
class Biases:
    """An object of token id: bias."""

    most: int

    def __call__(self, name: str, value: Any) -> tuple[tuple[int, float], ...]:
        if not isinstance(value, dict):
            raise ParameterError(name, f"must be an object of token id: bias, not {kind_of(value)}")
        if len(value) > self.most:
            raise ParameterError(name, f"may have at most {self.most} entries, not {len(value)}")
        pairs: dict[int, float] = {}
        for key, bias in value.items():
            if not (type(key) is int or (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 12)):
                raise ParameterError(name, f"must have token ids as keys, not {show(key)}")
            if type(bias) not in (int, float) or not -100 <= bias <= 100:
                raise ParameterError(name, f"must have numbers between -100 and 100 as values, not {show(bias)}")
            pairs[int(key)] = float(bias)
        return tuple(sorted(pairs.items()))

    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,11}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": self.most,
        }


@dataclass(frozen=True, slots=True)
class Seed:
    """A seed of 64 bits; a negative number is read as two's complement."""

    def __call__(self, name: str, value: Any) -> int:
        return _SEEDS(name, value) % (1 << 64)

    def schema(self) -> dict[str, Any]:
        return _SEEDS.schema()


_SEEDS = Integer(-(1 << 63), (1 << 64) - 1)


def compile_stop_regex(pattern: str) -> Any:
    """Compile the expression with RE2, whose time is linear, so that no client can stall a frontend. ValueError if it is refused."""
    import re2  # here, so that only requests that use it pay for the import

    options = re2.Options()
    options.log_errors = False
    # An expression that needs more is refused: compiling it would stall, and hundreds are kept.
    options.max_mem = 1 << 20
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0] if error.args else "invalid"
        raise ValueError(reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)) from error


def is_unicode(text: str) -> bool:
    """Return whether the text can be encoded as UTF-8: JSON can carry lone halves of surrogate pairs, which cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def show(value: Any) -> str:
    """Return the value for quoting in a sentence, cut to 80 characters."""
    if type(value) is int and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = ascii(value) if isinstance(value, str) and not is_unicode(value) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def kind_of(value: Any) -> str:
    names = {
        type(None): "null",
        str: "a string",
        list: "a list",
        dict: "an object",
        bool: "a boolean",
        int: "an integer",
        float: "a number",
    }
    return names.get(type(value), type(value).__name__)
