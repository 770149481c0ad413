"""Architectures that the library transformers runs: the few facts of config.json that processes without the library need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srt.utils.config_values import positive_int
from srt.utils.model_error import ModelError

HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model", "dim")
MAX_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length")


class LibraryConfigReader:
    """config.json under the names that different architectures have for the same fact. Raises ModelError if a fact is missing."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        _refuse_parts(raw)
        self.vocab_size = positive_int(raw, "vocab_size")
        self.hidden_size = _first_stated(raw, HIDDEN_SIZE)
        self.max_position_embeddings = _first_stated(raw, MAX_POSITIONS)


def _refuse_parts(raw: Mapping[str, Any]) -> None:
    """Refuse models that are more than a decoder of text, and code that comes with the checkpoint."""
    name = (raw.get("architectures") or ["The model"])[0]
    if raw.get("is_encoder_decoder"):
        raise ModelError(
            f"{name} has an encoder beside its decoder, which is not supported: choose a decoder-only model."
        )
    for part in ("vision_config", "audio_config", "text_config"):
        if raw.get(part) is not None:
            raise ModelError(f"{name} has a {part} in config.json, but only models of nothing but text are supported.")


def _first_stated(raw: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    for key in keys:
        if raw.get(key) is not None:
            return positive_int(raw, key)
    raise ModelError(f"config.json has no {keys[0]}, nor {', '.join(keys[1:])}.")
