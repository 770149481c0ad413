"""The kernels of experts, for the shape of Qwen3-30B-A3B."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from srt.kernels.build.jit import dot_dtype
from srt.kernels.build.pdl import LATE
from srt.kernels.moe.expert_gemm import (
    ExpertGemmTiles,
    ProductTiles,
    expert_downs_kernel,
    expert_gates_kernel,
    sum_choices_kernel,
)
from srt.kernels.moe.expert_tiles import count_blocks_kernel, count_pairs_kernel, place_pairs_kernel
from srt.kernels.moe.few_tokens import (
    FewTiles,
    packed_downs_kernel,
    pair_gates_kernel,
    route_rows_kernel,
    token_downs_kernel,
)
from srt.kernels.moe.packed_tiles import E4M3, INT4, INT8, MXFP4, PLAIN
from srt.kernels.moe.rounded_experts import RoundedTiles, rounded_downs_kernel, rounded_gates_kernel
from srt.kernels.moe.route import choose_experts_kernel, router_logits_kernel, routing_constants
from srt.utils.layer_spec import Routing
from tests.kernel_builds.kernel_build import TYPE_NAMES, KernelBuild

_PDL: dict[str, Any] = {"PDL": True}
_LAUNCH: dict[str, Any] = {"launch_pdl": True}
EXPERTS, TOP_K, SIZE, HIDDEN = 128, 8, 768, 2048
HALF = EXPERTS // 2  # of a rank with --ep-size 2


class _Shape(NamedTuple):
    """What differs between models beside whose experts there are shared ones, and Qwen3-30B-A3B."""

    experts: int
    top_k: int
    size: int
    shared: int  # parts


QWEN3, DEEPSEEK_V2_LITE = _Shape(EXPERTS, TOP_K, SIZE, 0), _Shape(64, 6, 1408, 2)
_TABLE = dict.fromkeys(
    ("ids_ptr", "pairs_ptr", "experts_ptr", "firsts_ptr", "ends_ptr", "counts_ptr", "starts_ptr"), "*i32"
)


def expert_builds() -> list[KernelBuild]:
    """The products for every size of tiles, in bfloat16 and, for few rows, in float32."""
    bf16, fp32 = torch.bfloat16, torch.float32
    builds = [_router_logits(bf16), _router_logits(fp32), *_choices(), *_tables(EXPERTS), *_tables(HALF)]
    builds += [_sum(bf16, has_norm, num_own) for has_norm in (False, True) for num_own in (0, HALF)]
    builds += [_route_rows(bf16), _route_rows(fp32)]
    builds += [build(bf16, num_own=num_own) for build in (_pair_gates, _token_downs) for num_own in (0, HALF)]
    builds += [build(bf16, shape=DEEPSEEK_V2_LITE) for build in (_pair_gates, _token_downs)]
    builds += [_sum(bf16, has_norm, 0, DEEPSEEK_V2_LITE.shared) for has_norm in (False, True)]
    for tokens in (2, 8, 64, 256):
        tiles = ExpertGemmTiles.choose(tokens * DEEPSEEK_V2_LITE.top_k, DEEPSEEK_V2_LITE.experts, 2, has_room=True)
        builds += [build(bf16, tokens, tiles, shape=DEEPSEEK_V2_LITE) for build in (_gates, _downs)]
    builds += [build(bf16, kind) for build in (_pair_gates, _few_downs) for kind in ("e4m3", "e4m3 by 128")]
    builds += [build(tokens, groups) for build in (_rounded_gates, _rounded_downs) for tokens, groups in _ROUNDED]
    for dtype, tokens in ((bf16, 1), (bf16, 64), (bf16, 256), (bf16, 512), (bf16, 8192), (fp32, 1), (fp32, 8192)):
        tiles = ExpertGemmTiles.choose(tokens * TOP_K, EXPERTS, dtype.itemsize, has_room=True)
        builds += [_gates(dtype, tokens, tiles), _downs(dtype, tokens, tiles)]
    for kind, tokens in (
        ("e4m3", 64),
        ("e4m3 by 128", 8192),
        ("mxfp4", 64),
        ("mxfp4", 8192),
        ("int4", 64),
        ("int8", 64),
    ):
        tiles = ExpertGemmTiles.choose(tokens * TOP_K, EXPERTS, bf16.itemsize)
        builds.append(_gates(bf16, tokens, tiles, kind))
    builds.append(_downs(bf16, 8192, tiles, "mxfp4"))
    return builds


def _router_logits(dtype: torch.dtype) -> KernelBuild:
    name = TYPE_NAMES[dtype]
    return KernelBuild(
        f"router_logits[{name}]",
        router_logits_kernel,
        {
            "x_ptr": f"*{name}",
            "weight_ptr": f"*{name}",
            "bias_ptr": f"*{name}",
            "logits_ptr": "*fp32",
            "num_rows": "i32",
        },
        {
            "HAS_BIAS": True,
            "NUM_EXPERTS": EXPERTS,
            "HIDDEN": HIDDEN,
            "BLOCK_T": 32,
            "BLOCK_E": 16,
            "BLOCK_K": 512 // dtype.itemsize,
            "DOT": dot_dtype(dtype),
            **_PDL,
        },
        {"num_stages": 3, **_LAUNCH},
    )


def _choices() -> list[KernelBuild]:
    types = dict.fromkeys(("logits_ptr", "correction_ptr", "weights_ptr"), "*fp32")
    types |= {"ids_ptr": "*i32", "num_rows": "i32", "scale": "fp32"}
    sizes = {"NUM_EXPERTS": EXPERTS, "TOP_K": TOP_K, "BLOCK_T": 4, "BLOCK_E": 128}
    groups = {"softmax": (1, 1, 2), "softmax by groups": (8, 3, 1), "sigmoid": (8, 4, 2)}
    return [
        KernelBuild(
            f"choose_experts[{name}]",
            choose_experts_kernel,
            types,
            {
                **sizes,
                "NUM_GROUPS": num_groups,
                "CHOSEN_GROUPS": chosen,
                "GROUP_SCORES": scores,
                "RENORMALISE": True,
                "SIGMOID": name == "sigmoid",
                "HAS_CORRECTION": name == "sigmoid",
                **_PDL,
            },
            _LAUNCH,
        )
        for name, (num_groups, chosen, scores) in groups.items()
    ]


def _tables(num_own: int) -> list[KernelBuild]:
    builds = []
    for kernel, chunk in (
        (count_pairs_kernel, 128),
        (count_pairs_kernel, 512),
        (count_blocks_kernel, 0),
        (place_pairs_kernel, 0),
    ):
        types = {name: kind for name, kind in _TABLE.items() if name in kernel.arg_names}
        types |= {name: "i32" for name in ("num_pairs", "num_blocks", "most", "first_own") if name in kernel.arg_names}
        types |= {"load_ptr": "*i64"} if "load_ptr" in kernel.arg_names else {}
        constants = {
            "HAS_LOAD": True,
            "NUM_EXPERTS": EXPERTS,
            "NUM_OWN": num_own,
            "BLOCK_E": 256 if kernel is count_pairs_kernel else 128,
            "BLOCK_M": 16,
            "BLOCK": 32,
            "CHUNK": chunk,
            "BLOCK_PAIRS": 512,
            "AT_ONCE": 16,
        }
        constants |= _PDL
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
        name = f"{kernel.__name__.removesuffix('_kernel')}[{num_own} experts{f', {chunk} pairs' if chunk else ''}]"
        builds.append(KernelBuild(name, kernel, types, constants, {"num_warps": 8, **_LAUNCH}))
    return builds


def _of(num_own: int) -> str:
    return f", {num_own} experts" if num_own else ""


def _beside(shared: int) -> str:
    return f", beside {shared} shared" if shared else ""


def _sum(dtype: torch.dtype, has_norm: bool, num_own: int, shared: int = 0) -> KernelBuild:
    name = TYPE_NAMES[dtype]
    tensors = ("results_ptr", "hidden_ptr", "norm_weight_ptr", "out_ptr", "normed_ptr")
    return KernelBuild(
        f"sum_choices[{name}{', normed' if has_norm else ''}{_of(num_own)}{_beside(shared)}]",
        sum_choices_kernel,
        {**dict.fromkeys(tensors, f"*{name}"), "ids_ptr": "*i32", "eps": "fp32", "first_own": "i32"},
        {
            "NUM_OWN": num_own,
            "TOP_K": TOP_K,
            "SHARED": shared,
            "HAS_NORM": has_norm,
            "HIDDEN": HIDDEN,
            "BLOCK": 2048 if has_norm else 1024,
            **_PDL,
        },
        _LAUNCH,
    )


def _route_rows(dtype: torch.dtype) -> KernelBuild:
    name = TYPE_NAMES[dtype]
    types = dict.fromkeys(("x_ptr", "norm_weight_ptr", "weight_ptr", "bias_ptr", "normed_ptr"), f"*{name}")
    types |= dict.fromkeys(("correction_ptr", "logits_ptr", "weights_ptr"), "*fp32")
    types |= {"arrived_ptr": "*i32", "ids_ptr": "*i32", "eps": "fp32", "scale": "fp32"}
    constants = {"HAS_NORM": True, "HAS_BIAS": True, "HIDDEN": HIDDEN, "BLOCK_N": 4, "BLOCK_K": 1024, "COPIES": 4}
    routing = routing_constants(Routing(EXPERTS, TOP_K), EXPERTS, has_correction=True)
    return KernelBuild(f"route_rows[{name}]", route_rows_kernel, types, {**constants, **routing, **_PDL}, _LAUNCH)


def _pair_gates(dtype: torch.dtype, kind: str = "", num_own: int = 0, shape: _Shape = QWEN3) -> KernelBuild:
    name, tiles = TYPE_NAMES[dtype], FewTiles.of_gates(HIDDEN, 1 if kind else dtype.itemsize)
    assert tiles is not None
    scales, constants = _KINDS[kind] if kind else (f"*{name}", {})
    return KernelBuild(
        f"pair_gates[{name}{', ' if kind else ''}{kind}{_of(num_own)}{_beside(shape.shared)}]",
        pair_gates_kernel,
        {
            **dict.fromkeys(("x_ptr", "bias_ptr", "shared_ptr", "out_ptr"), f"*{name}"),
            "weight_ptr": "*u8" if kind else f"*{name}",
            "scales_ptr": scales,
            "ids_ptr": "*i32",
            "load_ptr": "*i64",
            "num_pairs": "i32",
            "first_own": "i32",
        },
        {
            "NUM_OWN": num_own,
            **_FEW_PLAIN,
            **constants,
            "HAS_BIAS": not shape.shared,
            "HAS_LOAD": True,
            "LIMIT": 0.0 if shape.shared else 7.0,
            "TOP_K": shape.top_k,
            "SHARED": shape.shared,
            "SIZE": shape.size,
            "HIDDEN": HIDDEN,
            "NUM_EXPERTS": shape.experts,
            "BLOCK_E": shape.experts,
            "BLOCK_PAIRS": 8,
            "PDL": LATE.value,
            "BLOCK_N": tiles.block_n,
            "BLOCK_K": tiles.block_k,
        },
        {"num_warps": tiles.num_warps, **_LAUNCH},
    )


def _token_downs(dtype: torch.dtype, num_own: int = 0, shape: _Shape = QWEN3) -> KernelBuild:
    num_results = shape.top_k + shape.shared
    name, tiles = TYPE_NAMES[dtype], FewTiles.of_downs(shape.size, num_results, dtype.itemsize)
    assert tiles is not None
    constants = {"NUM_OWN": num_own, "CHOICES": tiles.choices(num_results), "SHARED": shape.shared}
    constants |= {"TOP_K": shape.top_k, "SIZE": shape.size, "HAS_BIAS": not shape.shared}
    return KernelBuild(
        f"token_downs[{name}{_of(num_own)}{_beside(shape.shared)}]",
        token_downs_kernel,
        {
            **dict.fromkeys(("x_ptr", "weight_ptr", "scales_ptr", "bias_ptr", "shared_ptr", "out_ptr"), f"*{name}"),
            **_CHOICE,
        },
        {
            **_DOWNS,
            **constants,
            "KIND": PLAIN.value,
            "HOPPER": True,
            "BLOCK_N": tiles.block_n,
            "BLOCK_K": tiles.block_k,
        },
        {"num_warps": tiles.num_warps, "maxnreg": None if shape.shared else 128, **_LAUNCH},
    )


def _few_downs(dtype: torch.dtype, kind: str) -> KernelBuild:
    """The downs of one token in e4m3: a kernel of their own if groups of inputs have scales."""
    scales, constants = _KINDS[kind]
    group = constants.get("GROUP", 0)
    name, tiles = TYPE_NAMES[dtype], FewTiles.of_downs(SIZE, TOP_K, 1, has_groups=bool(group))
    assert tiles is not None
    types = dict.fromkeys(("x_ptr", "bias_ptr", "out_ptr"), f"*{name}")
    block = {"BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k}
    if not group:
        return KernelBuild(
            f"token_downs[{name}, {kind}]",
            token_downs_kernel,
            {**types, "weight_ptr": "*u8", "scales_ptr": scales, "shared_ptr": f"*{name}", **_CHOICE},
            {
                **_DOWNS,
                "NUM_OWN": 0,
                "KIND": E4M3.value,
                "HOPPER": True,
                "SHARED": 0,
                "CHOICES": tiles.choices(TOP_K),
                **block,
            },
            {"num_warps": tiles.num_warps, "maxnreg": 128, **_LAUNCH},
        )
    return KernelBuild(
        f"packed_downs[{name}, {kind}]",
        packed_downs_kernel,
        {**types, "weight_ptr": "*u8", "scales_ptr": scales, **_CHOICE},
        {**_DOWNS, "NUM_OWN": 0, "GROUP": group, "HOPPER": True, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k},
        {"num_warps": tiles.num_warps, **_LAUNCH},
    )


_CHOICE = {"ids_ptr": "*i32", "factors_ptr": "*fp32", "first_own": "i32"}
_DOWNS: dict[str, Any] = {"HAS_BIAS": True, "TOP_K": TOP_K, "SIZE": SIZE, "HIDDEN": HIDDEN, **_PDL}


_ROUNDED = ((8, False), (64, True), (256, False), (8192, True))
"""Tokens, and whether groups of inputs have scales."""


def _rounded_gates(tokens: int, has_groups: bool) -> KernelBuild:
    return _rounded("rounded_gates", rounded_gates_kernel, tokens, has_groups)


def _rounded_downs(tokens: int, has_groups: bool) -> KernelBuild:
    return _rounded("rounded_downs", rounded_downs_kernel, tokens, has_groups)


def _rounded(label: str, kernel: Any, tokens: int, has_groups: bool) -> KernelBuild:
    tiles, is_gates = RoundedTiles.choose(tokens * TOP_K, EXPERTS), kernel is rounded_gates_kernel
    types = {**_TABLE, "factors_ptr": "*fp32"}
    types |= dict.fromkeys(("x_ptr", "weight_ptr"), "*fp8e4nv")
    types |= dict.fromkeys(("x_scales_ptr", "scales_ptr", "out_scales_ptr"), "*fp32")
    types["out_ptr"] = "*fp8e4nv" if is_gates else "*bf16"
    constants = {"HAS_GROUPS": has_groups, "SIZE": SIZE, "HIDDEN": HIDDEN, "BLOCK_M": tiles.block_m, **_PDL}
    stages = tiles.gate_stages if is_gates else tiles.down_stages
    return KernelBuild(
        f"{label}[{tokens} tokens]",
        kernel,
        {argument: kind for argument, kind in types.items() if argument in kernel.arg_names},
        {**constants, **({"TOP_K": TOP_K} if is_gates else {})},
        {"num_warps": tiles.num_warps, "num_stages": stages, **_LAUNCH},
    )


def _gates(
    dtype: torch.dtype, tokens: int, tiles: ExpertGemmTiles, kind: str = "", shape: _Shape = QWEN3
) -> KernelBuild:
    more = {"LIMIT": 0.0 if shape.shared else 7.0}
    return _product("expert_gates", expert_gates_kernel, dtype, tokens, tiles.block_m, tiles.gates, more, kind, shape)


def _downs(
    dtype: torch.dtype, tokens: int, tiles: ExpertGemmTiles, kind: str = "", shape: _Shape = QWEN3
) -> KernelBuild:
    return _product("expert_downs", expert_downs_kernel, dtype, tokens, tiles.block_m, tiles.downs, {}, kind, shape)


_PLAIN: dict[str, Any] = {"KIND": PLAIN.value, "GROUP": 1 << 30, "HAS_ZEROS": False, "HOPPER": True}
_FEW_PLAIN: dict[str, Any] = {"KIND": PLAIN.value, "GROUP": 1 << 30, "HOPPER": True}
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "e4m3": ("*fp32", {"KIND": E4M3.value}),
    "e4m3 by 128": ("*fp32", {"KIND": E4M3.value, "GROUP": 128}),
    "int8": ("*bf16", {"KIND": INT8.value, "GROUP": 128}),
    "int4": ("*bf16", {"KIND": INT4.value, "GROUP": 32, "HAS_ZEROS": True}),
    "mxfp4": ("*u8", {"KIND": MXFP4.value, "GROUP": 32}),
}
"""The type of scales, and the constants of each form of quantised weights."""


def _product(
    label: str,
    kernel: Any,
    dtype: torch.dtype,
    tokens: int,
    block_m: int,
    tiles: ProductTiles,
    more: dict[str, float],
    kind: str,
    shape: _Shape,
) -> KernelBuild:
    name = TYPE_NAMES[dtype]
    scales, constants = _KINDS[kind] if kind else (f"*{name}", {})
    types = {
        **dict.fromkeys(("x_ptr", "bias_ptr", "shared_ptr", "out_ptr"), f"*{name}"),
        "num_tokens": "i32",
        **_TABLE,
        "weight_ptr": "*u8" if kind else f"*{name}",
        "scales_ptr": scales,
        "zeros_ptr": "*i16",
        "factors_ptr": "*fp32",
    }
    return KernelBuild(
        f"{label}[{name}, {kind + ', ' if kind else ''}{tokens} tokens{_beside(shape.shared)}]",
        kernel,
        {argument: kind for argument, kind in types.items() if argument in kernel.arg_names},
        {
            **more,
            **_PLAIN,
            **constants,
            "HAS_BIAS": not shape.shared,
            "TOP_K": shape.top_k,
            "SHARED": shape.shared,
            "SIZE": shape.size,
            "HIDDEN": HIDDEN,
            "BLOCK_M": block_m,
            "BLOCK_N": tiles.block_n,
            "BLOCK_K": tiles.block_k,
            "SWAP": tiles.is_swapped,
            "DOT": dot_dtype(dtype),
            **_PDL,
        },
        {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, **_LAUNCH},
    )
