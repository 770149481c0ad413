"""How the backend of latents launches products with the heads' matrices on a GPU, without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from srt.kernels.build.pdl import LATE
from srt.layers.attention.triton_latent import TritonLatentBackend


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_queries_are_absorbed_so_that_all_is_stored_when_the_next_kernel_starts(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attention behind this launch reads latents before it waits: that is right behind a late launch, and behind one of PyTorch's."""
    launches = list[int]()
    monkeypatch.setattr(
        "srt.kernels.gemm.head_products.head_products", lambda x, weights, out, pdl: launches.append(pdl)
    )
    q, keys = torch.zeros(rows, 4, 24), torch.zeros(4, 16, 32)
    layer: Any = SimpleNamespace(
        num_heads=4,
        latent_rank=32,
        matrices=(keys, keys),
        split_queries=lambda q: q.split((16, 8), dim=-1),
        absorb_parts=lambda q: launches.append(0),
    )
    backend = object.__new__(TritonLatentBackend)
    backend._has_pdl = True
    backend._absorbed(q, layer)
    assert launches == ([LATE.value] if rows < 3 else [0])
