"""The interface of attention backends. One backend serves all layers of a worker, one batch at a time.

Every backend is an `AttentionBackend`; models see it as the `LayerAttention` of their `ForwardBatch`. The protocols are abilities that
only some backends have. For each there is a property, which is None if a backend lacks the ability.
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


BLOCK_ROWS = 16  # neighbouring rows whose common prefix may be read once
LEAST_SAVED = 8192
"""Smallest number of reads of positions that sharing must save in a block of rows. For fewer, reading row by row is as fast."""

UNEVEN = 1.2
"""Ratio of the longest row to the mean length above which reading row by row is slow, because the longest row is read alone at the end."""


class Reading(IntEnum):
    """The ways in which the rows of a decode step read the KV memory."""

    BY_ROW = 0
    SHARED = 1
    """The common prefix of neighbouring rows is read once."""
    EVEN = 2
    """All programs read the same amount, whatever the lengths of the rows."""
    RESIDENT = 3
    """One kernel runs all layers."""
    ADAPTED = 4
    """As BY_ROW, in steps in which rows have LoRA adapters."""


@dataclass(frozen=True, slots=True)
class Views:
    """Views of a step's tensors by heads: queries, keys, values and results of extend rows, queries and results of decode rows."""

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
        """Create the views. Layers with the same tensors can share them."""
        n = batch.num_extend_tokens
        queries, attended = q.view(-1, layer.num_heads, layer.head_dim), out.view(-1, layer.num_heads, layer.value_dim)
        extends = decodes = None
        if batch.num_extend_rows:
            extends = queries[:n], layer.split_kv_heads(k[:n]), layer.split_kv_heads(v[:n]), attended[:n]
        if batch.num_decode_rows:
            decodes = queries[n:], attended[n:]
        return cls(extends, decodes)


@dataclass(frozen=True, slots=True)
class AnyRows:
    """Device tensors that describe the rows of a captured step with prompts. All int64; a row without tokens is padding."""

    extend_slots: torch.Tensor  # [E]; the tokens of these rows follow each other, from the step's first token on
    extend_prefix_lens: torch.Tensor  # [E]
    extend_lens: torch.Tensor  # [E]
    decode_slots: torch.Tensor  # [D]; each row has one of the last D tokens
    decode_lens: torch.Tensor  # [D], the new position included


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Device tensors that describe the rows of a decode step with several tokens a row. All int64; a row without tokens is padding."""

    slots: torch.Tensor  # [R]
    prefix_lens: torch.Tensor  # [R]: positions before the row's first token
    lens: torch.Tensor  # [R]: tokens of the row, which follow each other
    firsts: torch.Tensor  # [R]: index of the row's first token


# ---- Abilities that only some backends have


class DecodeGraphs(Protocol):
    """Decode steps that can be captured in graphs. `batch` has decode rows only, and its device tensors keep their addresses."""

    def init_cuda_graph_state(self, max_bs: int) -> None:
        """Allocate the memory that graphs of up to `max_bs` rows share."""

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> None:
        """Prepare the runs of a graph of `batch.batch_size` rows, warm-ups included."""


class HostPlans(Protocol):
    """Decode steps that are planned on the host from lengths and pages, so that each replay of a graph needs a new plan."""

    def init_forward_metadata_replay_cuda_graph(self, batch: ForwardBatch) -> None:
        """Plan a replay. Reads only the size, the padded `*_cpu` arrays and the tables of `batch`."""


class DecodeReadings(Protocol):
    """Decode steps that can read the KV memory in other ways than row by row."""

    def can_read(self, reading: Reading, num_rows: int) -> bool:
        """Return whether this reading supports decode steps of `num_rows` rows, and is faster for rows that suit it."""

    def begin_decodes(self, batch: ForwardBatch, reading: Reading) -> None:
        """Launch the work that precedes the first layer of a planned decode step. It can be captured in a graph."""


class DraftReadings(Protocol):
    """Decode steps with several tokens a row, whose keys are read once for all of them."""

    def begin_drafts(self, rows: TokenRows, most_tokens: int) -> None:
        """Read the planned decode step in this way. Each of its tokens belongs to a row, which has up to `most_tokens`."""


class PromptGraphs(Protocol):
    """Steps with prompts that can be captured in graphs, attention included."""

    def begin_any(self, rows: AnyRows, batch: ForwardBatch) -> None:
        """Launch the work that precedes the first layer. Reads only the memory and the tables of `batch`."""

    def attend_any(
        self, q: torch.Tensor, rows: AnyRows, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor
    ) -> None:
        """Do what `attend` does, for whatever `rows` contain at run time. Results of tokens without a row are finite or unchanged."""


# ---- The base class of all backends


class AttentionBackend(ABC):
    """Causal attention over the paged KV memory: q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim].

    Call `init_forward_metadata` once per step, before the first layer, and `attend` once per layer. A token sees its request's positions
    up to its own, or the last `layer.window` of them. q, k, v and out may be slices of wider rows, but each token's elements are
    contiguous.
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
    def draft_readings(self) -> DraftReadings | None:
        return None

    @property
    def prompt_graphs(self) -> PromptGraphs | None:
        return None

    @property
    def packed_decodes(self) -> PackedDecodes | None:
        return None

    def place_of(self, qkv: torch.Tensor) -> torch.Tensor:
        """Return the memory for these packed rows after norm and rotation, from which `attend` reads: their own."""
        return qkv

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> None:
        """Store the step's keys and values where the batch says, in the memory's dtype."""
        batch.token_to_kv_pool.set_kv(
            layer.layer_id, batch.locations_of(layer.layer_id), layer.split_kv_heads(k), layer.split_kv_heads(v)
        )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        """Write k and v, then attend."""
        self.write_kv(k, v, layer, batch)
        return self.attend(q, k, v, layer, batch)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Prepare what all layers of this step share: indices, masks, plans. Never waits for the device."""
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
        """Compute attention for the extend rows, to which all of q belongs. k is rotated; k and v are stored already."""

    @abstractmethod
    def forward_decode(self, q: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Compute attention for the decode rows, to which all of q belongs, one token each. Their k and v are stored already."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        """Return [tokens, heads * value_dim] for tokens whose k and v are stored. In a mixed batch extend rows come first."""
        out = torch.empty((len(q), layer.num_heads * layer.value_dim), dtype=q.dtype, device=q.device)
        self.attend_views(Views.of(q, k, v, layer, batch, out), layer, batch)
        return out

    def attend_views(self, views: Views, layer: AttentionLayer, batch: ForwardBatch) -> None:
        """Attend for one layer, in two launches: see docs/decisions/decodes-have-their-own-launch.md."""
        if views.extends is not None:
            q, k, v, out = views.extends
            self.forward_extend(q, k, v, layer, batch, out)
        if views.decodes is not None:
            q, out = views.decodes
            self.forward_decode(q, layer, batch, out)
