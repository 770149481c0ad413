"""The KV write in Triton's interpreter, against its reference."""

from __future__ import annotations

import pytest
import torch

from srt.kernels.attention.paged_kv import PagedKV
from srt.kernels.attention.write_kv import write_kv
from tests.support.attention_reference import write_kv_reference


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


def as_kv(buffers: torch.Tensor, k_scale: float = 1.0, v_scale: float = 1.0) -> PagedKV:
    return PagedKV(buffers[0], buffers[1], torch.empty(0, 0, dtype=torch.int32), 16, k_scale, v_scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 8), (2, 32), (3, 80), (8, 128), (40, 128)])
def test_each_token_goes_to_its_location_and_nothing_else_changes(
    num_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    k, v = torch.randn(2, 5, num_heads, head_dim).to(dtype)
    buffers = torch.randn(2, 20, num_heads, head_dim).to(dtype)
    expected = buffers.clone()
    locations = torch.tensor([3, 19, 0, 7, 8])
    write_kv_reference(k, v, locations, as_kv(expected))
    write_kv(k, v, locations, as_kv(buffers))
    assert torch.equal(buffers, expected)


def test_keys_and_values_may_be_slices_of_a_fused_projection() -> None:
    fused = torch.randn(4, (4 + 2 + 2) * 32)
    _, k, v = (part.view(4, -1, 32) for part in fused.split([4 * 32, 2 * 32, 2 * 32], dim=1))
    buffers = torch.zeros(2, 16, 2, 32)
    write_kv(k, v, torch.tensor([9, 1, 2, 15], dtype=torch.int32), as_kv(buffers))
    assert torch.equal(buffers[0, [9, 1, 2, 15]], k)
    assert torch.equal(buffers[1, [9, 1, 2, 15]], v)


def test_padding_rows_may_share_a_location() -> None:
    k, v = torch.randn(2, 3, 2, 32)
    buffers = torch.zeros(2, 16, 2, 32)
    write_kv(k, v, torch.tensor([4, 15, 15]), as_kv(buffers))
    assert torch.equal(buffers[0, 4], k[0])
    assert not buffers[:, 5:15].any()


def test_no_tokens_write_nothing() -> None:
    buffers = torch.zeros(2, 4, 2, 32)
    write_kv(torch.empty(0, 2, 32), torch.empty(0, 2, 32), torch.empty(0, dtype=torch.int64), as_kv(buffers))
    assert not buffers.any()


def test_a_memory_of_fp8_holds_values_divided_by_their_scale_and_cut_to_its_range() -> None:
    # Exact ones: the interpreter's rounding to this type forgets to carry.
    k, v = torch.randint(-15, 16, (2, 3, 2, 32)).float()
    k[0, 0, 0] = 1e6
    buffers = torch.zeros(2, 16, 2, 32).to(torch.float8_e4m3fn)
    expected = buffers.clone()
    locations = torch.tensor([4, 0, 15])
    write_kv_reference(k, v, locations, as_kv(expected, 0.5, 2.0))
    write_kv(k, v, locations, as_kv(buffers, 0.5, 2.0))
    assert buffers[0, 4, 0, 0].float() == 448
    assert torch.equal(buffers.view(torch.uint8), expected.view(torch.uint8))
