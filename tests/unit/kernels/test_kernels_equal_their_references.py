"""Every kernel against its plain PyTorch reference, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.kernels.interpreted import run_interpreted


@pytest.mark.parametrize(
    "kernel",
    [
        "adjust_logits",
        "decode_attention",
        "even_attention",
        "experts",
        "extend_attention",
        "filter",
        "fused_decode",
        "gather_decode",
        "layers",
        "packed_gemm",
        "sample",
        "shared_prefix",
        "token_masks",
        "write_kv",
    ],
)
def test_kernel_equals_its_reference(kernel: str) -> None:
    run_interpreted(Path(__file__).with_name(f"interpreted_{kernel}.py"))
