"""One row's attention from the packed projection, at the sizes of real models, against its two steps one after the other."""

from __future__ import annotations

import pytest
import torch

from srt.kernels.attention.decode_attention import DecodeScratch, DecodeTiles, decode_attention, most_splits
from srt.kernels.attention.fused_decode import fused_decode
from srt.kernels.attention.paged_kv import PagedKV
from srt.kernels.elementwise.rotary import prepare_qkv

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
EPS, SCALE, PAGE_SIZE = 1e-6, 128**-0.5, 16
MOST = 2e-2


def error_of(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(("group", "kv_heads"), [(2, 8), (4, 8), (5, 8), (8, 4), (8, 1)])
@pytest.mark.parametrize("length", [1, 63, 65, 1100, 5000])
def test_a_row_is_normed_rotated_stored_and_attended(length: int, group: int, kv_heads: int) -> None:
    torch.manual_seed(0)
    heads = group * kv_heads
    processors = torch.cuda.get_device_properties(CUDA).multi_processor_count
    pages = torch.randperm(512, device=CUDA).to(torch.int32)[None]
    keys, values = (torch.randn(512 * PAGE_SIZE, kv_heads, 128, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    kv, expected_kv = (PagedKV(keys.clone(), values.clone(), pages, PAGE_SIZE) for _ in range(2))
    lens, slots = torch.tensor([length], device=CUDA), torch.tensor([0], device=CUDA)
    locations = pages[0, (lens - 1) // PAGE_SIZE].long() * PAGE_SIZE + (lens - 1) % PAGE_SIZE
    qkv = torch.randn(1, (heads + 2 * kv_heads) * 128, device=CUDA, dtype=torch.bfloat16)
    weights = torch.rand(128, device=CUDA).bfloat16() + 0.5, torch.rand(128, device=CUDA).bfloat16() + 0.5
    angles = torch.rand(1, 64, device=CUDA) * length
    cos, sin = angles.cos(), angles.sin()

    prepared = qkv.clone()
    prepare_qkv(prepared, heads, weights, EPS, cos, sin, locations, expected_kv.k_buffer, expected_kv.v_buffer)
    expected = torch.empty(1, heads, 128, device=CUDA, dtype=torch.bfloat16)
    tiles = DecodeTiles.choose(qkv.dtype, 128, kv_heads, 8192, processors, 232_448)
    scratch = DecodeScratch.allocate(1, heads, kv_heads, tiles.num_splits, 128, CUDA)
    decode_attention(
        prepared[:, : heads * 128].view_as(expected), expected_kv, slots, lens, SCALE, expected, tiles, scratch
    )
    splits = most_splits(kv_heads, 8192, processors)
    scratch = DecodeScratch.allocate(1, heads, kv_heads, splits, 128, CUDA)
    for _ in range(5):
        out = fused_decode(qkv, weights, EPS, cos, sin, locations, kv, slots, lens, SCALE, splits, scratch, pdl=True)
        assert error_of(out.view_as(expected), expected) < MOST
    assert not scratch.arrived.any()
    for got, wanted in ((kv.k_buffer, expected_kv.k_buffer), (kv.v_buffer, expected_kv.v_buffer)):
        assert error_of(got[locations], wanted[locations]) < MOST
    half = fused_decode(
        qkv, weights, EPS, cos.flip(1), sin.flip(1), locations, kv, slots, lens, SCALE, splits, scratch, pdl=True
    )
    assert length < 60 or error_of(half.view_as(expected), expected) > 10 * MOST, "other angles"
