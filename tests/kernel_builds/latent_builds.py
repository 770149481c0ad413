"""The kernels of attention over latents, for the sizes of DeepSeek: 512 numbers and 64 rotated ones."""

from __future__ import annotations

import torch

from srt.kernels.attention.latent_attention import (
    DECODE_PAIRS,
    MAX_SPLITS,
    MIN_SPLIT_TOKENS,
    LatentTiles,
    latent_attention_kernel,
    merge_latent_splits_kernel,
)
from srt.kernels.build.jit import dot_dtype
from srt.kernels.elementwise.prepare_latents import prepare_latents_kernel
from srt.kernels.gemm.head_products import head_products_kernel
from tests.kernel_builds.kernel_build import TYPE_NAMES, KernelBuild

RANK, ROPE, HEADS = 512, 64, 16
_OF_QUERIES = ("q_token_stride", "q_head_stride", "rotated_token_stride", "rotated_head_stride")
_STRIDES = (*_OF_QUERIES, "location_stride", "page_table_stride")


def latent_builds(shared: int) -> list[KernelBuild]:
    """Decodes in splits, and chunks with the tiles of a GPU with `shared` bytes of shared memory. float32 takes long to compile."""
    bf16 = torch.bfloat16
    decodes, chunks = (LatentTiles.choose(bf16, pairs, shared) for pairs in (DECODE_PAIRS, 1 << 20))
    return [
        _prepare(bf16),
        _merge(bf16),
        _attention(bf16, decodes, 8, decodes=True),
        _attention(bf16, chunks, 1, decodes=False),
        *(_head_products(bf16, into_latents) for into_latents in (True, False)),
    ]


def _attention(dtype: torch.dtype, tiles: LatentTiles, splits: int, *, decodes: bool) -> KernelBuild:
    name = TYPE_NAMES[dtype]
    return KernelBuild(
        name=f"latent_attention[{name}, {f'decodes in {splits} splits' if decodes else 'chunks'}]",
        kernel=latent_attention_kernel,
        types={
            **dict.fromkeys(("q_ptr", "rotated_ptr", "latents_ptr", "out_ptr"), f"*{name}"),
            **dict.fromkeys(("slots_ptr", "prefix_lens_ptr", "extend_lens_ptr", "start_locs_ptr"), "*i64"),
            **dict.fromkeys(("partial_ptr", "lse_ptr"), "*fp32"),
            "page_table_ptr": "*i32",
            "scale_log2": "fp32",
            **dict.fromkeys(_STRIDES, "i32"),
        },
        constants={
            "HEADS": HEADS,
            "RANK": RANK,
            "ROPE": ROPE,
            "PAGE_SIZE": 16,
            "DECODES": decodes,
            "SPLITS": splits,
            "MIN_SPLIT": MIN_SPLIT_TOKENS,
            "DOT_DTYPE": dot_dtype(dtype),
            "BLOCK_M": tiles.block_m,
            "BLOCK_R": RANK,
            "BLOCK_P": ROPE,
            "BLOCK_N": tiles.block_n,
        },
        options={"num_warps": tiles.num_warps, "num_stages": tiles.num_stages},
    )


def _merge(dtype: torch.dtype) -> KernelBuild:
    name = TYPE_NAMES[dtype]
    return KernelBuild(
        name=f"merge_latent_splits[{name}]",
        kernel=merge_latent_splits_kernel,
        types={"partial_ptr": "*fp32", "lse_ptr": "*fp32", "out_ptr": f"*{name}"},
        constants={"RANK": RANK, "SPLITS": 8, "BLOCK_R": RANK, "BLOCK_S": MAX_SPLITS},
    )


def _prepare(dtype: torch.dtype) -> KernelBuild:
    name = TYPE_NAMES[dtype]
    sizes = {"HEADS": HEADS, "HEAD_DIM": 192, "ROPE": ROPE, "RANK": RANK, "INTERLEAVED": True}
    return KernelBuild(
        name=f"prepare_latents[{name}]",
        kernel=prepare_latents_kernel,
        types={
            **dict.fromkeys(("q_ptr", "latents_ptr", "norm_weight_ptr", "memory_ptr"), f"*{name}"),
            **dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32"),
            "locations_ptr": "*i64",
            "eps": "fp32",
            **dict.fromkeys(("q_token_stride", "latents_token_stride", "location_stride"), "i32"),
        },
        constants={**sizes, "BLOCK_H": 16, "BLOCK_HALF": ROPE // 2, "BLOCK_R": RANK, "PDL": True},
        options={"launch_pdl": True},
    )


def _head_products(dtype: torch.dtype, into_latents: bool) -> KernelBuild:
    """Queries of 128 elements taken into the space of latents, or results of 128 elements taken out of it, for 2 rows."""
    name = TYPE_NAMES[dtype]
    sizes = (RANK, 128, 1, RANK, 32) if into_latents else (128, RANK, RANK, 1, 8)
    strides = ("x_row_stride", "x_head_stride", "w_head_stride", "out_row_stride", "out_head_stride")
    return KernelBuild(
        name=f"head_products[{name}, {'into' if into_latents else 'out of'} the space of latents]",
        kernel=head_products_kernel,
        types={**dict.fromkeys(("x_ptr", "w_ptr", "out_ptr"), f"*{name}"), **dict.fromkeys(strides, "i32")},
        constants={
            **dict(zip(("N", "K", "N_STRIDE", "K_STRIDE", "BLOCK_N"), sizes, strict=True)),
            "ROWS": 2,
            "BLOCK_K": sizes[1],
            "PDL": 2,
        },
        options={"launch_pdl": True},
    )
