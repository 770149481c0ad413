"""Pipeline parallelism: a rank's links to the ranks of the other stages that have the same place among the ranks of their stage.

stage 0 ── hidden states ──> stage 1 ── hidden states ──> ... ──> last stage
   ^                            ^                                     │
   └────────────────────────────┴──── ids of the rows that sample ────┘

On a CPU they are messages over gloo (this file), on GPUs copies into each other's memory (stage_memory.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from srt.distributed.errors import CollectiveError
from srt.distributed.parallel_state import Work

Ints = NDArray[np.int64]
HIDDEN: Final = 0  # tags of messages
IDS: Final = 1


class StageGroup(Protocol):
    """The methods used of a torch process group whose ranks are the stages."""

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work: ...

    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work: ...

    def _allgather_base(self, output: Tensor, input: Tensor, /) -> Work: ...


class DrawnIds(Protocol):
    """The ids that a step draws, on their way to the host."""

    @property
    def words(self) -> Tensor:
        """[rows] int64 in host memory. The low half of each is an id, for kernels that are launched behind the step."""

    def wait(self) -> NDArray[np.int32]: ...


class StageIds(Protocol):
    """The ids of a step on their way from the last stage."""

    @property
    def has_ended(self) -> bool:
        """Whether `wait` would return at once."""

    @property
    def must_be_awaited(self) -> bool:
        """Whether `has_ended` turns true only if some thread calls `wait`."""

    def wait(self) -> Tensor:
        """Return the ids [rows] int32 once they have arrived, -1 for rows without finite logits; CollectiveError if the stage is lost."""


class StageLinks(Protocol):
    """What a stage sends and receives. All stages send and receive the same steps in the same order."""

    def send_hidden(self, hidden: Tensor) -> None:
        """Send a step's hidden states [tokens, hidden size] to the next stage, without waiting for it."""

    def receive_hidden(self, out: Tensor) -> None:
        """Fill `out` [tokens, hidden size] with the hidden states of the next step, which the stage before sends."""

    def send_ids(self, drawn: DrawnIds) -> None:
        """Send a step's ids to all other stages, without waiting for them. Only the last stage calls this."""

    def receive_ids(self, num_rows: int) -> StageIds:
        """Begin to receive the ids of the next step that samples."""

    def write_ids(self, ids: Any, slots: Ints, positions: Ints, token_table: Tensor) -> None:
        """Write ids that `receive_ids` has returned, once they have arrived, to these positions. Those of slot -1 are dropped.

        An id of -1 is written as 0, which can be embedded: a step of its row may be planned already.
        """

    @property
    def lost_peer(self) -> CollectiveError | None:
        """An error that names the stage on which the device has given up, if any."""


class Arrival:
    """A tensor that another stage sends. Any thread may wait for it; later calls return at once."""

    must_be_awaited = True

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


class MessageLinks:
    """Links of stages on CPUs: messages over gloo."""

    lost_peer = None

    def __init__(self, stage: int, num_stages: int, group: StageGroup, most_sent: int) -> None:
        """At most `most_sent` messages are on their way to each stage."""
        self._stage = stage
        self._num_stages = num_stages
        self._group = group
        self._most_sent = most_sent * num_stages
        self._sent: deque[tuple[Work, Tensor, int]] = deque()
        """Messages under way: each with its memory, which may still be read, and the stage that receives it."""

    def send_hidden(self, hidden: Tensor) -> None:
        self._send(hidden.clone(), self._stage + 1, HIDDEN)  # the next step may overwrite it before it is sent

    def receive_hidden(self, out: Tensor) -> None:
        self._receive(out, self._stage - 1, HIDDEN).wait()

    def send_ids(self, drawn: DrawnIds) -> None:
        ids = torch.from_numpy(drawn.wait().copy())
        for stage in range(self._num_stages - 1):
            self._send(ids, stage, IDS)

    def receive_ids(self, num_rows: int) -> StageIds:
        return self._receive(torch.empty(num_rows, dtype=torch.int32), self._num_stages - 1, IDS)

    @staticmethod
    def write_ids(ids: StageIds, slots: Ints, positions: Ints, token_table: Tensor) -> None:
        kept = torch.from_numpy(slots >= 0)
        written = ids.wait().clamp(min=0)[kept]
        token_table[torch.from_numpy(slots)[kept], torch.from_numpy(positions)[kept]] = written

    def _send(self, tensor: Tensor, stage: int, tag: int) -> None:
        assert tensor.is_contiguous()
        while len(self._sent) >= self._most_sent:  # so old that its step has been answered
            sent, _, receiver = self._sent.popleft()
            try:
                sent.wait()
            except RuntimeError as error:
                raise _lost(receiver, error) from error
        try:
            # Sent as bytes, so that the backend need not support the dtype.
            work = self._group.send([tensor.view(-1).view(torch.uint8)], stage, tag)
        except RuntimeError as error:
            raise _lost(stage, error) from error
        self._sent.append((work, tensor, stage))

    def _receive(self, tensor: Tensor, stage: int, tag: int) -> Arrival:
        try:
            work = self._group.recv([tensor.view(-1).view(torch.uint8)], stage, tag)
        except RuntimeError as error:
            raise _lost(stage, error) from error
        return Arrival(tensor, work, stage)


class _NoIds:
    """Ids of a step whose last stage does not run: zeros."""

    has_ended, must_be_awaited = True, False

    def __init__(self, num_rows: int) -> None:
        self._ids = torch.zeros(num_rows, dtype=torch.int32)

    def wait(self) -> Tensor:
        return self._ids


class _NoLinks:
    """The links of a stage that runs alone: it receives zeros."""

    lost_peer = None

    def send_hidden(self, hidden: Tensor) -> None:
        del hidden

    def receive_hidden(self, out: Tensor) -> None:
        out.zero_()

    def send_ids(self, drawn: DrawnIds) -> None:
        del drawn

    def receive_ids(self, num_rows: int) -> StageIds:
        return _NoIds(num_rows)

    def write_ids(self, ids: StageIds, slots: Ints, positions: Ints, token_table: Tensor) -> None:
        del ids, slots, positions, token_table


class Pipeline:
    """A rank's place among the stages, and its links to them."""

    def __init__(
        self, stage: int, num_stages: int, group: StageGroup | None = None, links: StageLinks | None = None
    ) -> None:
        """`group` is None for a model that is not divided, which has no links either."""
        assert 0 <= stage < num_stages and (group is None) == (num_stages == 1), (stage, num_stages, group)
        self.stage = stage
        self.num_stages = num_stages
        self.links: StageLinks = links or _NoLinks()
        self._group = group

    def min_int(self, value: int) -> int:
        """Return the smallest of the stages' values."""
        if self._group is None:
            return value
        return int(self.gather(torch.tensor([value])).min())

    def gather(self, x: Tensor) -> Tensor:
        """Return the stages' tensors, which are in host memory and of one shape: [stages, *x.shape]."""
        if self._group is None:
            return x.unsqueeze(0)
        gathered = torch.empty((self.num_stages, *x.shape), dtype=x.dtype)
        try:
            self._group._allgather_base(gathered.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8)).wait()
        except RuntimeError as error:
            raise CollectiveError(f"stage {self.stage} lost the others: {_reason(error)}") from error
        return gathered

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let this stage run steps without the others, for example to measure what they need. Inside, it receives zeros."""
        links, self.links = self.links, _NoLinks()
        try:
            yield
        finally:
            self.links = links

    @contextmanager
    def naming_lost_peer(self) -> Iterator[None]:
        """Replace any exception inside by a CollectiveError that names the lost stage, if the device has given up on one."""
        try:
            yield
        except Exception as error:
            lost = self.links.lost_peer
            if lost is None:
                raise
            raise lost from error


def _lost(stage: int, error: RuntimeError) -> CollectiveError:
    return CollectiveError(f"stage {stage} of the pipeline is lost: {_reason(error)}")


def _reason(error: RuntimeError) -> str:
    return str(error).partition(". This is typically")[0].rstrip(".")  # gloo continues with guesses
