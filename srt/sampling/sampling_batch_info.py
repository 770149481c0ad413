"""Sampling parameters of a step's rows: collected on the host from the admissions, and copied to the device in one piece with the plan.

Parameters never change while a request has its slot, so they stay on the host; tokens and lengths live on the device.
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
from srt.sampling.logit_adjustments import MAX_BIASES, MAX_STOPS, NO_PENALTIES, AdjustmentArrays
from srt.sampling.no_filter import NO_TOP_K, NO_TOP_P

A = TypeVar("A")
HostArray = NDArray[Any]


class SamplingKind(IntEnum):
    """The most that any row of a step asks of the sampler; each kind includes the ones before it."""

    PLAIN = 0  # temperature
    FILTERED = 1  # top_k, top_p, min_p
    ADJUSTED = 2  # penalties, biases, stops held back
    OTHER = 3  # anything that only the eager sampler does


@dataclass(frozen=True, slots=True)
class DrawArrays(Generic[A]):
    """Drawing parameters by slot, in the form of the device's DrawTables."""

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
    seeds: A  # [N] int64: the seed's 64 bits
    filter_rows: A  # [F] int64: noisy rows with a filter
    top_ks: A  # [F] int64
    top_ps: A  # [F] float64
    min_ps: A  # [F] float64
    adjusted_rows: A  # [W] int64: rows with adjustments; the adjustments themselves are in the device's tables


@dataclass(frozen=True, slots=True)
class SamplingBatchInfo:
    """The rows that sample in a step. The count is on the host, so that choosing the sampler's passes waits for no device result."""

    num_rows: int
    slots: torch.Tensor  # [R] int64
    positions: torch.Tensor  # [R] int64: index, in the row's sequence, of the token that it draws
    arrays: SamplingArrays[torch.Tensor]


class SamplingTable:
    """Sampling parameters by slot; a row keeps its values until the slot's next admission."""

    def __init__(self, num_slots: int) -> None:
        self._temperature = np.zeros(num_slots, np.float32)
        self._seed = np.zeros(num_slots, np.int64)
        self._top_k = np.zeros(num_slots, np.int64)
        self._top_p = np.zeros(num_slots, np.float64)
        self._min_p = np.zeros(num_slots, np.float64)
        self._is_filtered = np.zeros(num_slots, np.bool_)
        self._penalties = np.tile(np.array(NO_PENALTIES, np.float32), (num_slots, 1))
        self._limits = np.zeros((num_slots, 4), np.int64)
        self._kind = np.zeros(num_slots, np.int8)
        self._bias: dict[int, tuple[HostArray, HostArray]] = {}
        self._stop_ids: dict[int, HostArray] = {}

    def admit(self, admission: Admission) -> bool:
        """Replace the slot's parameters. Returns whether the device's adjustment tables must be updated: it has or had adjustments."""
        slot, spec = admission.slot, admission.sampling
        self._temperature[slot] = spec.temperature
        self._seed[slot] = np.uint64(admission.seed).astype(np.int64)
        self._top_k[slot] = spec.top_k if spec.top_k > 0 else NO_TOP_K
        self._top_p[slot] = spec.top_p if spec.top_p < 1 else NO_TOP_P
        self._min_p[slot] = spec.min_p
        # The best token passes every filter, so a greedy row needs none.
        self._is_filtered[slot] = spec.temperature > 0 and (spec.top_k > 0 or spec.top_p < 1 or spec.min_p > 0)
        had_adjustments = self._kind[slot] == SamplingKind.ADJUSTED
        has_adjustments = self._admit_adjustments(slot, admission)
        plainest = SamplingKind.FILTERED if self._is_filtered[slot] else SamplingKind.PLAIN
        self._kind[slot] = SamplingKind.ADJUSTED if has_adjustments else plainest
        return had_adjustments or has_adjustments

    def _admit_adjustments(self, slot: int, admission: Admission) -> bool:
        spec = admission.sampling
        penalties = (spec.repetition_penalty, spec.frequency_penalty, spec.presence_penalty)
        held_back = spec.stop_ids.astype(np.int64) if spec.min_new_tokens > 0 else np.zeros(0, np.int64)
        assert len(spec.bias_ids) <= MAX_BIASES, f"{len(spec.bias_ids)} biases"
        assert len(held_back) <= MAX_STOPS, f"{len(held_back)} stop ids"
        self._penalties[slot] = penalties
        self._limits[slot] = (
            admission.prompt_len,
            admission.prompt_len + spec.min_new_tokens,
            len(spec.bias_ids),
            len(held_back),
        )
        self._bias.pop(slot, None)
        if len(spec.bias_ids):
            self._bias[slot] = (spec.bias_ids.astype(np.int64), spec.bias_values)
        self._stop_ids.pop(slot, None)
        if len(held_back):
            self._stop_ids[slot] = held_back
        return penalties != NO_PENALTIES or slot in self._bias or slot in self._stop_ids

    def kind_of(self, slots: NDArray[np.int64]) -> SamplingKind:
        """Return the most that rows of these slots ask of the sampler."""
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
        """Return the parameters of the rows that sample, in their order; row i has slot `slots[i]`."""
        noisy = np.flatnonzero(self._temperature[slots] > 0)
        noisy_slots = slots[noisy]
        filtered = noisy[self._is_filtered[noisy_slots]]
        filter_slots = slots[filtered]
        return SamplingArrays(
            noisy_rows=noisy,
            temperatures=self._temperature[noisy_slots],
            seeds=self._seed[noisy_slots],
            filter_rows=filtered,
            top_ks=self._top_k[filter_slots],
            top_ps=self._top_p[filter_slots],
            min_ps=self._min_p[filter_slots],
            adjusted_rows=np.flatnonzero(self._kind[slots] == SamplingKind.ADJUSTED),
        )

    def adjustments_of(self, slots: Sequence[int]) -> AdjustmentArrays[HostArray]:
        """Return the adjustments of these slots, each listed once."""
        biases = [(slot, *self._bias[slot]) for slot in slots if slot in self._bias]
        stops = [(slot, self._stop_ids[slot]) for slot in slots if slot in self._stop_ids]
        index = np.array(slots, np.int64)
        return AdjustmentArrays(
            slots=index,
            penalties=self._penalties[index],
            limits=self._limits[index],
            bias_slots=_end_to_end([np.full(len(ids), slot) for slot, ids, _ in biases], np.int64),
            bias_columns=_end_to_end([np.arange(len(ids)) for _, ids, _ in biases], np.int64),
            bias_ids=_end_to_end([ids for _, ids, _ in biases], np.int64),
            bias_values=_end_to_end([values for _, _, values in biases], np.float32),
            stop_slots=_end_to_end([np.full(len(ids), slot) for slot, ids in stops], np.int64),
            stop_columns=_end_to_end([np.arange(len(ids)) for _, ids in stops], np.int64),
            stop_ids=_end_to_end([ids for _, ids in stops], np.int64),
        )


def _end_to_end(parts: Sequence[HostArray], dtype: Any) -> HostArray:
    if not parts:
        return np.zeros(0, dtype)
    return np.concatenate(parts).astype(dtype, copy=False)
