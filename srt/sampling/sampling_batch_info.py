"""What the sampler must know of a step's rows: chosen on the host from what admissions said, copied in one piece with the plan.

Parameters never change while a request has its slot, so they stay on the host; tokens and lengths are the device's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from srt.protocol.messages import Admission
from srt.sampling.no_filter import NO_TOP_K, NO_TOP_P

A = TypeVar("A")
HostArray = NDArray[Any]


class SamplingKind(IntEnum):
    """What the rows of a step ask for, at most."""

    PLAIN = 0  # a temperature
    FILTERED = 1  # and top_k, top_p, min_p
    OTHER = 2  # and whatever only the eager sampler does


@dataclass(frozen=True, slots=True)
class DrawArrays(Generic[A]):
    """How slots draw, as DrawTables has it."""

    temperatures: A
    seeds: A
    top_ks: A
    top_ps: A
    min_ps: A


@dataclass(frozen=True, slots=True)
class SamplingArrays(Generic[A]):
    """A step's sampling parameters, as numpy arrays or as tensors. `*_rows` count the rows that sample, from 0."""

    noisy_rows: A  # [N] int64: rows with a temperature
    temperatures: A  # [N] float32
    seeds: A  # [N] int64: the 64 bits
    filter_rows: A  # [F] int64: noisy rows with a filter
    filter_noisy: A  # [F] int64: where they are among the noisy rows
    top_ks: A  # [F] int64
    top_ps: A  # [F] float64
    min_ps: A  # [F] float64
    penalty_rows: A  # [P] int64
    penalty_prompt_lens: A  # [P] int64: tokens from here on are outputs
    repetition: A  # [P] float32
    frequency: A  # [P] float32
    presence: A  # [P] float32
    bias_rows: A  # one entry for every biased token, int64
    bias_ids: A  # int64
    bias_values: A  # float32
    stop_rows: A  # one entry for every stop id of rows with min_new_tokens, int64
    stop_ids: A  # int64
    stop_until: A  # int64: the position from which on the id may be drawn


@dataclass(frozen=True, slots=True)
class SamplingBatchInfo:
    """The rows that sample in a step. Counts are the host's, so that deciding which passes run waits for nothing."""

    num_rows: int
    slots: torch.Tensor  # [R] int64
    positions: torch.Tensor  # [R] int64: index in its sequence of the token that each row draws
    longest: int  # at least the largest position
    arrays: SamplingArrays[torch.Tensor]


class SamplingTable:
    """Sampling parameters by slot: one row from admission to the slot's next admission."""

    def __init__(self, num_slots: int) -> None:
        self._temperature = np.zeros(num_slots, np.float32)
        self._seed = np.zeros(num_slots, np.int64)
        self._top_k = np.zeros(num_slots, np.int64)
        self._top_p = np.zeros(num_slots, np.float64)
        self._min_p = np.zeros(num_slots, np.float64)
        self._repetition = np.ones(num_slots, np.float32)
        self._frequency = np.zeros(num_slots, np.float32)
        self._presence = np.zeros(num_slots, np.float32)
        self._prompt_len = np.zeros(num_slots, np.int64)
        self._min_new = np.zeros(num_slots, np.int64)
        self._is_filtered = np.zeros(num_slots, np.bool_)
        self._is_penalised = np.zeros(num_slots, np.bool_)
        self._kind = np.zeros(num_slots, np.int8)
        self._bias: dict[int, tuple[HostArray, HostArray]] = {}
        self._stop_ids: dict[int, HostArray] = {}

    def admit(self, admission: Admission) -> None:
        """Replace what the slot had."""
        slot, spec = admission.slot, admission.sampling
        self._temperature[slot] = spec.temperature
        self._seed[slot] = np.uint64(admission.seed).astype(np.int64)
        self._top_k[slot] = spec.top_k if spec.top_k > 0 else NO_TOP_K
        self._top_p[slot] = spec.top_p if spec.top_p < 1 else NO_TOP_P
        self._min_p[slot] = spec.min_p
        self._repetition[slot] = spec.repetition_penalty
        self._frequency[slot] = spec.frequency_penalty
        self._presence[slot] = spec.presence_penalty
        self._prompt_len[slot] = admission.prompt_len
        self._min_new[slot] = spec.min_new_tokens
        # The best token passes every filter, so a greedy row has none.
        self._is_filtered[slot] = spec.temperature > 0 and (spec.top_k > 0 or spec.top_p < 1 or spec.min_p > 0)
        self._is_penalised[slot] = (
            spec.repetition_penalty != 1 or spec.frequency_penalty != 0 or spec.presence_penalty != 0
        )
        self._bias.pop(slot, None)
        if len(spec.bias_ids):
            self._bias[slot] = (spec.bias_ids.astype(np.int64), spec.bias_values)
        self._stop_ids.pop(slot, None)
        if spec.min_new_tokens > 0 and len(spec.stop_ids):
            self._stop_ids[slot] = spec.stop_ids.astype(np.int64)
        kind = SamplingKind.FILTERED if self._is_filtered[slot] else SamplingKind.PLAIN
        if self._is_penalised[slot] or slot in self._bias or slot in self._stop_ids:
            kind = SamplingKind.OTHER
        self._kind[slot] = kind

    def kind_of(self, slots: NDArray[np.int64]) -> SamplingKind:
        """What rows of these slots ask for, at most."""
        return SamplingKind(int(self._kind[slots].max(initial=0)))

    def draws_of(self, slots: NDArray[np.int64]) -> DrawArrays[HostArray]:
        is_filtered = self._is_filtered[slots]
        return DrawArrays(
            temperatures=self._temperature[slots],
            seeds=self._seed[slots],
            top_ks=np.where(is_filtered, self._top_k[slots], NO_TOP_K),
            top_ps=np.where(is_filtered, self._top_p[slots], NO_TOP_P),
            min_ps=np.where(is_filtered, self._min_p[slots], 0.0),
        )

    def arrays(self, slots: NDArray[np.int64]) -> SamplingArrays[HostArray]:
        """The parameters of the rows that sample, in their order; `slots` are theirs."""
        noisy = np.flatnonzero(self._temperature[slots] > 0)
        noisy_slots = slots[noisy]
        filter_noisy = np.flatnonzero(self._is_filtered[noisy_slots])
        filter_slots = noisy_slots[filter_noisy]
        penalised = np.flatnonzero(self._is_penalised[slots])
        penalty_slots = slots[penalised]
        bias = [(row, *self._bias[slot]) for row, slot in _held_by(self._bias, slots)]
        stops = [(row, slot, self._stop_ids[slot]) for row, slot in _held_by(self._stop_ids, slots)]
        until = self._prompt_len + self._min_new
        return SamplingArrays(
            noisy_rows=noisy,
            temperatures=self._temperature[noisy_slots],
            seeds=self._seed[noisy_slots],
            filter_rows=noisy[filter_noisy],
            filter_noisy=filter_noisy,
            top_ks=self._top_k[filter_slots],
            top_ps=self._top_p[filter_slots],
            min_ps=self._min_p[filter_slots],
            penalty_rows=penalised,
            penalty_prompt_lens=self._prompt_len[penalty_slots],
            repetition=self._repetition[penalty_slots],
            frequency=self._frequency[penalty_slots],
            presence=self._presence[penalty_slots],
            bias_rows=_end_to_end([np.full(len(ids), row) for row, ids, _ in bias], np.int64),
            bias_ids=_end_to_end([ids for _, ids, _ in bias], np.int64),
            bias_values=_end_to_end([values for _, _, values in bias], np.float32),
            stop_rows=_end_to_end([np.full(len(ids), row) for row, _, ids in stops], np.int64),
            stop_ids=_end_to_end([ids for _, _, ids in stops], np.int64),
            stop_until=_end_to_end([np.full(len(ids), until[slot]) for _, slot, ids in stops], np.int64),
        )


def _held_by(holders: dict[int, Any], slots: NDArray[np.int64]) -> list[tuple[int, int]]:
    """(row, slot) of the rows whose slot is a key; costs nothing where nobody is."""
    if not holders:
        return []
    return [(row, slot) for row, slot in enumerate(slots.tolist()) if slot in holders]


def _end_to_end(parts: Sequence[HostArray], dtype: Any) -> HostArray:
    if not parts:
        return np.zeros(0, dtype)
    return np.concatenate(parts).astype(dtype, copy=False)
