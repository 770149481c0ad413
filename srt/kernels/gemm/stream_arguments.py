"""Arguments of `stream_gemm` for what follows a product x Wᵀ: sums, norms, rotation, KV writes, and what LoRA adapters add."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from srt.kernels.build.hopper import pointer


@dataclass(frozen=True, slots=True)
class Added:
    """The term B (A x) that LoRA adapters add to a product W x. Each row x has an adapter (A, B) of its own, or none. A x is given."""

    low: torch.Tensor  # [parts, rows, merged layers * rank] float32: A x in parts to be added up
    up: torch.Tensor  # [adapters, rows of W, rank]: B; each adapter's is contiguous
    adapters: torch.Tensor  # [rows] int32; the number of adapters stands for none
    firsts: tuple[int, int]
    """First row of W of the second and of the third merged layer, or the number of rows."""


class EndingArguments(ctypes.Structure):
    """Mirror of `Ending` in stream_gemm.cu: the operations after the product, and their inputs and outputs."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("residual", "w_scales", "x_scales", "x_squares", "next_weight", "weighted", "squares")
        ),
        *((name, ctypes.c_void_p) for name in ("q_weight", "k_weight", "cosines", "sines", "locations")),
        *((name, ctypes.c_void_p) for name in ("k_buffer", "v_buffer")),
        *((name, ctypes.c_longlong) for name in ("k_stride", "v_stride")),
        *((name, ctypes.c_int) for name in ("x_parts", "query_width", "kv_width")),
        *((name, ctypes.c_float) for name in ("eps", "head_eps", "k_scale_inverse", "v_scale_inverse")),
        *((name, ctypes.c_void_p) for name in ("low", "up", "adapters")),
        ("up_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("low_parts", "num_adapters", "first1", "first2")),
    )

    def add(self, added: Added, low_shape: tuple[int, int], up_shape: tuple[int, int]) -> None:
        """Note what adapters add. The shapes are those of a part of the first products, and of one adapter's second matrix."""
        low, up, adapters = added.low, added.up, added.adapters
        assert up.dtype is torch.bfloat16 and low.dtype is torch.float32 and adapters.dtype is torch.int32
        assert low.shape[1:] == low_shape and up.shape[1:] == up_shape and adapters.shape == low_shape[:1]
        assert low.is_contiguous() and up[0].is_contiguous() and adapters.is_contiguous()
        assert up.data_ptr() % 16 == 0 and up.stride(0) % 8 == 0, "vectors of 16 bytes are read"
        self.low, self.up, self.adapters, self.up_stride = pointer(low), pointer(up), pointer(adapters), up.stride(0)
        self.low_parts, self.num_adapters, (self.first1, self.first2) = len(low), len(up), added.firsts
