"""The products of one layer with quantised weights, beside bf16: µs by number of rows, and the limit by bytes or operations.

    python -m benchmarks.quantised_products [--hidden 4096 --inner 12288 --heads 32 --kv-heads 8] [--rows 1,64,256]

Each product runs from a graph, with so many different weights that none is found in the cache. What is measured is what a layer calls,
without any fused operation: `KernelOps.linear` for bf16, `srt/layers/quantization/gpu_products.py` for the others, quantising inputs
included. "fp8 gemv" is the kernel for one row, and "… stream" the kernel that layers take for few rows on Hopper.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks import limits
from srt.kernels.gemm.gemv import GemvTiles, gemv
from srt.kernels.gemm.packed_gemm import MOST_ROWS
from srt.kernels.gemm.packed_matrix import PackedMatrix
from srt.kernels.gemm.stream_gemm import PLAIN, StreamGemm
from srt.layers.kernel_ops import KernelOps
from srt.layers.ops import Affine
from srt.layers.quantization.gpu_products import PackedProduct
from srt.layers.quantization.int_weight import order_operands, pack_halves
from srt.layers.quantization.weight import PlainWeight

CUDA = torch.device("cuda")
CACHE_BYTES = 120 << 20  # more than the cache holds
REPLAYS = 20
Product = Callable[[Tensor], Tensor | None]

BYTES = {
    "bf16": 2.0,
    "fp8": 1.0,
    "fp8 gemv": 1.0,
    "fp8 stream": 1.0,
    "block": 1.0 + 4 / 128,
    "block stream": 1.0 + 4 / 128,
    "int4": 0.5 + 2 / 128,
    "int4 stream": 0.5 + 2 / 128,
}
"""Of a weight, with its part of the scales."""


def products_of(scheme: str, n: int, k: int, count: int) -> list[Product]:
    """So many products with different weights."""
    ops, gemm = KernelOps(CUDA), StreamGemm(CUDA)

    def one() -> Product:
        if scheme == "bf16":
            affine = Affine(PlainWeight.of(torch.randn(n, k, device=CUDA, dtype=torch.bfloat16) * k**-0.5), None)
            return lambda x: ops.linear(x, affine)
        if scheme.startswith("int4"):
            packed = order_operands(pack_halves(torch.randint(16, (n, k), device=CUDA, dtype=torch.uint8)))
            product = PackedProduct(packed, torch.rand(k // 128, n, device=CUDA).bfloat16(), None, 128)
        else:
            group = 128 if scheme.startswith("block") else k
            numbers = torch.randn(n, k, device=CUDA).to(torch.float8_e4m3fn)
            scales = torch.rand(k // group, n, device=CUDA)
            product = PackedProduct(numbers, scales, None, group, quantises_inputs=True)
            if scheme == "fp8 gemv":
                tiles = GemvTiles.choose(n, k, is_gated=False, item_bytes=1)
                return lambda x: gemv(x, numbers, tiles, scales=scales)[0] if len(x) == 1 else None
        matrix = product.matrix
        return partial(streamed, gemm, matrix) if scheme.endswith("stream") and matrix else lambda x: product(x, None)

    return [one() for _ in range(count)]


def streamed(gemm: StreamGemm, matrix: PackedMatrix, x: Tensor) -> Tensor | None:
    """The product by the streaming kernel; None if it is not the one for it."""
    tiles = gemm.tiles(x, matrix, PLAIN)
    return None if tiles is None else gemm.multiply(x, matrix, tiles)


def time_us(products: list[Product], x: Tensor) -> float | None:
    """Time of one product; None if it is left to the plain path."""
    if any(product(x) is None for product in products):
        return None
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [product(x) for product in products]
    assert all(result is not None for result in kept)
    times = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / REPLAYS / len(products))
    return float(min(times))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=12288)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rows", type=limits.numbers, default="1,16,64,256,2048")
    options = parser.parse_args()
    hardware = limits.measured()
    queries, keys = options.heads * options.head_dim, options.kv_heads * options.head_dim
    shapes = {
        "qkv": (queries + 2 * keys, options.hidden),
        "o": (options.hidden, queries),
        "gate_up": (2 * options.inner, options.hidden),
        "down": (options.hidden, options.inner),
    }
    print(f"{hardware.name}, read {hardware.read_bytes_s / 1e12:.2f} TB/s; {limits.versions()}")
    for scheme, item_bytes in BYTES.items():
        totals: dict[int, tuple[float, float]] = dict.fromkeys(options.rows, (0.0, 0.0))
        for name, (n, k) in shapes.items():
            products = products_of(scheme, n, k, max(2, round(CACHE_BYTES / (n * k * item_bytes))))
            for num_rows in options.rows:
                found = time_us(products, torch.randn(num_rows, k, device=CUDA, dtype=torch.bfloat16))
                if found is None:
                    totals[num_rows] = float("nan"), float("nan")
                    continue
                is_fp8 = scheme.startswith("fp8") and num_rows > MOST_ROWS
                operations_s = hardware.matmul_flops_s * (2 if is_fp8 else 1)
                limit = max(n * k * item_bytes / hardware.read_bytes_s, 2 * num_rows * n * k / operations_s) * 1e6
                total, total_limit = totals[num_rows]
                totals[num_rows] = total + found, total_limit + limit
                ratio = found / limit
                print(f"{scheme:12} {name:8} {num_rows:5} rows {found:8.1f} µs  limit {limit:8.1f}  ratio {ratio:.2f}")
            del products
        for num_rows, (total, limit) in totals.items():
            print(f"{scheme:12} {'layer':8} {num_rows:5} rows {total:8.1f} µs  limit {limit:8.1f}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
