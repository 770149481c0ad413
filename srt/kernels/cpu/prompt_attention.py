"""Attention of prompts on a CPU, over keys and values in pages. `prompt_attention.cpp` has the code.

Every instruction set has code of its own, because products are most of the work. Sums are float32. Where a processor multiplies bfloat16,
weights of such prompts are rounded before they are multiplied with values, as PyTorch does.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from srt.kernels.build.cpu_library import load_library, processor_features

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from srt.layers.attention.attention_spec import AttentionLayer
    from srt.model_executor.forward_batch_info import ForwardBatch

DTYPES: Final = (torch.float32, torch.bfloat16)
HEAD_MULTIPLE: Final = 16
MOST_BYTES: Final = 64 << 20
"""Memory for the keys and values of as many heads at a time as fit; for those of one, if it needs more."""

AVX2, AVX512, BFLOAT16 = range(3)
"""Instruction sets by the numbers that the compiled code knows."""

_AVX512_FEATURES: Final = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}


class _Attention(Structure):
    _fields_ = (
        ("chunks", c_void_p),
        ("num_chunks", c_int64),
        ("queries", c_void_p),
        ("query_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        *((name, c_void_p) for name in ("keys", "values", "pages")),
        *((name, c_int64) for name in ("page_stride", "page_size", "num_heads", "num_kv_heads", "head_dim", "window")),
        ("scale", c_float),
        ("is_bfloat16", c_int32),
    )


def supported_instructions(dtype: torch.dtype, features: set[str]) -> list[int]:
    """Return the instruction sets with code for this type that a processor with these features has, the slowest first."""
    found = [AVX2]
    if features >= _AVX512_FEATURES:
        found.append(AVX512)
        if dtype == torch.bfloat16 and "avx512_bf16" in features:
            found.append(BFLOAT16)
    return found


class PromptAttention:
    """The compiled attention of one type and instruction set, run by as many threads as PyTorch uses."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, instructions: int) -> None:
        self.dtype = dtype
        self._library = library
        self._instructions = instructions
        self._num_threads = torch.get_num_threads()

    @classmethod
    def load(cls, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int) -> PromptAttention | None:
        """Return the attention; None where PyTorch's has to serve, or where it is faster."""
        library, features = load_library(), processor_features()
        if library is None or dtype not in DTYPES or kv_dtype != dtype or head_dim % HEAD_MULTIPLE:
            return None
        if dtype == torch.bfloat16 and "amx_bf16" in features:
            return None  # PyTorch's products use the processor's matrix unit
        return cls(library, dtype, supported_instructions(dtype, features)[-1])

    def attend(
        self, q: torch.Tensor, chunks: NDArray[np.int64], layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor
    ) -> None:
        """Attend with the tokens of some rows of q [tokens, heads, head_dim], whose keys and values are in the memory.

        `chunks` has a row for each: its slot, its first token in q, the length of its prefix, and its number of tokens.
        """
        keys, values = batch.token_to_kv_pool.get_kv(layer.layer_id)
        pages = batch.page_table_of(layer.layer_id)
        assert q[0].is_contiguous() and out[0].is_contiguous() and chunks.flags.c_contiguous, (q.stride(), out.stride())
        assert q.dtype == keys.dtype == self.dtype, (q.dtype, keys.dtype)
        attention = _Attention(
            chunks.ctypes.data, len(chunks), q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0),
            keys.data_ptr(), values.data_ptr(), pages.data_ptr(), pages.stride(0), batch.req_to_token_pool.page_size,
            layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.window or 0, layer.scale,
            self.dtype == torch.bfloat16,
        )  # fmt: skip
        self._library.srt_attend_prompts(ctypes.byref(attention), self._instructions, self._num_threads, MOST_BYTES)
