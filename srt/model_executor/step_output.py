"""What a step sampled: first on the device, then on the host, then in messages."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from srt.layers.logits_processor import Logprobs
from srt.model_executor.logprob_plan import LogprobSegment, row_logprobs
from srt.protocol.arrays import INT32
from srt.protocol.messages import Int32Array, RowLogprobs, int32_array

Parts = Sequence[tuple[Logprobs, list[LogprobSegment]]]


class SampledRows(NamedTuple):
    """What the rows that sample drew: `counts[i]` ids for the i-th of them, -1 where the model produced no finite logit."""

    counts: Int32Array
    ids: Int32Array
    logprobs: list[RowLogprobs]

    def ids_hash(self) -> int:
        """64 bits of the counts and ids: equal on all ranks, or one of them is at fault."""
        data = self.counts.astype(INT32, copy=False).tobytes() + self.ids.astype(INT32, copy=False).tobytes()
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


class ResultBuffers:
    """Page-locked memory for sampled ids on their way to the host: a buffer serves one step at a time, and is then used anew."""

    def __init__(self, device: torch.device, max_rows: int) -> None:
        self._is_cpu = device.type == "cpu"
        self._max_rows = max_rows
        self._stream = None if self._is_cpu else torch.cuda.current_stream(device)
        self._free: list[_ResultBuffer] = []

    def start_copy(self, sampled: torch.Tensor) -> _CpuResult | _ResultBuffer:
        """`sampled` [R] int32 as it is once all that was enqueued so far is done."""
        if self._is_cpu:
            return _CpuResult(sampled.numpy().copy())
        buffer = self._free.pop() if self._free else _ResultBuffer(self._max_rows, self._stream, self._free)
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
    """Filled on `stream`, where all steps run: neither it nor slices of the memory are looked up in each step."""

    def __init__(self, max_rows: int, stream: torch.cuda.Stream | None, home: list[_ResultBuffer]) -> None:
        self._memory = torch.empty(max_rows, dtype=torch.int32, pin_memory=True)
        self._done = torch.cuda.Event()
        self._stream = stream
        self._home = home
        self._slices: dict[int, tuple[torch.Tensor, Int32Array]] = {}  # by numbers of rows
        self._host: Int32Array = self._memory.numpy()

    def start_copy(self, sampled: torch.Tensor) -> None:
        count = sampled.shape[0]
        if count not in self._slices:
            memory = self._memory[:count]
            self._slices[count] = memory, memory.numpy()
        memory, self._host = self._slices[count]
        memory.copy_(sampled, non_blocking=True)
        self._done.record(self._stream)

    def is_ready(self) -> bool:
        return bool(self._done.query())

    def wait(self) -> Int32Array:
        """To be called once: the buffer is free then."""
        self._done.synchronize()
        sampled = self._host.copy()
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
        self._copies: _HostCopies | None = None
        if logprobs or sampled is None:
            self._segments = [segments for _, segments in logprobs]
            tensors = [t for values, _ in logprobs for t in (values.chosen, values.top_ids, values.top, values.of_ids)]
            # In the order of the stream: when the ids are there, so is what comes before them.
            self._copies = _HostCopies(tensors, device)
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
        is_missing = sampled < 0
        if 1 not in is_missing.tobytes():
            counts, ids = np.ones(len(sampled), np.int32), sampled
        else:
            counts, ids = np.where(is_missing, np.int32(-1), np.int32(1)), sampled[~is_missing]
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
