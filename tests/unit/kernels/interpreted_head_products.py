"""Products with a matrix for each head in Triton's interpreter, against PyTorch's."""

from __future__ import annotations

import pytest
import torch

from srt.kernels.gemm.head_products import head_products


@pytest.mark.parametrize("rows", [0, 1, 2])
@pytest.mark.parametrize(("n", "k", "n_is_last"), [(40, 24, True), (24, 40, False), (8, 5000, False)])
def test_every_head_multiplies_its_own_matrix(rows: int, n: int, k: int, n_is_last: bool) -> None:
    """The heads' inputs, matrices and outputs are parts of wider tensors. Nothing beside the outputs changes."""
    heads = 3
    x = torch.randn(rows, heads, k + 5)[..., :k]
    matrices = torch.randn(heads, k + 7, n)[:, :k].transpose(1, 2) if n_is_last else torch.randn(heads, n + 7, k)[:, 7:]
    wide = torch.full((rows, heads, n + 2), 7.0)
    head_products(x, matrices, wide[..., :n])
    torch.testing.assert_close(wide[..., :n], torch.einsum("rhk,hnk->rhn", x, matrices), rtol=1e-4, atol=1e-4)
    assert (wide[..., n:] == 7.0).all()
