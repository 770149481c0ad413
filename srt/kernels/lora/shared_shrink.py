"""A x for up to 32 tokens, where each adapter's A is read once, however many tokens have it: a CUDA C++ kernel.

It needs few registers and little shared memory, so that its programs fit beside those of streamed products before and behind it. They
fetch A while the product before runs, and the product behind fetches its weights while they compute. Hopper and bfloat16 only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import torch

from srt.kernels.build.hopper import launch, source_of

_SOURCE: Final = Path(__file__).with_suffix(".cu")
MOST_TOKENS: Final = 32
"""A lane of a warp holds the number of each token's adapter."""
_LEAST_PARTS: Final = 8
_MOST_CHUNKS: Final = 8
_CHUNK: Final = 32
_WARPS: Final = 4
_ROWS: Final = 16  # of A, in a program
_MOST_STRIDE: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class SharedShrink:
    """A variant of the kernel: for `low` rows of A, whose inputs are cut into parts of `chunks` pieces a warp."""

    low: int
    num_parts: int
    chunks: int

    name = "shared_shrink"
    shared_bytes = 0  # beside what the source declares
    num_threads = 32 * _WARPS
    cluster = 1

    @classmethod
    def choose(cls, low: int, num_inputs: int) -> SharedShrink | None:
        """Return the variant with the fewest parts that give most multiprocessors work; None if the sizes do not fit."""
        blocks, rest = divmod(num_inputs, _WARPS * _CHUNK)
        if rest or low % _ROWS:
            return None
        shapes = ((blocks // chunks, chunks) for chunks in range(_MOST_CHUNKS, 0, -1) if blocks % chunks == 0)
        return next((cls(low, parts, chunks) for parts, chunks in shapes if parts >= _LEAST_PARTS), None)

    @property
    def source(self) -> str:
        return source_of(_SOURCE)

    @property
    def constants(self) -> Mapping[str, int]:
        return {"LOW": self.low, "CHUNKS": self.chunks}

    def suits(self, x: torch.Tensor, down: torch.Tensor) -> bool:
        """Return whether rows of both can be read in vectors of 16 bytes, at distances that fit in an int."""
        has_dtype = x.dtype is down.dtype is torch.bfloat16 and down.stride(0) <= _MOST_STRIDE
        strides, addresses = (x.stride(0), down.stride(0)), (x.data_ptr(), down.data_ptr())
        return has_dtype and not any(stride % 8 for stride in strides) and not any(place % 16 for place in addresses)

    def multiply(self, x: torch.Tensor, down: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Return A x [parts, tokens, low] float32 for x [tokens, inputs] and the first matrices [adapters, low, inputs]."""
        num_tokens, num_adapters = len(x), len(down)
        assert num_tokens <= MOST_TOKENS and numbers.dtype is torch.int32 and self.suits(x, down)
        assert x.stride(1) == 1 and down[0].is_contiguous(), (x.stride(), down.stride())
        out = torch.empty((self.num_parts, num_tokens, self.low), dtype=torch.float32, device=x.device)
        grid = self.num_parts, num_tokens, self.low // _ROWS
        arguments = x, down, out, numbers, num_tokens, num_adapters, x.stride(0), down.stride(0)
        with torch.cuda.device(x.device):
            launch(self, grid, (), arguments, is_dependent=True)
        return out


SMALLEST: Final = SharedShrink(_ROWS, _LEAST_PARTS, 1)


@cache
def shared_shrink(low: int, num_inputs: int) -> SharedShrink | None:
    """Return the variant for `low` rows of A of `num_inputs` inputs; None if the sizes do not fit."""
    return SharedShrink.choose(low, num_inputs)
