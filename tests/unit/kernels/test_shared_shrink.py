"""How A x is cut where adapters' matrices are read once, and that its kernel compiles, without a GPU. What it computes: tests/gpu."""

from __future__ import annotations

import pytest
import torch

from srt.kernels.build.cuda_source import compile_source
from srt.kernels.build.hopper import ARCHITECTURE
from srt.kernels.lora.shared_shrink import SMALLEST, SharedShrink


@pytest.mark.parametrize("num_inputs", [1024, 2048, 3072, 4096, 5120, 12288, 17408])
def test_parts_have_all_inputs_once(num_inputs: int) -> None:
    variant = SharedShrink.choose(48, num_inputs)
    assert variant is not None
    assert variant.num_parts * 4 * 32 * variant.chunks == num_inputs
    assert 8 <= variant.num_parts <= 17, "the product behind adds them up"


def test_sizes_that_do_not_fit_are_left_alone() -> None:
    assert SharedShrink.choose(16, 4096 + 64) is None
    assert SharedShrink.choose(16, 512) is None, "too small to have work for many processors"
    assert SharedShrink.choose(8, 4096) is None


def test_tensors_that_vectors_cannot_read_are_left_alone() -> None:
    """Adapters that lie far apart, as those of a large model with a high rank do, have addresses beyond an int."""

    def matrices(stride: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(0, dtype=dtype, device="meta").as_strided((2, 16, 1024), (stride, 1024, 1))

    x = torch.empty((20, 1024), dtype=torch.bfloat16, device="meta")
    assert SMALLEST.suits(x, matrices(16 * 1024))
    assert not SMALLEST.suits(x, matrices(16 * 1024 + 4))
    assert not SMALLEST.suits(x, matrices(1 << 31))
    assert not SMALLEST.suits(x, matrices(16 * 1024, torch.float32))


@pytest.mark.parametrize("variant", [SMALLEST, SharedShrink.choose(48, 4096), SharedShrink.choose(128, 12288)])
def test_the_kernel_compiles(variant: SharedShrink) -> None:
    assert compile_source(variant.source, variant.constants, ARCHITECTURE)
