"""The products of a layer's experts in every form of weights: µs by number of tokens, and the limit by bytes. Needs a GPU.

    python -m benchmarks.expert_products [--hidden 2048 --size 768 --experts 128 --top-k 8] [--tokens 1,8,64,256,2048]
                                         [--forms bf16,fp8] [--variants]

Each form is measured from graphs over several layers with different weights, so that none is found in the cache. Tokens take experts at
random; the limit counts each expert that is taken once. --variants tries other tiles than those that the server chooses. For
gpt-oss-20b: --hidden 2880 --size 2880 --experts 32 --top-k 4.

--ep-size 2 measures a rank that has half of the experts: in each layer the one that has more choices of the tokens, for which the other
waits. What a rank of --tp 2 computes is measured with half the --size.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks import limits
from srt.kernels.moe.expert_gemm import ExpertGemmTiles, ProductTiles, multiply_experts
from srt.layers.moe.expert_kernels import ExpertKernels
from srt.layers.moe.expert_ops import Choice, ExpertMatrices, ExpertWeights, StackedMatrices
from srt.layers.quantization.weight import NumberKind

CUDA = torch.device("cuda")
CACHE_BYTES = 120 << 20  # more than the cache holds
REPLAYS = 20
LEAST_PRODUCTS = 8  # in a graph, each of other choices


@dataclass(frozen=True, slots=True)
class Form:
    """How weights are stored."""

    kind: NumberKind
    bits: int
    group_size: int | None  # None: a scale for each output
    scale_type: torch.dtype


FORMS = {
    "bf16": None,
    "fp8": Form("e4m3", 8, None, torch.float32),
    "fp8 by block": Form("e4m3", 8, 128, torch.float32),
    "mxfp4": Form("mxfp4", 4, 32, torch.uint8),
    "int4 by 128": Form("int4", 4, 128, torch.bfloat16),
    "int8": Form("signed8", 8, None, torch.float32),
}


def variants(num_pairs: int, num_experts: int) -> Iterator[tuple[str, ExpertGemmTiles]]:
    """Yield what the server chooses, and other tiles of both products for the same number of rows in a tile, and for half of it."""
    chosen = ExpertGemmTiles.choose(num_pairs, num_experts, 2)
    yield "chosen", chosen
    for block_m in sorted({chosen.block_m, max(16, chosen.block_m // 2)}):
        for block_n, block_k, warps, stages in ((32, 256, 4, 3), (64, 128, 4, 4), (64, 256, 8, 3), (128, 128, 8, 3)):
            both = ProductTiles(block_n, block_k, warps, stages)
            yield f"{block_m} × {block_n} × {block_k}, {warps} warps", ExpertGemmTiles(block_m, both, both)


class Matrices:
    """One random matrix of each expert."""

    def __init__(self, form: Form, count: int, outputs: int, inputs: int) -> None:
        self.shape = (count, outputs, inputs)
        group = form.group_size or inputs
        # Any byte is a number, but for two of e4m3.
        numbers = torch.randint(0, 120, (count, outputs, inputs * form.bits // 8), device=CUDA, dtype=torch.uint8)
        scales = torch.full((count, -(-inputs // group), outputs), 118 if form.kind == "mxfp4" else 2e-3, device=CUDA)
        self.stacked = StackedMatrices(form.kind, numbers, scales.to(form.scale_type), None, group)

    def multiply(self, expert: int, x: Tensor, bias: Tensor | None) -> Tensor:
        raise AssertionError("only kernels read these")


def matrices(form: Form | None, count: int, outputs: int, inputs: int) -> Tensor | ExpertMatrices:
    if form is None:
        return torch.randn(count, outputs, inputs, device=CUDA, dtype=torch.bfloat16) * float(inputs**-0.5)
    return Matrices(form, count, outputs, inputs)


def choices(num_tokens: int, num_experts: int, top_k: int, num_own: int) -> Tensor:
    """Return experts that the tokens take at random, counted so that the busiest of all ranks has the first."""
    ids = torch.rand(num_tokens, num_experts, device=CUDA).argsort(-1)[:, :top_k]
    busiest = int((ids // num_own).flatten().bincount().argmax())
    return ((ids - busiest * num_own) % num_experts).int().contiguous()


def bytes_of(form: Form | None, inputs: int) -> float:
    """Bytes of a weight, with its part of the scales."""
    if form is None:
        return 2.0
    return form.bits / 8 + form.scale_type.itemsize / (form.group_size or inputs)


def time_us(products: Sequence[Callable[[], Tensor]]) -> float:
    """Time of one product."""
    for product in products:
        product()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [product() for product in products]
    assert kept
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
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--size", type=int, default=768)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--tokens", type=limits.numbers, default="1,8,64,256,2048")
    parser.add_argument("--forms", default=",".join(FORMS), help="of weights")
    parser.add_argument("--ep-size", type=int, default=1, help="ranks that divide the experts")
    parser.add_argument("--variants", action="store_true", help="other tiles too")
    options = parser.parse_args()
    hidden, size, count = options.hidden, options.size, options.experts
    if count % options.ep_size:
        parser.error(f"--ep-size does not divide the {count} --experts")
    own, kernels = count // options.ep_size, ExpertKernels(CUDA)
    hardware = limits.measured()
    print(f"{hardware.name}, read {hardware.read_bytes_s / 1e12:.2f} TB/s; {limits.versions()}")
    for name in options.forms.split(","):
        form = FORMS[name]
        layer_bytes = 3 * own * hidden * size * bytes_of(form, hidden)
        layers = [
            ExpertWeights(matrices(form, own, 2 * size, hidden), matrices(form, own, hidden, size), num_all=count)
            for _ in range(max(2, round(CACHE_BYTES / layer_bytes)))
        ]
        for tokens in options.tokens:
            x = torch.randn(tokens, hidden, device=CUDA, dtype=torch.bfloat16)
            chosen = [choices(tokens, count, options.top_k, own) for _ in range(max(LEAST_PRODUCTS, len(layers)))]
            taken = sum(len(ids[ids < own].unique()) for ids in chosen) / len(chosen) / own
            num_pairs = sum(int((ids < own).sum()) for ids in chosen) // len(chosen)
            factors = torch.full((tokens, options.top_k), 1 / options.top_k, device=CUDA)
            operations = 6 * num_pairs * hidden * size / hardware.matmul_flops_s
            limit = max(layer_bytes * taken / hardware.read_bytes_s, operations) * 1e6
            for said, tiles in variants(num_pairs, own) if options.variants else [("", None)]:
                work = [
                    partial(kernels.multiply, x, Choice(ids, factors), one)
                    if tiles is None
                    else partial(multiply_experts, x, ids, factors, one, tiles)
                    for ids, one in zip(chosen, cycle(layers), strict=False)
                ]
                try:
                    found = time_us(work)
                except OutOfResources as error:
                    print(f"{name:12} {tokens:5} tokens  {said}: {error}", flush=True)
                    continue
                print(
                    f"{name:12} {tokens:5} tokens {found:8.1f} µs  limit {limit:8.1f}  ratio {found / limit:.2f}  {said}",
                    flush=True,
                )
        del layers
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
