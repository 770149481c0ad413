"""Pipeline parallelism: a rank's links to the ranks of the other stages that have the same place among the ranks of their stage.

stage 0 ── hidden states ──> stage 1 ── hidden states ──> ... ──> last stage
   ^                            ^                                     │
   └────────────────────────────┴──── ids of the rows that sample ────┘
"""

from __future__ import annotations

from collections import deque
from threading import Lock
from typing import Final, Protocol

import torch
from torch import Tensor

from srt.distributed.errors import CollectiveError
from srt.distributed.parallel_state import Work

HIDDEN: Final = 0  # tags of messages
IDS: Final = 1


class StageGroup(Protocol):
    """The methods used of a torch process group whose ranks are the stages."""

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work: ...

    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work: ...

    def _allgather_base(self, output: Tensor, input: Tensor, /) -> Work: ...


class Arrival:
    """A tensor that another stage sends. Any thread may wait for it; later calls return at once."""

    def __init__(self, tensor: Tensor, work: Work, sender: int) -> None:
        self._tensor = tensor
        self._work: Work | None = work
        self._sender = sender
        self._error: CollectiveError | None = None
        self._lock = Lock()

    @property
    def has_ended(self) -> bool:
        """Whether some thread has waited for it to the end, so that `wait` does not block."""
        return self._work is None

    def wait(self) -> Tensor:
        """Return the tensor once it has arrived; CollectiveError if its sender is lost."""
        with self._lock:
            if self._work is not None:
                try:
                    self._work.wait()
                except RuntimeError as error:
                    self._error = _lost(self._sender, error)
                self._work = None
        if self._error is not None:
            raise self._error
        return self._tensor


class Pipeline:
    """A stage's links. All stages must send and receive the same steps in the same order."""

    def __init__(self, stage: int, num_stages: int, group: StageGroup | None, most_sent: int) -> None:
        """`group` is None for a model that is not divided. At most `most_sent` messages are on their way to each stage."""
        assert 0 <= stage < num_stages and (group is None) == (num_stages == 1), (stage, num_stages, group)
        self.stage = stage
        self.num_stages = num_stages
        self._group = group
        self._most_sent = most_sent * num_stages
        self._sent: deque[tuple[Work, Tensor]] = deque()  # memory that a message may still be read from

    def min_int(self, value: int) -> int:
        """Return the smallest of the stages' values."""
        if self._group is None:
            return value
        values = torch.empty(self.num_stages, dtype=torch.int64)
        try:
            self._group._allgather_base(values, torch.tensor([value])).wait()
        except RuntimeError as error:
            raise CollectiveError(f"stage {self.stage} lost the others: {_reason(error)}") from error
        return int(values.min())

    def send_hidden(self, hidden: Tensor) -> None:
        """Send a step's hidden states to the next stage, without waiting for it. They must not be changed afterwards."""
        self._send(hidden, self.stage + 1, HIDDEN)

    def receive_hidden(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Wait for the hidden states [tokens, hidden size] of the next step from the stage before."""
        return self._receive(torch.empty(shape, dtype=dtype), self.stage - 1, HIDDEN).wait()

    def send_ids(self, ids: Tensor) -> None:
        """Send a step's ids to all other stages, without waiting for them. Only the last stage calls this."""
        for stage in range(self.num_stages - 1):
            self._send(ids, stage, IDS)

    def receive_ids(self, num_rows: int) -> Arrival:
        """Begin to receive the ids [rows] int32 of the next step that samples."""
        return self._receive(torch.empty(num_rows, dtype=torch.int32), self.num_stages - 1, IDS)

    def _send(self, tensor: Tensor, stage: int, tag: int) -> None:
        assert self._group is not None and tensor.is_contiguous()
        while len(self._sent) >= self._most_sent:  # so old that its step has been answered
            self._sent.popleft()[0].wait()
        try:
            # Sent as bytes, so that the backend need not support the dtype.
            work = self._group.send([tensor.view(-1).view(torch.uint8)], stage, tag)
        except RuntimeError as error:
            raise _lost(stage, error) from error
        self._sent.append((work, tensor))

    def _receive(self, tensor: Tensor, stage: int, tag: int) -> Arrival:
        assert self._group is not None
        try:
            work = self._group.recv([tensor.view(-1).view(torch.uint8)], stage, tag)
        except RuntimeError as error:
            raise _lost(stage, error) from error
        return Arrival(tensor, work, stage)


def _lost(stage: int, error: RuntimeError) -> CollectiveError:
    return CollectiveError(f"stage {stage} of the pipeline is lost: {_reason(error)}")


def _reason(error: RuntimeError) -> str:
    return str(error).partition(". This is typically")[0].rstrip(".")  # gloo continues with guesses
