"""Decode attention from the packed projection, in Triton's interpreter, against its two steps one after the other."""

from __future__ import annotations

import pytest
import torch

from srt.kernels.attention import fused_decode as kernels
from srt.kernels.attention.decode_attention import DecodeScratch
from srt.kernels.attention.fused_decode import fused_decode
from srt.kernels.attention.paged_kv import PagedKV
from srt.kernels.elementwise.rotary import prepare_qkv
from srt.layers.ops import TORCH_OPS
from tests.support.attention_reference import decode_attention_reference
from tests.unit.kernels.paged_world import make_paged_world

EPS = 1e-6
LENGTHS = [1, 2, 64, 65, 150, 300]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize(
    ("group", "num_kv_heads", "head_dim", "page_size", "offset"),
    [(2, 2, 64, 16, 0), (5, 1, 128, 1, None), (8, 1, 128, 16, 0), (2, 1, 256, 16, 1)],
)
def test_it_is_norm_rotation_storing_and_attention(
    group: int, num_kv_heads: int, head_dim: int, page_size: int, offset: int | None, num_splits: int,
    dtype: torch.dtype, tolerance: float,
) -> None:  # fmt: skip
    """`offset` is what the norms add to their weights; None: there are no norms."""
    torch.manual_seed(0)
    num_rows, num_heads, scale = len(LENGTHS), group * num_kv_heads, head_dim**-0.5
    world = make_paged_world(LENGTHS, num_kv_heads, head_dim, page_size, dtype)
    last = world.seq_lens - 1
    pages = world.kv.page_table[world.req_pool_indices, last // page_size].long()
    locations = pages * page_size + last % page_size
    for buffer in (world.kv.k_buffer, world.kv.v_buffer):
        buffer[locations] = float("nan")  # not there yet
    qkv = torch.randn(num_rows, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    weights = (torch.rand(head_dim).to(dtype), torch.rand(head_dim).to(dtype)) if offset is not None else None
    rotation = TORCH_OPS.angles(last, torch.rand(head_dim // 2), 1.0)

    expected_kv = PagedKV(world.kv.k_buffer.clone(), world.kv.v_buffer.clone(), world.kv.page_table, page_size)
    prepared = qkv.clone()
    prepare_qkv(
        prepared, num_heads, weights, EPS, rotation.cos, rotation.sin, locations,
        expected_kv.k_buffer, expected_kv.v_buffer, is_plus_one=offset == 1,
    )  # fmt: skip
    q = prepared[:, : num_heads * head_dim].view(num_rows, num_heads, head_dim)
    expected = decode_attention_reference(q, expected_kv, world.req_pool_indices, world.seq_lens, scale)

    scratch = DecodeScratch.allocate(num_rows, num_heads, num_kv_heads, num_splits, head_dim, qkv.device)
    out = fused_decode(
        qkv, weights, EPS, rotation.cos, rotation.sin, locations, world.kv, world.req_pool_indices, world.seq_lens,
        scale, num_splits, scratch, is_plus_one=offset == 1,
    )  # fmt: skip
    torch.testing.assert_close(out.view_as(expected), expected, rtol=tolerance, atol=tolerance)
    for got, wanted in ((world.kv.k_buffer, expected_kv.k_buffer), (world.kv.v_buffer, expected_kv.v_buffer)):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert not scratch.arrived.any()


def test_what_earlier_dependent_launches_write_is_read_behind_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The projection and the angles: their kernels may still run when this one starts."""
    torch.manual_seed(0)
    world = make_paged_world([3, 70], 1, 64, 16, torch.float32)
    last = world.seq_lens - 1
    pages = world.kv.page_table[world.req_pool_indices, last // 16].long()
    qkv = torch.randn(2, 4 * 64)
    rotation = TORCH_OPS.angles(last, torch.rand(32), 1.0)
    late = [qkv, rotation.cos, rotation.sin]
    written = [one.clone() for one in late]

    def attended() -> torch.Tensor:
        scratch = DecodeScratch.allocate(2, 2, 1, 2, 64, qkv.device)
        memory = world.kv, world.req_pool_indices, world.seq_lens
        return fused_decode(
            qkv, None, EPS, rotation.cos, rotation.sin, pages * 16 + last % 16, *memory, 0.125, 2, scratch
        )

    def begin(pdl: object) -> None:
        for one in late:
            one.fill_(float("nan"))

    def wait(pdl: object) -> None:
        for one, values in zip(late, written, strict=True):
            one.copy_(values)

    expected = attended()
    monkeypatch.setattr(kernels, "let_next_start", begin)
    monkeypatch.setattr(kernels, "wait_for_inputs", wait)
    assert torch.equal(attended(), expected)
