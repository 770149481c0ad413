"""One step of the model as tensors: gathered from the tables for the step, dropped after it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from srt.layers.attention.base import AttentionBackend
    from srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from srt.sampling.sampling_batch_info import SamplingBatchInfo

IntArray = NDArray[np.int64]


class ForwardMode(IntEnum):
    """What a worker makes of a plan: which rows it has."""

    EXTEND = auto()  # chunks of known tokens only
    DECODE = auto()  # one token a row, read from the token table
    MIXED = auto()  # extend rows, then decode rows
    IDLE = auto()  # no rows
    TARGET_VERIFY = auto()
    DRAFT_EXTEND = auto()

    def is_extend(self) -> bool:
        return self is ForwardMode.EXTEND

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_mixed(self) -> bool:
        return self is ForwardMode.MIXED

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE

    @staticmethod
    def of(num_extend_rows: int, num_decode_rows: int) -> ForwardMode:
        if num_extend_rows:
            return ForwardMode.MIXED if num_decode_rows else ForwardMode.EXTEND
        return ForwardMode.DECODE if num_decode_rows else ForwardMode.IDLE


@dataclass(slots=True)
class ForwardBatch:
    """Rows are the extend rows, then the decode rows; tokens lie row after row.

    B rows of which E extend, T tokens. `*_cpu` are what the host knows of the same values, for planning: nothing has
    to wait for the device to read them.
    """

    forward_mode: ForwardMode
    batch_size: int  # B
    num_extend_rows: int  # E
    num_extend_tokens: int

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    out_cache_loc: torch.Tensor  # [T] int64: flat KV location of each token
    req_pool_indices: torch.Tensor  # [B] int64: slots
    seq_lens: torch.Tensor  # [B] int64: positions in the memory once this step is done
    extend_prefix_lens: torch.Tensor  # [E] int64: positions that were there before
    extend_seq_lens: torch.Tensor  # [E] int64: tokens of the row
    extend_start_loc: torch.Tensor  # [E] int64: index of the row's first token
    sample_indices: torch.Tensor  # [R] int64: last token of each row that samples
    sample_rows: torch.Tensor  # [R] int64: that row

    req_pool_indices_cpu: IntArray  # [B]
    seq_lens_cpu: IntArray  # [B]
    extend_prefix_lens_cpu: IntArray  # [E]
    extend_seq_lens_cpu: IntArray  # [E]
    sample_rows_cpu: IntArray  # [R]

    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool: MHATokenToKVPool
    attn_backend: AttentionBackend
    sampling_info: SamplingBatchInfo

    @property
    def num_decode_rows(self) -> int:
        return self.batch_size - self.num_extend_rows
