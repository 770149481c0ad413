"""Bring the ids and logprobs of a step from the device to the host, and put them into messages."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from srt.layers.logits_processor import Logprobs
from srt.model_executor.step.draw_store import StepIds
from srt.model_executor.step.logprob_plan import LogprobSegment, row_logprobs
from srt.protocol.arrays import INT32, int32_bytes
from srt.protocol.messages import Int32Array, RowLogprobs, int32_array

ONE = int32_bytes([1])
# The bytes of -1, which marks a missing id. They occur in no other ids, because an id's highest byte is less than 128.
NOTHING = int32_bytes([-1])
Parts = Sequence[tuple[Logprobs, list[LogprobSegment]]]


class SampledRows(NamedTuple):
    """The draws of the rows that sample: `counts[i]` ids for the i-th row, or a count of -1 if the model produced no finite logit."""

    counts: Int32Array
    ids: Int32Array
    logprobs: list[RowLogprobs]

    def ids_hash(self) -> int:
        """Return a 64-bit hash of counts and ids. It must be equal on all ranks."""
        data = self.counts.astype(INT32, copy=False).tobytes() + self.ids.astype(INT32, copy=False).tobytes()
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def sampled_rows(sampled: Int32Array) -> tuple[Int32Array, Int32Array]:
    """Return the counts and the ids of rows that draw one id each; -1 marks a row whose logits were not finite."""
    if NOTHING not in sampled.tobytes():
        return np.frombuffer(ONE * len(sampled), np.int32), sampled
    is_missing = sampled < 0
    return np.where(is_missing, np.int32(-1), np.int32(1)), sampled[~is_missing]


class StepOutput:
    """The output of a step on its way to the host. Copies are enqueued at creation; `result` waits for them."""

    def __init__(self, ids: StepIds | None, logprobs: Parts, device: torch.device) -> None:
        """`ids` come from the step's store, which must have been launched; None if no row samples.

        `logprobs` holds the logprobs of each kind, prompt and output, with their segments.
        """
        self._ids = ids
        self._copies: _HostCopies | None = None
        if logprobs or ids is None:
            parts = [values.tensors() for values, _ in logprobs]
            self._segments = [(segments, len(part)) for (_, segments), part in zip(logprobs, parts, strict=True)]
            self._copies = _HostCopies([tensor for part in parts for tensor in part], device)

    @property
    def drawn(self) -> StepIds | None:
        """The ids that the step has drawn, one for each row that samples; None if it draws nothing."""
        return self._ids

    @property
    def must_be_awaited(self) -> bool:
        """Whether `is_ready` turns true only if some thread calls `wait`."""
        return False

    def is_ready(self) -> bool:
        """Return whether `result` would return at once."""
        if self._copies is not None:  # enqueued after the store, so the ids have arrived too
            return self._copies.are_done()
        return self._ids is None or self._ids.is_ready()

    def wait(self) -> None:
        """Wait until `is_ready` holds."""
        if self._copies is not None:
            self._copies.wait()
        elif self._ids is not None:
            self._ids.wait()

    def result(self) -> SampledRows:
        """Wait for the step and return its draws. Must be called once only."""
        if self._ids is None:
            return SampledRows(int32_array(), int32_array(), self._logprobs(int32_array()))
        counts, ids = sampled_rows(self._ids.wait())
        return SampledRows(counts, ids, self._logprobs(counts))

    def _logprobs(self, counts: Int32Array) -> list[RowLogprobs]:
        if self._copies is None:
            return []
        arrays = iter(self._copies.wait())
        rows = []
        for segments, num_arrays in self._segments:
            values = list(itertools.islice(arrays, num_arrays))
            # A row that drew nothing has nothing to report.
            kept = [s if s.is_prompt else s.of_count(int(counts[s.sample])) for s in segments]
            rows += [row_logprobs(s, *values) for s in kept if s.is_prompt or s.end > s.begin]
        return rows


class VerifiedOutput(StepOutput):
    """The output of a step whose rows have several draws each, of which the first ones count. It is on the host already."""

    def __init__(self, ids: Int32Array, counts: Int32Array, logprobs: Parts, device: torch.device) -> None:
        """`ids` are those that count, end to end; `counts` are the numbers of ids of the rows, or -1."""
        super().__init__(None, logprobs, device)
        self._rows = counts, ids

    def result(self) -> SampledRows:
        counts, ids = self._rows
        return SampledRows(counts, ids, self._logprobs(counts))


class VerifiedOnDevice(StepOutput):
    """The output of a step whose rows have several draws each, of which the device has chosen those that count."""

    def __init__(self, outcome: torch.Tensor, num_draws: NDArray[np.int64], logprobs: Parts) -> None:
        """`outcome` has an id for each draw that counts and -1 for the others; `num_draws` are the draws of each row."""
        device = outcome.device
        super().__init__(None, logprobs, device)
        self._outcome = _HostCopies([outcome if outcome.is_cuda else outcome.clone()], device)
        self._num_draws = num_draws

    def is_ready(self) -> bool:
        return self._outcome.are_done()

    def wait(self) -> None:
        self._outcome.wait()

    def rows(self) -> tuple[Int32Array, Int32Array]:
        """Wait for the step. Return the numbers of ids of the rows, or -1, and the ids end to end."""
        (outcome,) = self._outcome.wait()
        counts = np.add.reduceat(outcome >= 0, np.cumsum(self._num_draws) - self._num_draws, dtype=np.int32)
        counts[counts == 0] = -1
        return counts, outcome[outcome >= 0].astype(np.int32)

    def result(self) -> SampledRows:
        counts, ids = self.rows()
        return SampledRows(counts, ids, self._logprobs(counts))


class _HostCopies:
    """Copies of tensors in host memory. On a CPU nothing is copied."""

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
