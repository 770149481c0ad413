"""The kernels of decoder layers in Triton's interpreter, against what PyTorch says in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from srt.kernels.elementwise.rms_norm import add_rms_norm, rms_norm
from srt.kernels.elementwise.rotary import angles, prepare_qkv
from srt.kernels.elementwise.silu_and_mul import gelu_tanh_and_mul, silu_and_mul
from srt.kernels.gemm.gemv import GemvTiles, gemv
from srt.layers.ops import TORCH_OPS, Rotation, rotate

EPS = 1e-6
TYPES = [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1.5e-2)]


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


def assert_near(got: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (got.double() - expected.double()).norm() / expected.double().norm()
    assert error < tolerance, float(error)


def norm_of(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), EPS)


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
def test_rows_are_added_and_normed_whatever_their_stride(dtype: torch.dtype, tolerance: float) -> None:
    x, delta, weight = torch.randn(5, 96).to(dtype), torch.randn(5, 80).to(dtype), torch.randn(80).to(dtype)
    assert_near(rms_norm(x[:, :80], weight, EPS), norm_of(x[:, :80], weight), tolerance)
    normed, total = add_rms_norm(x[:, 16:], delta, weight, EPS)
    assert_near(total, x[:, 16:] + delta, tolerance)
    assert_near(normed, norm_of(total, weight), tolerance)
    assert_near(rms_norm(x[:, :80], weight, EPS, is_plus_one=True), norm_of(x[:, :80], 1 + weight.float()), tolerance)
    assert rms_norm(x[:0, :80], weight, EPS).shape == (0, 80)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
def test_what_is_added_may_be_normed_before(dtype: torch.dtype, tolerance: float, offset: int) -> None:
    x, delta = (torch.randn(5, 80).to(dtype) for _ in range(2))
    weight, delta_weight = (torch.randn(80).to(dtype) for _ in range(2))
    normed, total = add_rms_norm(x, delta, weight, EPS, 0, offset == 1, delta_weight, 0.5)
    rms = (delta.float().square().mean(-1, keepdim=True) + 0.5).sqrt()
    assert_near(total, x.float() + delta.float() / rms * (offset + delta_weight.float()), tolerance)
    assert_near(normed, norm_of(total, offset + weight.float()), tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
def test_the_activation_reads_both_halves(dtype: torch.dtype, tolerance: float) -> None:
    gate_up = torch.randn(3, 2 * 1030).to(dtype)
    expected = F.silu(gate_up[:, :1030].float()) * gate_up[:, 1030:].float()
    assert_near(silu_and_mul(gate_up), expected, tolerance)
    expected = F.gelu(gate_up[:, :1030].float(), approximate="tanh") * gate_up[:, 1030:].float()
    assert_near(gelu_tanh_and_mul(gate_up), expected, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize(("rows", "k"), [(1, 96), (1, 1536), (3, 512)])
def test_a_product_takes_in_what_comes_before_and_after_it(
    rows: int, k: int, dtype: torch.dtype, tolerance: float
) -> None:
    x, delta, norm_weight = (torch.randn(*shape).to(dtype) for shape in ((rows, k), (rows, k), (k,)))
    weight, bias, residual = (torch.randn(*shape).to(dtype) for shape in ((50, k), (50,), (rows, 50)))
    tiles = GemvTiles(block_n=16, block_k=512, num_warps=4)

    plain, same = gemv(x, weight, tiles)
    assert same is x
    assert_near(plain, x.float() @ weight.float().T, tolerance)

    added, _ = gemv(x, weight, tiles, bias=bias, residual=residual)
    assert_near(added, x.float() @ weight.float().T + bias.float() + residual.float(), tolerance)

    normed, total = gemv(x, weight, tiles, bias=bias, delta=delta, norm_weight=norm_weight, eps=EPS)
    assert_near(total, x + delta, tolerance)
    product = norm_of(total, norm_weight) @ weight.float().T + bias.float()
    assert_near(normed, product, tolerance)

    gated, _ = gemv(x, weight, tiles, bias=bias, delta=delta, norm_weight=norm_weight, eps=EPS, is_gated=True)
    assert_near(gated, F.silu(product[:, :25]) * product[:, 25:], tolerance)

    gated, _ = gemv(
        x, weight, tiles, bias=bias, delta=delta, norm_weight=norm_weight, eps=EPS, is_gated=True, is_gelu=True
    )
    assert_near(gated, F.gelu(product[:, :25], approximate="tanh") * product[:, 25:], tolerance)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize(("rows", "k"), [(1, 96), (3, 1100)])
def test_a_product_norms_what_is_added_before(
    rows: int, k: int, dtype: torch.dtype, tolerance: float, offset: int
) -> None:
    x, delta = (torch.randn(rows, k).to(dtype) for _ in range(2))
    norm_weight, delta_weight, weight = (torch.randn(*shape).to(dtype) for shape in ((k,), (k,), (50, k)))
    got, total = gemv(
        x, weight, GemvTiles(16, 512, 4), delta=delta, delta_weight=delta_weight, delta_eps=0.5,
        norm_weight=norm_weight, eps=EPS, is_plus_one=offset == 1,
    )  # fmt: skip
    rms = (delta.float().square().mean(-1, keepdim=True) + 0.5).sqrt()
    assert_near(total, x.float() + delta.float() / rms * (offset + delta_weight.float()), tolerance)
    assert_near(got, norm_of(total, offset + norm_weight.float()) @ weight.float().T, tolerance)


def test_angles_are_those_of_the_layer() -> None:
    positions, frequencies = torch.randint(0, 1 << 20, (19,)), torch.rand(40)
    expected = TORCH_OPS.angles(positions, frequencies, 1.5)
    cos, sin = angles(positions, frequencies, 1.5)
    torch.testing.assert_close(cos, expected.cos, rtol=0, atol=3e-7)
    torch.testing.assert_close(sin, expected.sin, rtol=0, atol=3e-7)
    assert angles(positions[:0], frequencies, 1.5)[0].shape == (0, 1, 40)


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize("offset", [None, 0, 1])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(6, 2, 64), (5, 1, 80), (2, 2, 128)])
def test_queries_and_keys_are_normed_rotated_and_stored(
    num_heads: int, num_kv_heads: int, head_dim: int, offset: int | None, dtype: torch.dtype, tolerance: float
) -> None:
    """`offset` is what the norms add to their weights; None: there are no norms."""
    tokens, all_heads = 4, num_heads + 2 * num_kv_heads
    qkv = torch.randn(tokens, all_heads * head_dim).to(dtype)
    weights = (torch.randn(head_dim).to(dtype), torch.randn(head_dim).to(dtype)) if offset is not None else None
    rotation = TORCH_OPS.angles(torch.tensor([0, 7, 31000, 2]), torch.rand(head_dim // 2), 1.0)
    buffers = torch.full((2, 20, num_kv_heads, head_dim), 9.0).to(dtype)
    locations = torch.tensor([3, 19, 0, 7])

    q, k, v = qkv.clone().float().view(tokens, all_heads, head_dim).split((num_heads, num_kv_heads, num_kv_heads), 1)
    if weights is not None and offset is not None:
        q, k = (norm_of(heads, offset + weight.float()) for heads, weight in ((q, weights[0]), (k, weights[1])))
    q, k = rotate(q, rotation), rotate(k, rotation)

    before = qkv.clone()
    arguments = num_heads, weights, EPS, rotation.cos, rotation.sin, locations, buffers[0], buffers[1]
    prepare_qkv(qkv, *arguments, is_plus_one=offset == 1)
    prepared = qkv.view(tokens, all_heads, head_dim)
    assert_near(prepared[:, :num_heads], q, tolerance)
    assert_near(prepared[:, num_heads : num_heads + num_kv_heads], k, tolerance)
    assert_near(buffers[0, locations], k, tolerance)
    assert torch.equal(buffers[1, locations], v.to(dtype))
    others = [location for location in range(20) if location not in locations.tolist()]
    assert (buffers[:, others] == 9).all()

    elsewhere = torch.full_like(qkv, float("nan"))
    prepare_qkv(before, *arguments, out=elsewhere, is_plus_one=offset == 1)
    assert torch.equal(elsewhere, qkv)


def test_a_float8_memory_holds_them_divided_by_their_scales() -> None:
    # Numbers that the type holds exactly: the interpreter's rounding to it is not right.
    qkv = torch.randint(-7, 8, (3, 4 * 64)).float()
    qkv[0, 130] = 1e6
    qkv[1, 128] = -1e6
    buffers = torch.zeros(2, 4, 1, 64, dtype=torch.float8_e4m3fn)
    nowhere = Rotation(torch.ones(3, 1, 32), torch.zeros(3, 1, 32))
    k, v = qkv.clone()[:, 128:192], qkv.clone()[:, 192:]
    prepare_qkv(
        qkv,
        2,
        None,
        EPS,
        nowhere.cos,
        nowhere.sin,
        torch.tensor([2, 0, 1]),
        buffers[0],
        buffers[1],
        k_scale=0.5,
        v_scale=4.0,
    )
    stored = buffers.float()[:, [2, 0, 1], 0]
    assert torch.equal(stored[0] * 0.5, k.clamp(-224, 224))
    assert torch.equal(stored[1] * 4.0, v)
