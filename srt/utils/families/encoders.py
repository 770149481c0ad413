"""Encoders: models whose tokens see all others of their text, and which generate none. The library transformers runs them. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from srt.utils.config_values import positive_int, token_ids

ENDINGS: Final = ("Model", "ForMaskedLM", "ForSequenceClassification")


@dataclass(frozen=True, slots=True)
class Encoder:
    """What an encoder's config.json does not say."""

    title: str
    counts_from_padding: bool = False
    """Whether the first token's position is the number behind the padding token's id, so that fewer positions are left for a text."""
    tells_texts_apart: bool = False
    """Whether a classifier adds one vector to the tokens of the first text of a pair, and another one to those of the second."""


ENCODERS: Final[dict[str, Encoder]] = {
    "Albert": Encoder("ALBERT", tells_texts_apart=True),
    "Bert": Encoder("BERT, BGE, E5, MiniLM", tells_texts_apart=True),
    "Camembert": Encoder("CamemBERT", counts_from_padding=True),
    "DistilBert": Encoder("DistilBERT"),
    "Electra": Encoder("ELECTRA", tells_texts_apart=True),
    "MPNet": Encoder("MPNet", counts_from_padding=True),
    "ModernBert": Encoder("ModernBERT"),
    "Roberta": Encoder("RoBERTa", counts_from_padding=True),
    "XLMRoberta": Encoder("XLM-R, BGE-M3, multilingual E5", counts_from_padding=True),
}
"""By the beginning of the architecture's name."""


def encoder_of(architecture: str) -> Encoder | None:
    """Return the encoder that this architecture names; None if it names none that is served."""
    for ending in ENDINGS:
        if architecture.endswith(ending):
            return ENCODERS.get(architecture.removesuffix(ending))
    return None


def num_positions(encoder: Encoder, raw: Mapping[str, Any]) -> int:
    """Return the number of tokens that a text can have."""
    count = positive_int(raw, "max_position_embeddings")
    if not encoder.counts_from_padding:
        return count
    padding = token_ids("config.json", {"pad_token_id": 1, **raw}, "pad_token_id")
    return count - max(padding, default=0) - 1
