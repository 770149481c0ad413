"""One step of the model as tensors, gathered from the tables for the step and dropped after it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from srt.layers.attention.attention_spec import AttentionLayer
    from srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

A = TypeVar("A")
IntArray = NDArray[np.int64]


class ForwardMode(IntEnum):
    """The kinds of rows that a step has."""

    EXTEND = auto()  # chunks of known tokens only
    DECODE = auto()  # one token a row, read from the token table
    MIXED = auto()  # extend rows, then decode rows
    IDLE = auto()  # no rows

    @staticmethod
    def of(num_extend_rows: int, num_decode_rows: int) -> ForwardMode:
        if num_extend_rows:
            return ForwardMode.MIXED if num_decode_rows else ForwardMode.EXTEND
        return ForwardMode.DECODE if num_decode_rows else ForwardMode.IDLE


@dataclass(frozen=True, slots=True)
class HostRows:
    """The rows of a step as the host knows them, so that planning never waits for the device."""

    slots: IntArray  # [B]
    seq_lens: IntArray  # [B]: positions in the memory after the step
    prefix_lens: IntArray  # [E]
    extend_lens: IntArray  # [E]
    sample_rows: IntArray  # [R]


@dataclass(frozen=True, slots=True)
class RowArrays(Generic[A]):
    """The rows of a step as the device needs them, as numpy arrays or as tensors. All int64."""

    slots: A  # [B]
    extend_starts: A  # [E]: positions computed before the step
    extend_counts: A  # [E]: tokens of the row
    extend_first: A  # [E]: index of the row's first token
    token_slots: A  # [tokens of the extend rows]
    token_positions: A


@dataclass(slots=True)
class ForwardBatch:
    """The input of one forward pass: B rows with T tokens. The first E rows extend, the others decode; tokens are stored row after row.

    Fields named `*_cpu` hold the same values on the host.
    """

    forward_mode: ForwardMode
    batch_size: int  # B
    num_extend_rows: int  # E
    num_extend_tokens: int

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    out_cache_loc: torch.Tensor  # [T] int64: flat KV location of each token
    req_pool_indices: torch.Tensor  # [B] int64: slots
    seq_lens: torch.Tensor  # [B] int64: positions in the memory after the step
    extend_prefix_lens: torch.Tensor  # [E] int64: positions in the memory before the step
    extend_seq_lens: torch.Tensor  # [E] int64: tokens of the row
    extend_start_loc: torch.Tensor  # [E] int64: index of the row's first token

    req_pool_indices_cpu: IntArray  # [B]
    seq_lens_cpu: IntArray  # [B]
    extend_prefix_lens_cpu: IntArray  # [E]
    extend_seq_lens_cpu: IntArray  # [E]

    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool: MHATokenToKVPool
    attn_backend: LayerAttention

    window_locations: tuple[torch.Tensor, ...] = ()
    """As `out_cache_loc`, in the page groups after the first."""

    output_tokens: torch.Tensor | None = None
    """[N] int64: indices of the tokens whose hidden states are needed. The last layer drops the others after its attention. None: all."""

    stage_input: torch.Tensor | None = None
    """[T, hidden size]: the hidden states from the stage before, or what a head reads beside its tokens; else None. The residual is already
    added to them."""

    is_captured: bool = False
    """Whether a graph captures the step, or it prepares that."""

    @property
    def received(self) -> torch.Tensor:
        """The hidden states from the stage before, in a stage that has one before it, or those that a head reads."""
        assert self.stage_input is not None, "nothing was sent to these layers"
        return self.stage_input

    def locations_of(self, layer_id: int) -> torch.Tensor:
        """Return the flat KV location of each token in the layer's memory."""
        group = self.token_to_kv_pool.group_of[layer_id]
        return self.window_locations[group - 1] if group else self.out_cache_loc

    def page_table_of(self, layer_id: int) -> torch.Tensor:
        return self.req_to_token_pool.page_tables[self.token_to_kv_pool.group_of[layer_id]]

    @property
    def num_decode_rows(self) -> int:
        return self.batch_size - self.num_extend_rows

    @classmethod
    def init_new(
        cls,
        host: HostRows,
        rows: RowArrays[torch.Tensor],
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: MHATokenToKVPool,
        attn_backend: LayerAttention,
    ) -> ForwardBatch:
        """Gather the step's tensors from the tables. The lengths in the tables become those after the step."""
        pool = req_to_token_pool
        num_extends = len(host.extend_lens)
        decode_slots = rows.slots[num_extends:]
        decode_positions = pool.seq_lens[decode_slots]
        slots = torch.cat((rows.token_slots, decode_slots))
        positions = torch.cat((rows.token_positions, decode_positions))
        seq_lens = torch.cat((rows.extend_starts + rows.extend_counts, decode_positions + 1))
        pool.seq_lens[rows.slots] = seq_lens
        return cls(
            forward_mode=ForwardMode.of(num_extends, len(host.slots) - num_extends),
            batch_size=len(host.slots),
            num_extend_rows=num_extends,
            num_extend_tokens=len(rows.token_slots),
            input_ids=pool.tokens(slots, positions),
            positions=positions,
            out_cache_loc=pool.locations(slots, positions),
            req_pool_indices=rows.slots,
            seq_lens=seq_lens,
            extend_prefix_lens=rows.extend_starts,
            extend_seq_lens=rows.extend_counts,
            extend_start_loc=rows.extend_first,
            req_pool_indices_cpu=host.slots,
            seq_lens_cpu=host.seq_lens,
            extend_prefix_lens_cpu=host.prefix_lens,
            extend_seq_lens_cpu=host.extend_lens,
            req_to_token_pool=pool,
            token_to_kv_pool=token_to_kv_pool,
            attn_backend=attn_backend,
            window_locations=tuple(
                pool.locations(slots, positions, group) for group in range(1, 1 + len(pool.windows))
            ),
        )

    @classmethod
    def empty(
        cls, req_to_token_pool: ReqToTokenPool, token_to_kv_pool: MHATokenToKVPool, attn_backend: LayerAttention
    ) -> ForwardBatch:
        """Return a batch without rows, which `dataclasses.replace` turns into batches over fixed buffers."""
        none, no_rows = req_to_token_pool.seq_lens[:0], np.zeros(0, np.int64)
        host, rows = HostRows(*[no_rows] * 5), RowArrays(*[none] * 6)
        return cls.init_new(host, rows, req_to_token_pool, token_to_kv_pool, attn_backend)


class LayerAttention(Protocol):
    """Attention as a model calls it, layer after layer, for one step: an `AttentionBackend`, or its stand-in during a capture."""

    @property
    def packed_decodes(self) -> PackedDecodes | None:
        """The kernel that does norm, rotation and attention of decode rows at once; None if there is none."""

    def place_of(self, qkv: torch.Tensor) -> torch.Tensor:
        """Return the memory for these packed rows after norm and rotation, from which `attend` reads."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        """Write k and v, then attend."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        """Return [tokens, heads * head_dim] for tokens whose k and v are stored. In a mixed batch extend rows come first."""


class PackedDecodes(Protocol):
    """Norm, rotation, storing of keys and values, and attention in one kernel."""

    def decode_packed(
        self,
        qkv: torch.Tensor,
        norm_weights: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        is_plus_one: bool = False,
    ) -> torch.Tensor | None:
        """Compute attention of decode rows from their packed projection; None if the kernel does not support this step."""
