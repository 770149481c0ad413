"""Logit adjustments (penalties, biases, stops held back): their limits, and the arrays that carry them to the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from srt.sampling.sampling_params import MAX_BIAS_ENTRIES, MAX_STOP_TOKEN_IDS

A = TypeVar("A")
NO_PENALTIES: Final = (1.0, 0.0, 0.0)  # repetition, frequency, presence
MAX_BIASES: Final = MAX_BIAS_ENTRIES
MAX_STOPS: Final = 2 * MAX_STOP_TOKEN_IDS  # the request's own and the model's end-of-text ids


@dataclass(frozen=True, slots=True)
class AdjustmentArrays(Generic[A]):
    """Updates of the device's AdjustmentTables for newly admitted slots. int64 unless noted."""

    slots: A  # [S]
    penalties: A  # [S, 3] float32
    limits: A  # [S, 4]
    bias_slots: A  # one entry per biased token
    bias_columns: A
    bias_ids: A
    bias_values: A  # float32
    stop_slots: A  # one entry per stop id that is held back until min_new_tokens
    stop_columns: A
    stop_ids: A
