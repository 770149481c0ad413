"""Every kernel, in the shapes that a GPU will be asked for, compiled without a GPU.

    python -m tests.kernel_builds.builds [--capability 80 89 90] [name …]

prints a line per build, by default those of Hopper. A kernel that is missing here is one that nothing proves to compile.
"""

from __future__ import annotations

import argparse
import sys

import torch
import triton.language as tl

from srt.kernels.attention.decode_attention import MAX_SPLITS, DecodeTiles, decode_attention_kernel
from srt.kernels.attention.even_attention import BLOCK_N as EVEN_BLOCK_N
from srt.kernels.attention.even_attention import (
    LEAST_WORK,
    MOST_ROWS,
    NUM_STAGES,
    NUM_WARPS,
    SHARES_AT_ONCE,
    WINDOW_UNIT,
    can_be_even,
    even_attention_kernel,
    find_shares_kernel,
)
from srt.kernels.attention.extend_attention import ExtendTiles, extend_kernel
from srt.kernels.attention.gather_kv import gather_kv_kernel
from srt.kernels.attention.gather_pages import gather_pages_kernel
from srt.kernels.attention.shared_prefix import BLOCK_N as SHARED_BLOCK_N
from srt.kernels.attention.shared_prefix import (
    PAGES_AT_ONCE,
    block_rows,
    can_share,
    find_shared_kernel,
    shared_attention_kernel,
)
from srt.kernels.attention.write_kv import write_kv_kernel
from srt.kernels.build.jit import block_dim
from srt.kernels.build.shared_memory import SHARED_BYTES
from srt.kernels.elementwise.gather_decode import gather_decode_kernel, store_draws_kernel
from srt.kernels.elementwise.gather_window import gather_window_kernel
from srt.kernels.elementwise.verify_rows import accept_draws_kernel, gather_tokens_kernel
from srt.kernels.sampling.ngram import BLOCK as NGRAM_BLOCK
from srt.kernels.sampling.ngram import draft_ngrams_kernel
from srt.kernels.sampling.token_masks import BLOCK as MASK_BLOCK
from srt.kernels.sampling.token_masks import apply_token_masks_kernel
from tests.kernel_builds.expert_builds import expert_builds
from tests.kernel_builds.invariant_builds import invariant_builds
from tests.kernel_builds.kernel_build import HOPPER, TYPE_NAMES, KernelBuild
from tests.kernel_builds.latent_builds import latent_builds
from tests.kernel_builds.layer_builds import layer_builds
from tests.kernel_builds.lora_builds import lora_builds

_DOT_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def all_builds(capability: int = HOPPER) -> list[KernelBuild]:
    """Each kernel for bfloat16 heads of 64, 128 and 256, and once for float16 and float32, with the tiles of such a GPU."""
    bf16 = torch.bfloat16
    cases = [(bf16, 64, 4), (bf16, 128, 5), (bf16, 256, 2), (torch.float16, 128, 1), (torch.float32, 128, 4)]
    shared = SHARED_BYTES[capability]
    builds: list[KernelBuild] = [
        _gather_pages(),
        _gather_kv(bf16),
        _gather_kv(torch.float8_e4m3fn),
        _gather_decode(),
        _gather_window(),
        _store_draws(),
        _gather_tokens(),
        _accept_draws(),
        _find_shared(),
        _find_shares(),
    ]
    builds += [_token_masks(bf16), _token_masks(torch.float32), _draft_ngrams()]
    builds += [*layer_builds(), *expert_builds(), *latent_builds(shared), *lora_builds(), *invariant_builds()]
    builds.append(_decode_attention(bf16, 256, 2, shared, softcap=50.0))
    builds.append(_extend(bf16, 256, 2, shared, softcap=50.0))
    for dtype, head_dim, group in cases:
        builds.append(_write_kv(dtype, head_dim))
        builds.append(_decode_attention(dtype, head_dim, group, shared))
        builds.append(_extend(dtype, head_dim, group, shared))
        if can_be_even(dtype, head_dim, 8, 132, shared):
            builds.append(_even_attention(dtype, head_dim, group))
        if can_share(dtype, head_dim, group):
            builds.append(_shared_attention(dtype, head_dim, group))
            builds.append(_decode_attention(dtype, head_dim, group, shared, has_shared=True))
    for kv in (torch.bfloat16, torch.float8_e4m3fn):
        builds.append(_decode_attention(torch.bfloat16, 128, 4, shared, kv))
        builds.append(_extend(torch.bfloat16, 128, 4, shared, kv, has_window=True))
        builds.append(_extend(torch.bfloat16, 128, 4, shared, kv, block_r=64))
        builds.append(_write_kv(torch.bfloat16, 128, kv))
        if can_be_even(torch.bfloat16, 128, 8, 132, shared):
            builds.append(_even_attention(torch.bfloat16, 128, 4, kv))
        builds.append(_shared_attention(torch.bfloat16, 128, 8, kv))  # as many queries as a block may have
    return [build for build in builds if build.can_be_for(capability)]


def _label(kernel: str, dtype: torch.dtype, head_dim: int) -> str:
    return f"{kernel}[{TYPE_NAMES[dtype]}, head_dim {head_dim}]"


def _kv_label(kernel: str, dtype: torch.dtype, head_dim: int, kv: torch.dtype, more: str = "") -> str:
    return _label(kernel, dtype, head_dim) + (f" over {TYPE_NAMES[kv]}" if kv != dtype else "") + more


def _gather_pages() -> KernelBuild:
    return KernelBuild(
        name="gather_pages[]",
        kernel=gather_pages_kernel,
        types={
            **dict.fromkeys(("page_table_ptr", "indptr_ptr", "firsts_ptr", "out_ptr"), "*i32"),
            "slots_ptr": "*i64",
            "page_table_stride": "i32",
        },
        constants={"HAS_FIRSTS": True, "BLOCK": 256},
    )


def _gather_kv(kv: torch.dtype) -> KernelBuild:
    return KernelBuild(
        name=f"gather_kv[bf16 from {TYPE_NAMES[kv]}]",
        kernel=gather_kv_kernel,
        types={
            **dict.fromkeys(("k_ptr", "v_ptr"), f"*{TYPE_NAMES[kv]}"),
            **dict.fromkeys(("k_out_ptr", "v_out_ptr"), "*bf16"),
            **dict.fromkeys(("page_table_ptr", "indptr_ptr"), "*i32"),
            "slots_ptr": "*i64",
            **dict.fromkeys(("k_scale", "v_scale"), "fp32"),
            **dict.fromkeys(("page_table_stride", "k_location_stride", "v_location_stride"), "i32"),
        },
        constants={
            "HAS_SCALES": kv is not torch.bfloat16,
            "WIDTH": 1024,
            "PAGE_SIZE": 16,
            "BLOCK_T": 16,
            "BLOCK_W": 1024,
        },
        options={"num_warps": 8},
    )


def _gather_window() -> KernelBuild:
    integers = ("row_slots", "page_words", "last", "positions", "locations")
    counts = ("num_rows", "dummy_slot", "page_table_stride", "page_words_stride")
    return KernelBuild(
        name="gather_window[]",
        kernel=gather_window_kernel,
        types={
            **dict.fromkeys((f"{name}_ptr" for name in integers), "*i64"),
            "page_table_ptr": "*i32",
            **dict.fromkeys(counts, "i32"),
        },
        constants={"PAGE_SIZE": 16, "PAGE_BITS": 28, "NUMBER_BITS": 35, "RING": 8, "BLOCK": 32},
        options={"num_warps": 1},
    )


def _gather_decode() -> KernelBuild:
    integers = (
        "row_slots", "page_words", "last", "seq_lens", "seeds", "top_ks", "input_ids", "positions", "locations", "row_lens",
        "row_seeds", "row_top_ks",
    )  # fmt: skip
    doubles = ("top_ps", "min_ps", "row_top_ps", "row_min_ps")
    counts = ("num_rows", "dummy_slot", "page_table_stride", "token_table_stride", "page_words_stride")
    return KernelBuild(
        name="gather_decode[]",
        kernel=gather_decode_kernel,
        types={
            **dict.fromkeys((f"{name}_ptr" for name in integers), "*i64"),
            **dict.fromkeys((f"{name}_ptr" for name in doubles), "*fp64"),
            **dict.fromkeys(("page_table_ptr", "token_table_ptr"), "*i32"),
            **dict.fromkeys(("temperatures_ptr", "row_temperatures_ptr"), "*fp32"),
            **dict.fromkeys(counts, "i32"),
        },
        constants={"PAGE_SIZE": 16, "PAGE_BITS": 28, "NUMBER_BITS": 35, "RING": 8, "BLOCK": 32},
        options={"num_warps": 1},
    )


def _store_draws() -> KernelBuild:
    return KernelBuild(
        name="store_draws[]",
        kernel=store_draws_kernel,
        types={
            **dict.fromkeys(("ids_ptr", "row_slots_ptr", "positions_ptr", "words_ptr", "last_ptr"), "*i64"),
            "values_ptr": "*fp32",
            "token_table_ptr": "*i32",
            **dict.fromkeys(("num_rows", "token_table_stride", "words_stride"), "i32"),
        },
        constants={"RING": 8, "BLOCK": 256},
    )


def _gather_tokens() -> KernelBuild:
    draws = ("seeds", "top_ks")
    integers = ("staged", "seq_lens", "ids", "positions", "token_lens", "locations", "prefix_lens")
    doubles = ("top_ps", "min_ps", "token_top_ps", "token_min_ps")
    counts = (
        "num_tokens",
        "staged_stride",
        "group_stride",
        "page_table_stride",
        "token_table_stride",
        "locations_stride",
    )
    return KernelBuild(
        name="gather_tokens[2 groups]",
        kernel=gather_tokens_kernel,
        types={
            **{f"{name}_ptr": "*i64" for name in (*integers, *draws, *(f"token_{name}" for name in draws))},
            **{f"{name}_ptr": "*fp64" for name in doubles},
            **dict.fromkeys(("page_tables_ptr", "token_table_ptr"), "*i32"),
            **dict.fromkeys(("temperatures_ptr", "token_temperatures_ptr"), "*fp32"),
            **dict.fromkeys(counts, "i32"),
        },
        constants={"GROUPS": 2, "PAGE_SIZE": 16, "BLOCK": 32},
        options={"num_warps": 1},
    )


def _accept_draws() -> KernelBuild:
    integers = ("staged", "ids", "seq_lens", "outcome")
    return KernelBuild(
        name="accept_draws[4]",
        kernel=accept_draws_kernel,
        types={
            **{f"{name}_ptr": "*i64" for name in integers},
            "values_ptr": "*fp32",
            "token_table_ptr": "*i32",
            **dict.fromkeys(("num_tokens", "dummy_slot", "staged_stride", "token_table_stride"), "i32"),
        },
        constants={"BLOCK": 4},
        options={"num_warps": 1},
    )


def _token_masks(dtype: torch.dtype) -> KernelBuild:
    numbers = ("num_columns", "num_words", "shard_start", "row_stride", "words_stride")
    return KernelBuild(
        name=f"apply_token_masks[{TYPE_NAMES[dtype]}]",
        kernel=apply_token_masks_kernel,
        types={
            "logits_ptr": f"*{TYPE_NAMES[dtype]}",
            **dict.fromkeys(("rows_ptr", "words_ptr"), "*i32"),
            **dict.fromkeys(numbers, "i32"),
        },
        constants={"BLOCK": MASK_BLOCK},
    )


def _draft_ngrams() -> KernelBuild:
    return KernelBuild(
        name="draft_ngrams[12 of 1024]",
        kernel=draft_ngrams_kernel,
        types={
            **dict.fromkeys(("slots_ptr", "most_ptr", "seq_lens_ptr"), "*i64"),
            "token_table_ptr": "*i32",
            **dict.fromkeys(("least", "token_table_stride"), "i32"),
        },
        constants={"LONGEST": 12, "BLOCK": NGRAM_BLOCK, "DRAFTS": 8},
    )


def _write_kv(dtype: torch.dtype, head_dim: int, kv: torch.dtype | None = None) -> KernelBuild:
    kv = kv or dtype
    return KernelBuild(
        name=_kv_label("write_kv", dtype, head_dim, kv),
        kernel=write_kv_kernel,
        types={
            **dict.fromkeys(("k_ptr", "v_ptr"), f"*{TYPE_NAMES[dtype]}"),
            **dict.fromkeys(("k_buffer_ptr", "v_buffer_ptr"), f"*{TYPE_NAMES[kv]}"),
            "locations_ptr": "*i64",
            **dict.fromkeys(("k_token_stride", "v_token_stride", "k_location_stride", "v_location_stride"), "i32"),
            **dict.fromkeys(("k_scale", "v_scale"), "fp32"),
        },
        constants={"AS_FP8": kv is torch.float8_e4m3fn, "ROW": 8 * head_dim, "BLOCK": 8 * head_dim},
    )


def _decode_attention(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    shared_bytes: int,
    kv: torch.dtype | None = None,
    has_shared: bool = False,
    softcap: float = 0.0,
) -> KernelBuild:
    tiles = DecodeTiles.choose(dtype, head_dim, 64, 40_960, 132, shared_bytes)
    kv = kv or dtype
    strides = ("q_row_stride", "k_location_stride", "v_location_stride", "page_table_stride", "out_row_stride")
    return KernelBuild(
        name=_kv_label(
            "decode_attention",
            dtype,
            head_dim,
            kv,
            " behind a shared prefix" if has_shared else " capped" if softcap else "",
        ),
        kernel=decode_attention_kernel,
        types={
            **dict.fromkeys(("q_ptr", "sinks_ptr", "out_ptr"), f"*{TYPE_NAMES[dtype]}"),
            **dict.fromkeys(("k_ptr", "v_ptr"), f"*{TYPE_NAMES[kv]}"),
            "page_table_ptr": "*i32",
            **dict.fromkeys(("req_pool_indices_ptr", "seq_lens_ptr"), "*i64"),
            **dict.fromkeys(("partial_ptr", "lse_ptr", "shared_partial_ptr", "shared_lse_ptr"), "*fp32"),
            **dict.fromkeys(("arrived_ptr", "shared_lens_ptr"), "*i32"),
            **dict.fromkeys(("scale_log2", "v_scale"), "fp32"),
            **dict.fromkeys(("window", *strides), "i32"),
        },
        constants={
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "PAGE_SIZE": 16,
            "SHARED_SPLITS": 4 if has_shared else 0,
            "SHARED_BLOCK_N": SHARED_BLOCK_N,
            "SOFTCAP": softcap,
            "HAS_SINKS": softcap > 0,
            "MIN_SPLIT": tiles.min_split_tokens,
            "DOT_DTYPE": _DOT_DTYPES[dtype],
            "BLOCK_G": block_dim(group),
            "BLOCK_D": block_dim(head_dim),
            "BLOCK_N": tiles.block_n,
            "BLOCK_S": MAX_SPLITS,
            "PDL": True,
        },
        options={"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "launch_pdl": True},
    )


def _find_shared() -> KernelBuild:
    return KernelBuild(
        name="find_shared[]",
        kernel=find_shared_kernel,
        types={
            **dict.fromkeys(("row_slots_ptr", "seq_lens_ptr"), "*i64"),
            **dict.fromkeys(("page_table_ptr", "shared_lens_ptr"), "*i32"),
            **dict.fromkeys(("num_rows", "page_table_stride", "least_saved"), "i32"),
        },
        constants={"PAGE_SIZE": 16, "ROWS": 16, "BLOCK": PAGES_AT_ONCE},
    )


def _find_shares() -> KernelBuild:
    return KernelBuild(
        name="find_shares[]",
        kernel=find_shares_kernel,
        types={
            "seq_lens_ptr": "*i64",
            **dict.fromkeys(("begins_ptr", "first_rows_ptr", "row_begins_ptr", "row_shares_ptr"), "*i32"),
            **dict.fromkeys(("num_rows", "num_shares", "window"), "i32"),
        },
        constants={
            "LEAST_WORK": LEAST_WORK,
            "BLOCK_N": EVEN_BLOCK_N,
            "WINDOW_UNIT": WINDOW_UNIT,
            "BLOCK_R": MOST_ROWS,
            "BLOCK_S": SHARES_AT_ONCE,
        },
        options={"num_warps": 8},
    )


def _even_attention(dtype: torch.dtype, head_dim: int, group: int, kv: torch.dtype | None = None) -> KernelBuild:
    kv = kv or dtype
    integers = ("page_table_ptr", "begins_ptr", "first_rows_ptr", "row_begins_ptr", "row_shares_ptr", "arrived_ptr")
    strides = ("q_row_stride", "k_location_stride", "v_location_stride", "page_table_stride", "out_row_stride")
    return KernelBuild(
        name=_kv_label("even_attention", dtype, head_dim, kv),
        kernel=even_attention_kernel,
        types={
            **dict.fromkeys(("q_ptr", "out_ptr"), f"*{TYPE_NAMES[dtype]}"),
            **dict.fromkeys(("k_ptr", "v_ptr"), f"*{TYPE_NAMES[kv]}"),
            **dict.fromkeys(("req_pool_indices_ptr", "seq_lens_ptr"), "*i64"),
            **dict.fromkeys(integers, "*i32"),
            **dict.fromkeys(("partial_ptr", "lse_ptr"), "*fp32"),
            **dict.fromkeys(("scale_log2", "v_scale"), "fp32"),
            **dict.fromkeys(strides, "i32"),
        },
        constants={
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "PAGE_SIZE": 16,
            "DOT_DTYPE": _DOT_DTYPES[dtype],
            "BLOCK_G": block_dim(group),
            "BLOCK_D": block_dim(head_dim),
            "BLOCK_N": EVEN_BLOCK_N,
            "PDL": True,
        },
        options={"num_warps": NUM_WARPS, "num_stages": NUM_STAGES, "launch_pdl": True},
    )


def _shared_attention(dtype: torch.dtype, head_dim: int, group: int, kv: torch.dtype | None = None) -> KernelBuild:
    kv, rows = kv or dtype, block_rows(group)
    pairs = block_dim(rows * group)
    return KernelBuild(
        name=_kv_label("shared_attention", dtype, head_dim, kv),
        kernel=shared_attention_kernel,
        types={
            "q_ptr": f"*{TYPE_NAMES[dtype]}",
            **dict.fromkeys(("k_ptr", "v_ptr"), f"*{TYPE_NAMES[kv]}"),
            **dict.fromkeys(("page_table_ptr", "shared_lens_ptr"), "*i32"),
            "req_pool_indices_ptr": "*i64",
            **dict.fromkeys(("partial_ptr", "lse_ptr"), "*fp32"),
            "scale_log2": "fp32",
            **dict.fromkeys(("num_rows", "q_row_stride", "k_location_stride", "v_location_stride"), "i32"),
            "page_table_stride": "i32",
        },
        constants={
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "PAGE_SIZE": 16,
            "DOT_DTYPE": _DOT_DTYPES[dtype],
            "ROWS": rows,
            "BLOCK_M": pairs,
            "BLOCK_D": block_dim(head_dim),
            "BLOCK_N": SHARED_BLOCK_N,
            "PDL": True,
        },
        options={"num_warps": 8 if pairs > 64 else 4, "num_stages": 3, "launch_pdl": True},
    )


def _extend(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    shared_bytes: int,
    kv: torch.dtype | None = None,
    has_window: bool = False,
    block_r: int = 0,
    softcap: float = 0.0,
) -> KernelBuild:
    kv, tiles = kv or dtype, ExtendTiles.choose(dtype, head_dim, 1 << 14, shared_bytes)
    strides = ("q_token_stride", "out_token_stride", "k_location_stride", "v_location_stride", "page_table_stride")
    rows = ("req_pool_indices_ptr", "prefix_lens_ptr", "extend_lens_ptr", "start_locs_ptr")
    return KernelBuild(
        name=_kv_label(
            "extend",
            dtype,
            head_dim,
            kv,
            " in a window" if has_window else " of any rows" if block_r else " capped" if softcap else "",
        ),
        kernel=extend_kernel,
        types={
            **dict.fromkeys(("q_ptr", "sinks_ptr", "out_ptr"), f"*{TYPE_NAMES[dtype]}"),
            **dict.fromkeys(("k_ptr", "v_ptr"), f"*{TYPE_NAMES[kv]}"),
            "page_table_ptr": "*i32",
            **dict.fromkeys(rows, "*i64"),
            **dict.fromkeys(("scale_log2", "v_scale"), "fp32"),
            **dict.fromkeys(("num_rows", "window", *strides), "i32"),
        },
        constants={
            "BLOCK_R": block_r,
            "HAS_WINDOW": has_window,
            "SOFTCAP": softcap,
            "HAS_SINKS": softcap > 0,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "PAGE_SIZE": 16,
            "DOT_DTYPE": _DOT_DTYPES[dtype],
            "BLOCK_M": tiles.block_m,
            "BLOCK_D": block_dim(head_dim),
            "BLOCK_N": tiles.block_n,
        },
        options={"num_warps": tiles.num_warps, "num_stages": tiles.num_stages},
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", help="how names begin; all, unless given")
    parser.add_argument("--capability", nargs="+", type=int, choices=sorted(SHARED_BYTES), default=[HOPPER])
    options = parser.parse_args()
    is_over = False
    for capability in options.capability:
        for build in all_builds(capability):
            if not options.kernels or build.name.startswith(tuple(options.kernels)):
                compiled = build.compile(capability)
                size, shared = len(compiled.asm["cubin"]), compiled.metadata.shared
                is_over |= shared > SHARED_BYTES[capability]
                said = f"sm_{capability} {build.name}: cubin of {size} bytes, {shared} bytes of shared memory"
                sys.stdout.write(f"{said}{' of which there are fewer' if shared > SHARED_BYTES[capability] else ''}\n")
                sys.stdout.flush()
    return int(is_over)


if __name__ == "__main__":
    raise SystemExit(main())
