"""The kernels of layers and of sampling, in the shapes that a GPU will be asked for."""

from __future__ import annotations

from typing import Any

import torch

from srt.kernels.attention.decode_attention import MAX_SPLITS
from srt.kernels.attention.fused_decode import BLOCK_N as DECODE_BLOCK
from srt.kernels.attention.fused_decode import FusedShape, fused_decode_kernel
from srt.kernels.build.jit import dot_dtype
from srt.kernels.elementwise.rms_norm import rms_norm_kernel
from srt.kernels.elementwise.rotary import angles_kernel, prepare_qkv_kernel
from srt.kernels.elementwise.silu_and_mul import silu_and_mul_kernel
from srt.kernels.gemm.fp8_gemm import block_gemm_kernel, norm_and_quantise_kernel, quantise_rows_kernel
from srt.kernels.gemm.gemv import GemvTiles, gemv_kernel
from srt.kernels.gemm.packed_gemm import PackedTiles, add_parts_kernel, dequantise_kernel, packed_gemm_kernel
from srt.kernels.sampling.adjust_logits import BLOCK as ADJUSTMENT_BLOCK
from srt.kernels.sampling.adjust_logits import bias_kernel, count_tokens_kernel, penalise_kernel
from srt.kernels.sampling.filter import BLOCK as FILTER_BLOCK
from srt.kernels.sampling.filter import (
    ROOM,
    filter_best_kernel,
    filter_gather_kernel,
    filter_levels_kernel,
    filter_threshold_kernel,
)
from srt.kernels.sampling.sample import BLOCK, block_best_kernel, draw_kernel
from tests.kernel_builds.kernel_build import TYPE_NAMES, KernelBuild

_PDL = {"launch_pdl": True}


def layer_builds() -> list[KernelBuild]:
    """As layers launch them, after the kernel before."""
    bf16, fp32 = torch.bfloat16, torch.float32
    builds = [
        _angles(),
        *(_fused_decode(head_dim) for head_dim in (64, 128, 256)),
        _rms_norm(bf16),
        _silu_and_mul(bf16),
    ]
    builds += [_gemv(bf16, is_gated=False), _gemv(bf16, is_gated=True), _gemv(fp32, is_gated=True)]
    builds.append(_gemv(bf16, is_gated=True, weights=torch.float8_e4m3fn))
    builds += [*_filters(fp32), *_adjuster()]
    builds += [_packed_gemm(8, 4096), _packed_gemm(8, 128), _packed_gemm(4, 128), _packed_gemm(4, 32), _add_parts()]
    builds += [_dequantise(group, has_zeros) for group, has_zeros in ((128, False), (128, True), (32, True))]
    builds += [_quantise_rows(has_groups=False), _quantise_rows(has_groups=True), _block_gemm(64), _block_gemm(128)]
    builds += [_norm_and_quantise(has_groups=False), _norm_and_quantise(has_groups=True)]
    for logits in (bf16, fp32):
        builds += [_block_best(logits), _draw(logits)]
    for head_dim, kv in ((64, torch.bfloat16), (128, torch.bfloat16), (128, torch.float8_e4m3fn)):
        builds.append(_prepare_qkv(head_dim, kv))
    return builds


def _build(label: str, kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any) -> KernelBuild:
    return KernelBuild(label, kernel, types, {**constants, "PDL": True}, {**_PDL, **options})


def _angles() -> KernelBuild:
    values = dict.fromkeys(("frequencies_ptr", "cos_ptr", "sin_ptr"), "*fp32")
    return _build(
        "angles[]",
        angles_kernel,
        {**values, "positions_ptr": "*i64", "factor": "fp32", "num_tokens": "i32"},
        {"HALF": 64, "BLOCK_T": 8, "BLOCK_HALF": 64},
    )


def _rms_norm(dtype: torch.dtype) -> KernelBuild:
    values = ("x_ptr", "delta_ptr", "delta_weight_ptr", "weight_ptr", "out_ptr", "sum_ptr")
    return _build(
        f"rms_norm[{TYPE_NAMES[dtype]}]",
        rms_norm_kernel,
        {**dict.fromkeys(values, f"*{TYPE_NAMES[dtype]}"), "delta_eps": "fp32", "eps": "fp32", "row_stride": "i32"},
        {"HAS_DELTA": True, "HAS_DELTA_NORM": True, "IS_PLUS_ONE": True, "SIZE": 5120, "BLOCK": 8192},
        num_warps=16,
    )


def _silu_and_mul(dtype: torch.dtype) -> KernelBuild:
    return _build(
        f"silu_and_mul[{TYPE_NAMES[dtype]}]",
        silu_and_mul_kernel,
        dict.fromkeys(("gate_up_ptr", "out_ptr"), f"*{TYPE_NAMES[dtype]}"),
        {"IS_GELU": False, "SIZE": 3072, "BLOCK": 1024},
    )


def _gemv(dtype: torch.dtype, is_gated: bool, weights: torch.dtype | None = None) -> KernelBuild:
    """Gate and up of a small model, or the output of its attention."""
    tensors = (
        "x_ptr",
        "delta_ptr",
        "delta_weight_ptr",
        "norm_weight_ptr",
        "w_ptr",
        "bias_ptr",
        "residual_ptr",
        "out_ptr",
        "sum_ptr",
    )
    n, k = (3072, 1024) if is_gated else (1024, 2048)
    weights = weights or dtype
    tiles = GemvTiles.choose(n * (2 if is_gated else 1), k, is_gated, weights.itemsize)
    return _build(
        f"gemv[{TYPE_NAMES[dtype]}, {TYPE_NAMES[weights]} {'gated' if is_gated else 'plain'}]",
        gemv_kernel,
        {
            **dict.fromkeys(tensors, f"*{TYPE_NAMES[dtype]}"),
            "w_ptr": f"*{TYPE_NAMES[weights]}",
            "scales_ptr": "*fp32",
            "delta_eps": "fp32",
            "eps": "fp32",
        },
        {
            "N": n,
            "K": k,
            "ROWS": 1,
            "GATED": is_gated,
            "IS_GELU": is_gated,
            "HAS_DELTA": is_gated,
            "HAS_DELTA_NORM": is_gated,
            "HAS_NORM": is_gated,
            "IS_PLUS_ONE": is_gated,
            "HAS_SCALES": weights is not dtype,
            "HAS_BIAS": False,
            "HAS_RESIDUAL": not is_gated,
            "BLOCK_N": tiles.block_n,
            "BLOCK_K": tiles.block_k,
        },
        num_warps=tiles.num_warps,
    )


def _packed_gemm(num_bits: int, group: int) -> KernelBuild:
    """Four-bit weights have zero points, and their results are added later."""
    tiles = PackedTiles.choose(16 if num_bits == 4 else 64, 4096, 4096, group, 132)
    return _build(
        f"packed_gemm[{num_bits} bits, groups of {group}]",
        packed_gemm_kernel,
        {
            **dict.fromkeys(("x_ptr", "bias_ptr", "residual_ptr"), "*bf16"),
            "w_ptr": "*u8" if num_bits == 8 else "*i16",
            "scales_ptr": "*fp32" if num_bits == 8 else "*bf16",
            "zeros_ptr": "*i16",
            "out_ptr": "*fp32",
            "num_rows": "i32",
        },
        {
            "N": 4096,
            "K": 4096,
            "GROUP": group,
            "IS_FLOAT": num_bits == 8,
            "HAS_ZEROS": num_bits == 4,
            "HAS_BIAS": False,
            "HAS_RESIDUAL": False,
            "SPLITS": tiles.splits,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": 64,
            "BLOCK_K": tiles.block_k,
            "DOT_DTYPE": dot_dtype(torch.bfloat16),
            "HOPPER": True,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _dequantise(group: int, has_zeros: bool) -> KernelBuild:
    return KernelBuild(
        f"dequantise[groups of {group}{', zero points' if has_zeros else ''}]",
        dequantise_kernel,
        {"w_ptr": "*i16", "scales_ptr": "*bf16", "zeros_ptr": "*i16", "out_ptr": "*bf16"},
        {"N": 4096, "K": 4096, "GROUP": group, "HAS_ZEROS": has_zeros, "BLOCK_N": 64, "BLOCK_K": min(128, group)},
    )


def _add_parts() -> KernelBuild:
    return _build(
        "add_parts[]",
        add_parts_kernel,
        {"parts_ptr": "*fp32", **dict.fromkeys(("bias_ptr", "residual_ptr", "out_ptr"), "*bf16"), "num_rows": "i32"},
        {"N": 4096, "SPLITS": 4, "HAS_BIAS": False, "HAS_RESIDUAL": True, "BLOCK": 1024},
    )


def _quantise_rows(has_groups: bool) -> KernelBuild:
    return _build(
        f"quantise_rows[{'groups' if has_groups else 'tokens'}]",
        quantise_rows_kernel,
        {
            **dict.fromkeys(("given_ptr", "scales_ptr"), "*fp32"),
            "x_ptr": "*bf16",
            "out_ptr": "*fp8e4nv",
            **dict.fromkeys(("row_stride", "scales_row_stride", "scales_group_stride"), "i32"),
        },
        {"K": 12288, "HAS_GROUPS": has_groups, "HAS_SCALE": False, "BLOCK": 16384},
        num_warps=8,
    )


def _norm_and_quantise(has_groups: bool) -> KernelBuild:
    return _build(
        f"norm_and_quantise[{'groups' if has_groups else 'tokens'}]",
        norm_and_quantise_kernel,
        {
            **dict.fromkeys(("x_ptr", "delta_ptr", "weight_ptr", "sum_ptr"), "*bf16"),
            "numbers_ptr": "*fp8e4nv",
            "scales_ptr": "*fp32",
            "eps": "fp32",
            "pitch": "i32",
        },
        {"HAS_DELTA": True, "HAS_GROUPS": has_groups, "SIZE": 5120, "BLOCK": 8192},
        num_warps=16,
    )


def _block_gemm(block_m: int) -> KernelBuild:
    return KernelBuild(
        f"block_gemm[{block_m} rows]",
        block_gemm_kernel,
        {
            **dict.fromkeys(("x_ptr", "w_ptr"), "*fp8e4nv"),
            **dict.fromkeys(("x_scales_ptr", "w_scales_ptr"), "*fp32"),
            **dict.fromkeys(("bias_ptr", "out_ptr"), "*bf16"),
            "num_rows": "i32",
        },
        {"N": 4096, "K": 4096, "HAS_BIAS": False, "BLOCK_M": block_m, "BLOCK_N": 128, "TOGETHER": 8},
        {"num_warps": 4 if block_m == 64 else 8, "num_stages": 4},
    )


def _prepare_qkv(head_dim: int, kv: torch.dtype) -> KernelBuild:
    return _build(
        f"prepare_qkv[{TYPE_NAMES[kv]}, head_dim {head_dim}]",
        prepare_qkv_kernel,
        {
            **dict.fromkeys(("qkv_ptr", "out_ptr", "q_weight_ptr", "k_weight_ptr"), "*bf16"),
            **dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32"),
            **dict.fromkeys(("k_buffer_ptr", "v_buffer_ptr"), f"*{TYPE_NAMES[kv]}"),
            "locations_ptr": "*i64",
            **dict.fromkeys(("eps", "k_scale_inverse", "v_scale_inverse"), "fp32"),
            **dict.fromkeys(("k_location_stride", "v_location_stride"), "i32"),
        },
        {
            "NUM_HEADS": 16,
            "NUM_KV_HEADS": 8,
            "HEAD_DIM": head_dim,
            "HAS_NORM": True,
            "IS_PLUS_ONE": False,
            "LARGEST": 448 if kv == torch.float8_e4m3fn else 0,
            "BLOCK_H": 8,
            "BLOCK_HALF": head_dim // 2,
        },
    )


def _fused_decode(head_dim: int) -> KernelBuild:
    model = ("qkv_ptr", "q_weight_ptr", "k_weight_ptr", "k_ptr", "v_ptr", "out_ptr")
    group = 5
    shape = FusedShape.choose(head_dim, group)
    return _build(
        f"fused_decode[head_dim {head_dim}]",
        fused_decode_kernel,
        {
            **dict.fromkeys(model, "*bf16"),
            **dict.fromkeys(("cos_ptr", "sin_ptr", "partial_ptr", "lse_ptr"), "*fp32"),
            **dict.fromkeys(("locations_ptr", "req_pool_indices_ptr", "seq_lens_ptr"), "*i64"),
            **dict.fromkeys(("page_table_ptr", "arrived_ptr"), "*i32"),
            **dict.fromkeys(("eps", "scale_log2"), "fp32"),
            **dict.fromkeys(("window", "k_location_stride", "v_location_stride", "page_table_stride"), "i32"),
        },
        {
            "HAS_NORM": True,
            "IS_PLUS_ONE": head_dim == 256,
            "GROUP": group,
            "NUM_KV_HEADS": 8,
            "HEAD_DIM": head_dim,
            "PAGE_SIZE": 16,
            "DOT_DTYPE": dot_dtype(torch.bfloat16),
            "BLOCK_G": 16,
            "BLOCK_N": DECODE_BLOCK if head_dim <= 128 else DECODE_BLOCK // 2,
            "BLOCK_S": MAX_SPLITS,
            "MERGED": shape.merged,
        },
        num_warps=shape.num_warps,
    )


_ROW_TYPES = {
    **dict.fromkeys(("temperatures_ptr", "thresholds_ptr", "best_ptr", "values_ptr"), "*fp32"),
    **dict.fromkeys(("seeds_ptr", "positions_ptr", "ids_ptr"), "*i64"),
    **dict.fromkeys(("num_columns", "row_stride", "first_group", "num_blocks", "shard_start", "vocab_size"), "i32"),
}


_FILTER_TYPES = {
    **dict.fromkeys(("temperatures_ptr", "best_ptr", "near_ptr", "thresholds_ptr"), "*fp32"),
    **dict.fromkeys(("rows_ptr", "top_ks_ptr"), "*i64"),
    **dict.fromkeys(("top_ps_ptr", "min_ps_ptr", "masses_ptr"), "*fp64"),
    "counts_ptr": "*i32",
    **dict.fromkeys(("row_stride", "num_columns", "num_blocks"), "i32"),
}


def _filters(dtype: torch.dtype) -> list[KernelBuild]:
    kernels = {
        "filter_best": filter_best_kernel,
        "filter_levels": filter_levels_kernel,
        "filter_gather": filter_gather_kernel,
        "filter_threshold": filter_threshold_kernel,
    }
    values = {"BLOCK": FILTER_BLOCK, "NUM_BLOCKS": 128, "ROOM": ROOM, "HAS_ROWS": True, "WHOLE": False}
    builds = []
    for name, kernel in kernels.items():
        types = {argument: kind for argument, kind in _FILTER_TYPES.items() if argument in kernel.arg_names}
        types["logits_ptr"] = f"*{TYPE_NAMES[dtype]}"
        constants = {constant: value for constant, value in values.items() if constant in kernel.arg_names}
        options = {"num_warps": 16} if name == "filter_threshold" else {}
        builds.append(_build(f"{name}[{TYPE_NAMES[dtype]}]", kernel, types, constants, **options))
    # As it is launched a second time, for rows that had no room.
    builds.append(_build(f"{name}[{TYPE_NAMES[dtype]}, whole]", kernel, types, {**constants, "WHOLE": True}, **options))
    return builds


_ADJUSTMENT_TYPES = {
    **dict.fromkeys(("logits_ptr", "penalties_ptr", "bias_values_ptr"), "*fp32"),
    **dict.fromkeys(("slots_ptr", "positions_ptr", "limits_ptr"), "*i64"),
    **dict.fromkeys(("token_table_ptr", "counts_ptr", "bias_ids_ptr", "stop_ids_ptr"), "*i32"),
    **dict.fromkeys(("num_columns", "shard_start", "token_table_stride", "row_stride"), "i32"),
    **dict.fromkeys(("bias_stride", "stop_stride"), "i32"),
}


def _adjuster() -> list[KernelBuild]:
    kernels = {"count_tokens": count_tokens_kernel, "penalise": penalise_kernel, "bias": bias_kernel}
    return [
        KernelBuild(
            f"{name}[]",
            kernel,
            {argument: kind for argument, kind in _ADJUSTMENT_TYPES.items() if argument in kernel.arg_names},
            {"BLOCK": ADJUSTMENT_BLOCK},
            {"enable_fp_fusion": False} if name == "penalise" else {},
        )
        for name, kernel in kernels.items()
    ]


def _block_best(dtype: torch.dtype) -> KernelBuild:
    return _sampling("block_best", block_best_kernel, dtype, {})


def _draw(dtype: torch.dtype) -> KernelBuild:
    return _sampling("draw", draw_kernel, dtype, {"NUM_BLOCKS": 128}, num_warps=8)


def _sampling(name: str, kernel: Any, dtype: torch.dtype, constants: dict[str, Any], **options: Any) -> KernelBuild:
    types = {name: kind for name, kind in _ROW_TYPES.items() if name in kernel.arg_names}
    types["logits_ptr"] = f"*{TYPE_NAMES[dtype]}"
    constants = {**constants, "HAS_THRESHOLD": True, "SHIFT": 0, "BLOCK": BLOCK}
    return _build(f"{name}[{TYPE_NAMES[dtype]}]", kernel, types, constants, **options)
