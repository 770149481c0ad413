"""What a step sampled: first on the device, then on the host, then in messages."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from srt.layers.logits_processor import Logprobs
from srt.layers.sampler import Draws
from srt.model_executor.logprob_plan import LogprobSegment, row_logprobs
from srt.protocol.messages import Int32Array, RowLogprobs, int32_array


@dataclass(frozen=True, slots=True)
class SampledRows:
    """What the rows that sample drew: `counts[i]` ids for the i-th of them, -1 where the model produced no finite logit."""

    counts: Int32Array
    ids: Int32Array
    logprobs: list[RowLogprobs]

    def ids_hash(self) -> int:
        """64 bits of the counts and ids: equal on all ranks, or one of them is at fault."""
        data = self.counts.astype("<i4").tobytes() + self.ids.astype("<i4").tobytes()
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


class StepOutput:
    """A step on its way to the host: the copies are enqueued when it is made, and waited for in `result`."""

    def __init__(
        self, draws: Draws | None, logprobs: Sequence[tuple[Logprobs, list[LogprobSegment]]], device: torch.device
    ) -> None:
        """`draws` is None where no row samples; `logprobs` holds each kind, prompt and output, with its segments."""
        self._segments = [segments for _, segments in logprobs]
        tensors = [] if draws is None else [draws.ids, draws.is_valid]
        for values, _ in logprobs:
            tensors += [values.chosen, values.top_ids, values.top, values.of_ids]
        self._has_draws = draws is not None
        self._copies = _HostCopies(tensors, device)

    def is_ready(self) -> bool:
        """Whether `result` returns at once."""
        return self._copies.are_done()

    def result(self) -> SampledRows:
        arrays = self._copies.wait()
        counts, ids = int32_array(), int32_array()
        if self._has_draws:
            drawn, is_valid = arrays[:2]
            arrays = arrays[2:]
            counts, ids = np.where(is_valid, np.int32(1), np.int32(-1)), drawn[is_valid].astype(np.int32)
        rows = []
        for index, segments in enumerate(self._segments):
            values = arrays[4 * index : 4 * index + 4]
            # A row that drew nothing has nothing to report.
            rows += [row_logprobs(s, *values) for s in segments if s.is_prompt or counts[s.sample] > 0]
        return SampledRows(counts, ids, rows)


class _HostCopies:
    """Tensors as numpy arrays, once their copies are done; on a CPU they are at once."""

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self._done: torch.cuda.Event | None = None
        self._tensors = list(tensors)
        if device.type != "cpu":
            self._tensors = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
            for target, source in zip(self._tensors, tensors, strict=True):
                target.copy_(source, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def are_done(self) -> bool:
        return self._done is None or self._done.query()

    def wait(self) -> list[NDArray[Any]]:
        if self._done is not None:
            self._done.synchronize()
        return [tensor.numpy() for tensor in self._tensors]
