"""What an attention backend promises. One backend serves all layers of a worker, one batch at a time.

`AttentionBackend` is what every backend does; models see it as the `LayerAttention` of their `ForwardBatch`. The protocols are abilities
that only some backends have: a backend names each one that it has by a property, which is None in all others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from srt.layers.attention.attention_spec import AttentionLayer
    from srt.model_executor.forward_batch_info import ForwardBatch, PackedDecodes


BLOCK_ROWS = 16  # neighbours, whose common prefix may be read once
LEAST_SAVED = 8192
"""Positions that a block of rows need not read, if prefixes are to be read once for all of it: fewer are read as fast row by row."""


UNEVEN = 1.2
"""Times the mean length, where the longest row of a step begins to be read alone for long."""


class Reading(IntEnum):
    """How the rows of a decode step read the memory."""

    BY_ROW = 0
    SHARED = 1
    """What neighbours have in common is read once."""
    EVEN = 2
    """By programs that read equally much, whatever the rows' lengths."""
    RESIDENT = 3
    """By the kernel that goes through all layers."""


@dataclass(frozen=True, slots=True)
class Views:
    """A step's rows by heads: extend rows' queries, keys, values and results, and decode rows' queries and results."""

    extends: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None
    decodes: tuple[torch.Tensor, torch.Tensor] | None

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> Views:
        """The same for all layers of a step whose tensors are the same."""
        n = batch.num_extend_tokens
        queries, attended = q.view(-1, layer.num_heads, layer.head_dim), out.view(-1, layer.num_heads, layer.head_dim)
        extends = decodes = None
        if batch.num_extend_rows:
            extends = queries[:n], layer.split_kv_heads(k[:n]), layer.split_kv_heads(v[:n]), attended[:n]
        if batch.num_decode_rows:
            decodes = queries[n:], attended[n:]
        return cls(extends, decodes)


@dataclass(frozen=True, slots=True)
class AnyRows:
    """Rows of steps that are captured with their prompts, as the device knows them. All int64; a row without tokens is padding."""

    extend_slots: torch.Tensor  # [E]: their tokens lie end to end, from the step's first on
    extend_prefix_lens: torch.Tensor  # [E]
    extend_lens: torch.Tensor  # [E]
    decode_slots: torch.Tensor  # [D]: of the last D tokens one each
    decode_lens: torch.Tensor  # [D], with the new position


# ---- Abilities that only some backends have


class DecodeGraphs(Protocol):
    """Decode steps that graphs can hold. `batch` has decode rows only, and the device's tensors keep their addresses."""

    def init_cuda_graph_state(self, max_bs: int) -> None:
        """Take the memory that graphs of up to `max_bs` rows share."""

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> None:
        """Prepare the runs of a graph of `batch.batch_size` rows, warm-ups included."""


class HostPlans(Protocol):
    """Plans of decodes that read the rows' lengths and pages on the host: each step is planned anew, also where a graph is replayed."""

    def init_forward_metadata_replay_cuda_graph(self, batch: ForwardBatch) -> None:
        """Plan a replay. Of `batch` the graph's size, the `*_cpu` arrays (padded) and the tables count."""


class DecodeReadings(Protocol):
    """Decode steps that can read the memory in other ways than row by row."""

    def can_read(self, reading: Reading, num_rows: int) -> bool:
        """Whether decode steps of `num_rows` rows may be read so, and are quicker where it fits them."""

    def begin_decodes(self, batch: ForwardBatch, reading: Reading) -> None:
        """Do on the device what comes before the first layer of a planned step of decodes; a graph may hold it."""


class PromptGraphs(Protocol):
    """Steps with prompts that graphs can hold, attention included."""

    def begin_any(self, rows: AnyRows, batch: ForwardBatch) -> None:
        """Do on the device what comes before the first layer. Of `batch` the memory and the tables count."""

    def attend_any(
        self, q: torch.Tensor, rows: AnyRows, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor
    ) -> None:
        """Attend like `attend`, whatever the rows are; tokens without a row get finite numbers, or nothing."""


# ---- What every backend does


class AttentionBackend(ABC):
    """Causal attention over the paged memory: q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim].

    `init_forward_metadata` comes once per step, before the first layer; `attend` once per layer. A token sees its
    request's positions up to and including its own, or the last `layer.window` of them. q, k, v and out may be slices of
    wider rows; a token's own elements are contiguous.
    """

    @property
    def decode_graphs(self) -> DecodeGraphs | None:
        return None

    @property
    def host_plans(self) -> HostPlans | None:
        return None

    @property
    def decode_readings(self) -> DecodeReadings | None:
        return None

    @property
    def prompt_graphs(self) -> PromptGraphs | None:
        return None

    @property
    def packed_decodes(self) -> PackedDecodes | None:
        return None

    def place_of(self, qkv: torch.Tensor) -> torch.Tensor:
        """The memory for these packed rows once they are normed and rotated, for `attend`: their own."""
        return qkv

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> None:
        """Store the step's keys and values at `batch.out_cache_loc`, in the memory's dtype."""
        batch.token_to_kv_pool.set_kv(
            layer.layer_id, batch.out_cache_loc, layer.split_kv_heads(k), layer.split_kv_heads(v)
        )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        """Write k and v, then attend."""
        self.write_kv(k, v, layer, batch)
        return self.attend(q, k, v, layer, batch)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Work out whatever all layers of this step share: indices, masks, plans. Never waits for the device."""
        if batch.num_extend_rows:
            self.plan_extend(batch)
        if batch.num_decode_rows:
            self.plan_decode(batch)

    @abstractmethod
    def plan_extend(self, batch: ForwardBatch) -> None:
        """Plan the batch's extend rows."""

    @abstractmethod
    def plan_decode(self, batch: ForwardBatch) -> None:
        """Plan the batch's decode rows."""

    @abstractmethod
    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        """Attention of the extend rows' tokens, which are all of q. k is rotated; k and v are in the memory already."""

    @abstractmethod
    def forward_decode(self, q: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Attention of the decode rows' tokens, one a row, which are all of q. Their k and v are in the memory already."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        """[tokens, heads * head_dim] for tokens whose k and v are in the memory; a mixed batch is extend rows, then decode rows."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.attend_views(Views.of(q, k, v, layer, batch, out), layer, batch)
        return out

    def attend_views(self, views: Views, layer: AttentionLayer, batch: ForwardBatch) -> None:
        """Do the same for one layer, in two launches: see docs/decisions/decodes-have-their-own-launch.md."""
        if views.extends is not None:
            q, k, v, out = views.extends
            self.forward_extend(q, k, v, layer, batch, out)
        if views.decodes is not None:
            q, out = views.decodes
            self.forward_decode(q, layer, batch, out)
