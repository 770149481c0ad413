"""What requests may ask of their logits beyond how they draw: how much of it there is room for, and how the device is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from srt.sampling.sampling_params import MAX_BIAS_ENTRIES, MAX_STOP_TOKEN_IDS

A = TypeVar("A")
NO_PENALTIES: Final = (1.0, 0.0, 0.0)  # repetition, frequency, presence
MAX_BIASES: Final = MAX_BIAS_ENTRIES
MAX_STOPS: Final = 2 * MAX_STOP_TOKEN_IDS  # the request's own, and the model's ends


@dataclass(frozen=True, slots=True)
class AdjustmentArrays(Generic[A]):
    """What the device's AdjustmentTables must be told of slots that were admitted. All int64 but where it says."""

    slots: A  # [S]
    penalties: A  # [S, 3] float32
    limits: A  # [S, 4]
    bias_slots: A  # one entry for every biased token
    bias_columns: A
    bias_ids: A
    bias_values: A  # float32
    stop_slots: A  # one entry for every stop id that is held back
    stop_columns: A
    stop_ids: A
