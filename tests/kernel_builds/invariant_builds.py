"""The kernels of deterministic servers, for the sizes of an 8B model, and once in float32."""

from __future__ import annotations

import torch

from srt.kernels.attention.invariant_attention import (
    SPLIT,
    InvariantTiles,
    invariant_attention_kernel,
)
from srt.kernels.build.jit import block_dim, dot_dtype
from srt.kernels.elementwise.invariant_sums import sum_add_norm_kernel, sum_prepare_qkv_kernel
from srt.kernels.gemm.invariant_gemm import (
    PREFETCHED,
    UNIT,
    ProductTiles,
    Splits,
    invariant_product_kernel,
    sum_parts_kernel,
)
from srt.kernels.sampling.row_logprobs import row_logprobs_kernel
from tests.kernel_builds.kernel_build import TYPE_NAMES, KernelBuild

SIZES = (4096, 4096)
_UNFUSED = {"enable_fp_fusion": False, "launch_pdl": True}


def invariant_builds() -> list[KernelBuild]:
    """Products of few and of many rows, and attention of decodes and chunks."""
    bf16, fp32 = torch.bfloat16, torch.float32
    builds = [_logprobs(), _sum_parts(bf16), _sum_add_norm(bf16), _sum_prepare_qkv(bf16), _product(fp32, 64, *SIZES)]
    builds += [_product(bf16, rows, *SIZES) for rows in (1, 32, 128, 512)]
    builds += [_product(bf16, rows, 24576, 4096, is_gated=True) for rows in (1, 64, 512)]
    builds += [_attention(fp32, 128, 4, decodes=True, parted=False)]
    for head_dim in (64, 128, 256):
        builds += [
            _attention(bf16, head_dim, 4, decodes=True, parted=True),
            _attention(bf16, head_dim, 4, decodes=True, parted=False),
            _attention(bf16, head_dim, 4, decodes=False, parted=False),
        ]
    return builds


def _product(dtype: torch.dtype, num_rows: int, n: int, k: int, is_gated: bool = False) -> KernelBuild:
    name, splits = TYPE_NAMES[dtype], Splits.of(n, k)
    tiles = ProductTiles.choose(num_rows, splits.num, dtype)
    return KernelBuild(
        name=f"invariant_product[{name}, {num_rows} rows, {n} x {k}{', gated' if is_gated else ''}]",
        kernel=invariant_product_kernel,
        types={
            **dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "out_ptr"), f"*{name}"),
            "parts_ptr": "*fp32",
            **dict.fromkeys(("num_rows", "row_stride", "out_row_stride", "split_units"), "i32"),
        },
        constants={
            "SPLITS": splits.num,
            "UNIT": UNIT,
            "PARTED": splits.num > 1 and num_rows <= 256,
            "IS_RAW": not is_gated,
            "IS_GATED": is_gated,
            "HAS_BIAS": False,
            "EVEN": True,
            "DOT_DTYPE": dot_dtype(dtype),
            "BLOCK_N": tiles.weights,
            "BLOCK_R": tiles.rows,
            "BLOCK_K": tiles.depth,
            "BAND": 8,
            "PREFETCHED": PREFETCHED,
            "PDL": 1 if num_rows <= 4 else 0,
        },
        options={"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "launch_pdl": True},
    )


def _sum_parts(dtype: torch.dtype) -> KernelBuild:
    name = TYPE_NAMES[dtype]
    return KernelBuild(
        name=f"sum_parts[{name}]",
        kernel=sum_parts_kernel,
        types={
            "parts_ptr": "*fp32",
            **dict.fromkeys(("bias_ptr", "out_ptr"), f"*{name}"),
            **dict.fromkeys(("num_rows", "num_parts", "out_row_stride"), "i32"),
        },
        constants={"HAS_BIAS": True, "BLOCK": 1024, "PDL": 1},
        options={"launch_pdl": True},
    )


def _sum_add_norm(dtype: torch.dtype) -> KernelBuild:
    name = TYPE_NAMES[dtype]
    return KernelBuild(
        name=f"sum_add_norm[{name}]",
        kernel=sum_add_norm_kernel,
        types={
            "parts_ptr": "*fp32",
            **dict.fromkeys(("bias_ptr", "hidden_ptr", "weight_ptr", "out_ptr", "sum_ptr"), f"*{name}"),
            "eps": "fp32",
            **dict.fromkeys(("num_rows", "num_parts"), "i32"),
        },
        constants={"HAS_BIAS": True, "SIZE": 4096, "BLOCK": 4096, "PDL": 1},
        options={"num_warps": 8, "launch_pdl": True},
    )


def _sum_prepare_qkv(dtype: torch.dtype) -> KernelBuild:
    name = TYPE_NAMES[dtype]
    matrices = ("bias_ptr", "out_ptr", "q_weight_ptr", "k_weight_ptr", "k_buffer_ptr", "v_buffer_ptr")
    sizes = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_H": 8, "BLOCK_HALF": 64}
    return KernelBuild(
        name=f"sum_prepare_qkv[{name}]",
        kernel=sum_prepare_qkv_kernel,
        types={
            **dict.fromkeys(matrices, f"*{name}"),
            **dict.fromkeys(("parts_ptr", "cos_ptr", "sin_ptr"), "*fp32"),
            "locations_ptr": "*i64",
            "eps": "fp32",
            **dict.fromkeys(("num_tokens", "num_parts", "k_location_stride", "v_location_stride"), "i32"),
        },
        constants={**sizes, "HAS_BIAS": True, "HAS_NORM": True, "PDL": 1},
        options={"launch_pdl": True},
    )


def _logprobs() -> KernelBuild:
    return KernelBuild(
        name="row_logprobs[fp32]",
        kernel=row_logprobs_kernel,
        types={"logits_ptr": "*fp32", "out_ptr": "*fp32", "row_stride": "i32", "num_columns": "i32"},
        constants={"BLOCK": 4096},
        options={"num_warps": 16},
    )


def _attention(dtype: torch.dtype, head_dim: int, group: int, *, decodes: bool, parted: bool) -> KernelBuild:
    name = TYPE_NAMES[dtype]
    tiles = InvariantTiles.choose(dtype, head_dim, group if decodes else 4096)
    kind = f"decodes{' in parts' if parted else ''}" if decodes else "chunks"
    return KernelBuild(
        name=f"invariant_attention[{name}, head_dim {head_dim}, {kind}]",
        kernel=invariant_attention_kernel,
        types={
            **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{name}"),
            **dict.fromkeys(("slots_ptr", "lens_ptr", "prefix_lens_ptr", "start_locs_ptr"), "*i64"),
            **dict.fromkeys(("parts_ptr", "peaks_ptr"), "*fp32"),
            **dict.fromkeys(("page_table_ptr", "arrivals_ptr"), "*i32"),
            "most_splits": "i32",
            "scale_log2": "fp32",
            "q_token_stride": "i32",
            "out_token_stride": "i32",
            "k_location_stride": "i32",
            "v_location_stride": "i32",
            "page_table_stride": "i32",
        },
        constants={
            "IS_DECODE": decodes,
            "PARTED": parted,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "PAGE_SIZE": 16,
            "DOT_DTYPE": dot_dtype(dtype),
            "BLOCK_M": tiles.pairs,
            "BLOCK_D": block_dim(head_dim),
            "BLOCK_N": tiles.positions,
            "SPLIT": SPLIT,
            "PDL": 1,
        },
        options={"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, **_UNFUSED},
    )
