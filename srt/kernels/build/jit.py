"""Triton's decorators with the types that the type checker needs. Importing this module imports Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction


def jit(function: Callable[..., Any]) -> Any:
    """Return a Triton kernel, or a function that kernels call; the interpreter runs it if the environment asks for it."""
    return triton.jit(function)


def kernel(*, one_variant_for: tuple[str, ...]) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator for a Triton kernel with one variant for all values and alignments of the named arguments.

    Triton compiles variants of a kernel for aligned and unaligned pointers, and for special integers. That pays for matrices; for
    arguments that are read one number at a time it only causes compilations while requests wait.
    """
    names = list(one_variant_for)

    def decorate(function: Callable[..., Any]) -> Any:
        integers = [name for name in names if not name.endswith("_ptr")]
        return triton.jit(function, do_not_specialize=integers, do_not_specialize_on_alignment=names)

    return decorate


@jit
def _probe() -> None:
    pass


IS_INTERPRETED: Final = isinstance(_probe, InterpretedFunction)

_TRITON_DTYPES: Final = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def dot_dtype(dtype: torch.dtype) -> Any:
    """Return the Triton type in which matrices of `dtype` are multiplied; sums are always float32.

    The interpreter stores bfloat16 as integers and would multiply those, so there every load is cast to float32 first.
    """
    if IS_INTERPRETED and dtype is torch.bfloat16:
        return tl.float32
    return _TRITON_DTYPES[dtype]


def cdiv(number: int, size: int) -> int:
    """Return how many parts of this size a number has; Triton's own function takes the host 3 µs."""
    return -(-number // size)


def next_power_of_2(number: int) -> int:
    """Return the least power of two that is not less than this positive number."""
    return 1 << (number - 1).bit_length()


def block_dim(head_dim: int) -> int:
    """Return the power of two that holds a head, at least the 16 that a matrix product needs."""
    return max(16, 1 << (head_dim - 1).bit_length())
