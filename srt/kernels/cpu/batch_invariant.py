"""Operations on a CPU whose result for a row depends on that row alone, to the bit: `batch_invariant.cpp` has the code.

Tensors are float32 or bfloat16. Sums are float32, and results are rounded once to the type of the inputs.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_float, c_int, c_int64, c_void_p
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from srt.kernels.build.cpu_library import load_library
from srt.utils.errors import StartError

if TYPE_CHECKING:
    from srt.layers.attention.attention_spec import AttentionLayer

NAMES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class _Product(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        *((name, c_int64) for name in ("out_stride", "num_rows", "num_outputs", "num_inputs")),
    )


class _Turn(Structure):
    _fields_ = (
        ("heads", c_void_p),
        *((name, c_int64) for name in ("stride", "num_rows", "num_query_heads", "num_key_heads", "head_dim")),
        *((name, c_void_p) for name in ("query_norm", "key_norm", "cosines", "sines")),
        ("eps", c_float),
    )


class _Attention(Structure):
    _fields_ = (
        ("queries", c_void_p),
        ("query_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("num_tokens", c_int64),
        *((name, c_void_p) for name in ("slots", "positions", "pages")),
        *((name, c_int64) for name in ("page_stride", "page_size")),
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_int64) for name in ("num_heads", "num_key_heads", "head_dim", "window")),
        ("scale", c_float),
    )


class BatchInvariantKernels:
    """The compiled operations of a process, run by as many threads as PyTorch uses. The number of threads changes no result."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._num_threads = torch.get_num_threads()
        for name in ("product", "turn", "attend"):
            for suffix in NAMES.values():
                _declare(library, f"{name}_{suffix}", c_void_p, c_int)
        for suffix in NAMES.values():
            _declare(library, f"norm_{suffix}", c_void_p, c_void_p, c_int64, c_int64, c_float, c_void_p, c_int)
            _declare(library, f"silu_and_mul_{suffix}", c_void_p, c_int64, c_int64, c_void_p, c_int)
        _declare(library, "angles", c_void_p, c_int64, c_void_p, c_int64, c_float, c_void_p, c_void_p)
        _declare(library, "log_softmax", c_void_p, c_int64, c_int64, c_void_p, c_int)
        _declare(library, "largest", c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int)
        _declare(library, "thresholds", c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_int)

    @classmethod
    def load(cls) -> BatchInvariantKernels:
        """Return the operations; StartError if they were not built, or if this processor cannot run them."""
        library = load_library()
        if library is None:
            raise StartError(
                "--enable-deterministic-inference needs compiled code, which is built where srt is installed: on an x86-64"
                " processor with AVX2, install g++ and run python -m scripts.compile_cpu_kernels."
            )
        return cls(library)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Return x Wᵀ + b for x [rows, inputs] and a weight [outputs, inputs]; written to `out` if given."""
        if x.stride(1) != 1:
            x = x.contiguous()
        if out is None:
            out = torch.empty((len(x), len(weight)), dtype=x.dtype)
        assert x.dtype == weight.dtype == out.dtype and out.stride(1) == 1 and weight.is_contiguous(), weight.shape
        product = _Product(
            x.data_ptr(), x.stride(0), weight.data_ptr(), _pointer(bias), out.data_ptr(), out.stride(0), len(x), *weight.shape
        )  # fmt: skip
        self._call("product", x.dtype)(ctypes.byref(product), self._num_threads)
        return out

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x / rms(x) * weight over the last dimension."""
        x, size = x.contiguous(), x.shape[-1]
        out = torch.empty_like(x)
        self._call("norm", x.dtype)(
            x.data_ptr(), weight.data_ptr(), x.numel() // size, size, eps, out.data_ptr(), self._num_threads
        )
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up for the two halves of the last dimension of [rows, 2 * size]."""
        gate_up, size = gate_up.contiguous(), gate_up.shape[-1] // 2
        out = torch.empty((len(gate_up), size), dtype=gate_up.dtype)
        self._call("silu_and_mul", gate_up.dtype)(
            gate_up.data_ptr(), len(gate_up), size, out.data_ptr(), self._num_threads
        )
        return out

    def angles(self, positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [positions, 1, frequencies] of the rotation at these positions, multiplied by the factor."""
        shape = len(positions), 1, len(frequencies)
        cos, sin = torch.empty(shape), torch.empty(shape)
        self._library.srt_invariant_angles(
            positions.contiguous().data_ptr(), len(positions), frequencies.data_ptr(), len(frequencies), factor,
            cos.data_ptr(), sin.data_ptr(),
        )  # fmt: skip
        return cos, sin

    def turn(
        self, qkv: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float, cos: Tensor, sin: Tensor, layer: AttentionLayer
    ) -> None:  # fmt: skip
        """Norm, if there are norms, and rotate the query and key heads of packed rows in place."""
        query_norm, key_norm = norms if norms is not None else (None, None)
        turn = _Turn(
            qkv.data_ptr(), qkv.stride(0), len(qkv), layer.num_heads, layer.num_kv_heads, layer.head_dim,
            _pointer(query_norm), _pointer(key_norm), cos.data_ptr(), sin.data_ptr(), eps,
        )  # fmt: skip
        self._call("turn", qkv.dtype)(ctypes.byref(turn), self._num_threads)

    def attend(
        self, q: Tensor, slots: Tensor, positions: Tensor, pages: Tensor, page_size: int, kv: tuple[Tensor, Tensor],
        layer: AttentionLayer, out: Tensor,
    ) -> None:  # fmt: skip
        """Attend with q [tokens, heads, head_dim] of these slots and positions over what the memory holds of each slot."""
        keys, values = kv
        assert q[0].is_contiguous() and out[0].is_contiguous() and q.dtype == keys.dtype, (q.stride(), keys.dtype)
        attention = _Attention(
            q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0), len(q),
            slots.data_ptr(), positions.data_ptr(), pages.data_ptr(), pages.stride(0), page_size,
            keys.data_ptr(), values.data_ptr(), layer.num_heads, layer.num_kv_heads, layer.head_dim,
            layer.window or 0, layer.scale,
        )  # fmt: skip
        self._call("attend", q.dtype)(ctypes.byref(attention), self._num_threads)

    def log_softmax(self, logits: Tensor) -> Tensor:
        """Return the logarithm of the softmax of each row of float32 logits."""
        logits = logits.contiguous()
        out = torch.empty_like(logits)
        self._library.srt_invariant_log_softmax(logits.data_ptr(), *logits.shape, out.data_ptr(), self._num_threads)
        return out

    def largest(self, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return ids [rows, count] int32 and values of the largest float32 values of each row, the lower id first among equal ones."""
        rows = rows.contiguous()
        ids = torch.empty((len(rows), count), dtype=torch.int32)
        values = torch.empty((len(rows), count))
        self._library.srt_invariant_largest(
            rows.data_ptr(), *rows.shape, count, ids.data_ptr(), values.data_ptr(), self._num_threads
        )
        return ids, values

    def filter_threshold(self, ordered: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor) -> Tensor:
        """Return the smallest value [rows, 1] that passes the filters, for rows of float32 in descending order."""
        ordered = ordered.contiguous()
        filters = [top_ks.to(torch.int64), top_ps.to(torch.float64), min_ps.to(torch.float64)]
        filters = [one.contiguous() for one in filters]
        out = torch.empty((len(ordered), 1))
        self._library.srt_invariant_thresholds(
            ordered.data_ptr(), *ordered.shape, *(one.data_ptr() for one in filters), out.data_ptr(), self._num_threads
        )
        return out

    def _call(self, name: str, dtype: torch.dtype) -> Any:
        return getattr(self._library, f"srt_invariant_{name}_{NAMES[dtype]}")


def _declare(library: ctypes.CDLL, name: str, *arguments: Any) -> None:
    function = getattr(library, f"srt_invariant_{name}")
    function.restype, function.argtypes = None, arguments


def _pointer(tensor: Tensor | None) -> int | None:
    assert tensor is None or tensor.is_contiguous(), "the compiled code reads whole tensors"
    return None if tensor is None else tensor.data_ptr()
