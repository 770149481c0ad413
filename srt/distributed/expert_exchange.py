"""Share the experts of a model between groups of ranks that run attention each for requests of its own (--enable-dp-attention).

    all ranks     0  1 | 2  3        each has a part of the experts (TensorParallel with `expert_groups`)
    groups          0  |   1         each has a scheduler, KV memory, and its requests' hidden states, on each of its ranks

A step of a group is a step of all ranks. They meet first and exchange how many tokens each group has. In each layer with experts, every
rank then gets the tokens of all groups, computes its summand for all of them, and gets back the sums of its own group's tokens. A group
without tokens only does the latter. On GPUs rows are exchanged on the device, behind what was launched before, and only the numbers of
tokens on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from srt.distributed.parallel_state import TensorParallel
from srt.distributed.step_calls import StepCalls


class ExpertExchange:
    """A rank's part in steps of all groups. Groups are neighbouring ranks, and equally large."""

    def __init__(
        self,
        ranks: TensorParallel,
        num_groups: int,
        calls: StepCalls,
        paths: Sequence[str],
        on_host: TensorParallel | None = None,
    ) -> None:
        """`ranks` are those of all groups; they hear calls at `paths`. `on_host`, needed for GPUs, connects the same ranks' processes."""
        assert num_groups > 1 and ranks.size % num_groups == 0, f"{ranks.size} ranks in {num_groups} groups"
        self.ranks = ranks
        self._on_host = on_host or ranks
        self.global_num_tokens = [0] * num_groups
        """The tokens of each group in the present step."""
        self.all_decode = False
        """Whether all groups have only decode rows, or no rows, in the present step. Only then may ranks replay a graph."""
        self._group_size = ranks.size // num_groups
        self._group = ranks.rank // self._group_size
        self._calls = calls
        self._others = [path for rank, path in enumerate(paths) if rank // self._group_size != self._group]
        self._step = 0  # the number of the next step

    @property
    def is_called(self) -> bool:
        """Whether another group has begun a step that this rank has not joined yet."""
        return self._calls.latest >= self._step

    def notify(self, on_call: Callable[[], None]) -> None:
        """Let a thread call `on_call` whenever another group begins a step."""
        self._calls.notify(on_call)

    def meet(self, num_tokens: int, is_decode: bool = False) -> bool:
        """Begin or join a step with this number of this group's tokens. Return whether all ranks of the group have them.

        If not, another one has not received the plan yet, and has joined the step of another group without tokens. Then this group has
        none in this step, and the rank must meet again after it.
        """
        if num_tokens:
            self._calls.call(self._step, self._others)
        answers = self._on_host.gather_ints(2 * num_tokens + (is_decode or not num_tokens))
        self._step += 1
        said = [answer // 2 for answer in answers]
        self.all_decode = all(answer % 2 for answer in answers)
        size = self._group_size
        groups = [said[first : first + size] for first in range(0, len(said), size)]
        self.global_num_tokens = [min(group) for group in groups]
        own = groups[self._group]
        assert len({*own, 0}) <= 2, f"ranks of a group have different tokens: {own}"
        return self.global_num_tokens[self._group] == num_tokens

    def pad(self, num_tokens: int) -> None:
        """Let each group have this number of tokens in the present step; what it lacks is padding."""
        self.global_num_tokens = [num_tokens] * len(self.global_num_tokens)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let this rank run steps without the others: inside, they appear to send what this rank sends."""
        step, others, self._others = self._step, self._others, []
        with self.ranks.alone(), self._on_host.alone():
            try:
                yield
            finally:
                self._step, self._others = step, others

    def gather(self, *tensors: Tensor) -> list[Tensor]:
        """Return the rows of all groups, in the order of groups, for each tensor of this group's rows, one a token of the step."""
        own = self.global_num_tokens[self._group]
        parts = [tensor.contiguous().view(torch.uint8) for tensor in tensors]
        packed = torch.cat(parts, dim=1)
        assert len(packed) == own, f"{len(packed)} rows in a step of {own} tokens"
        # Each rank sends a share of its group's rows, all of which it has. All shares have one size, so that one operation sends them.
        share = -(-max(self.global_num_tokens) // self._group_size)
        sent = packed.new_empty((share, packed.shape[1]))
        place = self.ranks.rank % self._group_size
        rows = packed[place * share : (place + 1) * share]
        sent[: len(rows)] = rows
        groups = self.ranks.all_gather(sent.unsqueeze(0), dim=0).view(-1, self._group_size * share, packed.shape[1])
        all_rows = torch.cat([group[:count] for group, count in zip(groups, self.global_num_tokens, strict=True)])
        widths = [part.shape[1] for part in parts]
        return [
            part.contiguous().view(tensor.dtype)
            for part, tensor in zip(all_rows.split(widths, dim=1), tensors, strict=True)
        ]

    def sum_own(self, summands: Tensor) -> Tensor:
        """Return the sum over ranks of this group's rows, added in rank order. `summands` are this rank's for the rows of all groups."""
        first, own = sum(self.global_num_tokens[: self._group]), self.global_num_tokens[self._group]
        if (added := self.ranks.add_small(summands)) is not None:
            return added[first : first + own]
        counts = [count for count in self.global_num_tokens for _ in range(self._group_size)]
        pieces = summands.split(self.global_num_tokens)
        sent = torch.cat([piece for piece in pieces for _ in range(self._group_size)])
        return self.ranks.add(self.ranks.exchange_rows(sent, counts, own))

    def close(self) -> None:
        """Leave the other groups. May be called twice."""
        self._calls.close()
        self._on_host.close()
        self.ranks.close()
