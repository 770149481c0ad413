"""Every kernel, in the shapes that a GPU will be asked for, compiled without a GPU.

    python -m srt.kernels.builds

prints a line per build. A kernel that is missing here is one that nothing proves to compile.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from srt.kernels.decode_attention import MAX_SPLITS, DecodeTiles, decode_merge_kernel, decode_split_kernel
from srt.kernels.extend_attention import ExtendTiles, extend_kernel
from srt.kernels.jit import block_dim
from srt.kernels.write_kv import write_kv_kernel

HOPPER = GPUTarget("cuda", 90, 32)

_TYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_DOT_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True)
class KernelBuild:
    """One kernel with the types of its arguments and the values of its constants."""

    name: str
    kernel: Any
    types: dict[str, str]  # of every argument that is not a constant
    constants: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    def compile(self, target: GPUTarget = HOPPER) -> Any:
        """Triton's CompiledKernel, down to the target's machine code; no GPU is touched."""
        signature = {name: self.types.get(name, "constexpr") for name in self.kernel.arg_names}
        missing = [name for name, kind in signature.items() if kind == "constexpr" and name not in self.constants]
        assert not missing, f"{self.name}: neither a type nor a value for {missing}"
        # What Triton finds at a real launch: aligned tensors, and strides of whole heads.
        aligned = [
            kind.startswith("*") or name.endswith(("token_stride", "location_stride", "row_stride"))
            for name, kind in signature.items()
        ]
        attrs = {(index,): [["tt.divisibility", 16]] for index, is_aligned in enumerate(aligned) if is_aligned}
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=self.constants, attrs=attrs)
        return triton.compile(source, target=target, options=self.options)


def all_builds() -> list[KernelBuild]:
    """Each kernel for bfloat16 heads of 64 and 128, and once for float16 and float32."""
    cases = [(torch.bfloat16, 64, 4), (torch.bfloat16, 128, 5), (torch.float16, 128, 1), (torch.float32, 128, 4)]
    builds: list[KernelBuild] = []
    for dtype, head_dim, group in cases:
        builds.append(_write_kv(dtype, head_dim))
        builds.append(_decode_split(dtype, head_dim, group))
        builds.append(_decode_merge(dtype, head_dim))
        builds.append(_extend(dtype, head_dim, group))
    return builds


def _label(kernel: str, dtype: torch.dtype, head_dim: int) -> str:
    return f"{kernel}[{_TYPE_NAMES[dtype]}, head_dim {head_dim}]"


def _write_kv(dtype: torch.dtype, head_dim: int) -> KernelBuild:
    value = f"*{_TYPE_NAMES[dtype]}"
    return KernelBuild(
        name=_label("write_kv", dtype, head_dim),
        kernel=write_kv_kernel,
        types={
            **dict.fromkeys(("k_ptr", "v_ptr", "k_buffer_ptr", "v_buffer_ptr"), value),
            "locations_ptr": "*i64",
            **dict.fromkeys(("k_token_stride", "v_token_stride", "k_location_stride", "v_location_stride"), "i32"),
        },
        constants={"ROW": 8 * head_dim, "BLOCK": 8 * head_dim},
    )


def _decode_split(dtype: torch.dtype, head_dim: int, group: int) -> KernelBuild:
    tiles = DecodeTiles.for_dtype(dtype, num_splits=MAX_SPLITS)
    return KernelBuild(
        name=_label("decode_split", dtype, head_dim),
        kernel=decode_split_kernel,
        types={
            **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), f"*{_TYPE_NAMES[dtype]}"),
            "page_table_ptr": "*i32",
            **dict.fromkeys(("req_pool_indices_ptr", "seq_lens_ptr"), "*i64"),
            **dict.fromkeys(("partial_ptr", "lse_ptr"), "*fp32"),
            "scale_log2": "fp32",
            **dict.fromkeys(("q_row_stride", "k_location_stride", "v_location_stride", "page_table_stride"), "i32"),
        },
        constants={
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "PAGE_SIZE": 16,
            "MIN_SPLIT": tiles.min_split_tokens,
            "DOT_DTYPE": _DOT_DTYPES[dtype],
            "BLOCK_G": block_dim(group),
            "BLOCK_D": block_dim(head_dim),
            "BLOCK_N": tiles.block_n,
        },
    )


def _decode_merge(dtype: torch.dtype, head_dim: int) -> KernelBuild:
    tiles = DecodeTiles.for_dtype(dtype, num_splits=MAX_SPLITS)
    return KernelBuild(
        name=_label("decode_merge", dtype, head_dim),
        kernel=decode_merge_kernel,
        types={
            **dict.fromkeys(("partial_ptr", "lse_ptr"), "*fp32"),
            "seq_lens_ptr": "*i64",
            "out_ptr": f"*{_TYPE_NAMES[dtype]}",
            **dict.fromkeys(("out_row_stride", "num_splits"), "i32"),
        },
        constants={
            "HEAD_DIM": head_dim,
            "MIN_SPLIT": tiles.min_split_tokens,
            "BLOCK_N": tiles.block_n,
            "BLOCK_S": MAX_SPLITS,
            "BLOCK_D": block_dim(head_dim),
        },
    )


def _extend(dtype: torch.dtype, head_dim: int, group: int) -> KernelBuild:
    tiles = ExtendTiles.for_dtype(dtype)
    strides = ("q_token_stride", "out_token_stride", "k_location_stride", "v_location_stride", "page_table_stride")
    rows = ("req_pool_indices_ptr", "prefix_lens_ptr", "extend_lens_ptr", "start_locs_ptr")
    return KernelBuild(
        name=_label("extend", dtype, head_dim),
        kernel=extend_kernel,
        types={
            **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{_TYPE_NAMES[dtype]}"),
            "page_table_ptr": "*i32",
            **dict.fromkeys(rows, "*i64"),
            "scale_log2": "fp32",
            **dict.fromkeys(strides, "i32"),
        },
        constants={
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "PAGE_SIZE": 16,
            "DOT_DTYPE": _DOT_DTYPES[dtype],
            "BLOCK_M": tiles.block_m,
            "BLOCK_D": block_dim(head_dim),
            "BLOCK_N": tiles.block_n,
        },
    )


def main() -> None:
    for build in all_builds():
        compiled = build.compile()
        size, shared = len(compiled.asm["cubin"]), compiled.metadata.shared
        sys.stdout.write(f"{build.name}: cubin of {size} bytes, {shared} bytes of shared memory\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
