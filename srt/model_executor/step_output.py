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
from srt.model_executor.logprob_plan import LogprobSegment, row_logprobs
from srt.protocol.messages import Int32Array, RowLogprobs, int32_array

Parts = Sequence[tuple[Logprobs, list[LogprobSegment]]]


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


class ResultBuffers:
    """Page-locked memory for sampled ids on their way to the host: a buffer serves one step at a time, and is then used anew."""

    def __init__(self, device: torch.device, max_rows: int) -> None:
        self._is_cpu = device.type == "cpu"
        self._max_rows = max_rows
        self._free: list[_ResultBuffer] = []

    def start_copy(self, sampled: torch.Tensor) -> _CpuResult | _ResultBuffer:
        """`sampled` [R] int32 as it is once all that was enqueued so far is done."""
        if self._is_cpu:
            return _CpuResult(sampled.numpy().copy())
        buffer = self._free.pop() if self._free else _ResultBuffer(self._max_rows, self._free)
        buffer.start_copy(sampled)
        return buffer


class _CpuResult:
    def __init__(self, sampled: Int32Array) -> None:
        self._sampled = sampled

    def is_ready(self) -> bool:
        return True

    def wait(self) -> Int32Array:
        return self._sampled


class _ResultBuffer:
    def __init__(self, max_rows: int, home: list[_ResultBuffer]) -> None:
        self._memory = torch.empty(max_rows, dtype=torch.int32, pin_memory=True)
        self._host: NDArray[np.int32] = self._memory.numpy()
        self._done = torch.cuda.Event()
        self._home = home
        self._count = 0

    def start_copy(self, sampled: torch.Tensor) -> None:
        self._count = len(sampled)
        self._memory[: self._count].copy_(sampled, non_blocking=True)
        self._done.record()

    def is_ready(self) -> bool:
        return bool(self._done.query())

    def wait(self) -> Int32Array:
        """To be called once: the buffer is free then."""
        self._done.synchronize()
        sampled = self._host[: self._count].copy()
        self._home.append(self)
        return sampled


class StepOutput:
    """A step on its way to the host: the copies are enqueued when it is made, and waited for in `result`."""

    def __init__(
        self, buffers: ResultBuffers, sampled: torch.Tensor | None, logprobs: Parts, device: torch.device
    ) -> None:
        """`sampled` [R] int32 holds ids, -1 where the logits were not finite; None where no row samples.

        `logprobs` holds each kind, prompt and output, with its segments.
        """
        self._segments = [segments for _, segments in logprobs]
        tensors = [t for values, _ in logprobs for t in (values.chosen, values.top_ids, values.top, values.of_ids)]
        # In the order of the stream: when the ids are there, so is what comes before them.
        self._copies = _HostCopies(tensors, device) if sampled is None or tensors else None
        self._sampled = None if sampled is None else buffers.start_copy(sampled)

    def is_ready(self) -> bool:
        """Whether `result` returns at once."""
        if self._sampled is not None:
            return self._sampled.is_ready()
        return self._copies is None or self._copies.are_done()

    def result(self) -> SampledRows:
        """Waits for the step. To be called once."""
        if self._sampled is None:
            return SampledRows(int32_array(), int32_array(), self._logprobs(int32_array()))
        sampled = self._sampled.wait()
        is_valid = sampled >= 0
        if is_valid.all():
            counts, ids = np.ones(len(sampled), np.int32), sampled
        else:
            counts, ids = np.where(is_valid, np.int32(1), np.int32(-1)), sampled[is_valid]
        return SampledRows(counts, ids, self._logprobs(counts))

    def _logprobs(self, counts: Int32Array) -> list[RowLogprobs]:
        if self._copies is None:
            return []
        arrays = self._copies.wait()
        rows = []
        for index, segments in enumerate(self._segments):
            values = arrays[4 * index : 4 * index + 4]
            # A row that drew nothing has nothing to report.
            rows += [row_logprobs(s, *values) for s in segments if s.is_prompt or counts[s.sample] > 0]
        return rows


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
