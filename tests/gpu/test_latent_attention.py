"""Attention over latents at DeepSeek's sizes, against float64; wrong ones would be noticed, and a graph serves any lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from srt.kernels.attention.latent_attention import (
    DECODE_PAIRS,
    LatentScratch,
    LatentTiles,
    PagedLatents,
    latent_decode,
    latent_extend,
    num_splits_of,
)
from srt.kernels.attention.stream_latents import LatentDivision, clusters_at_once, stream_latents
from srt.kernels.build.shared_memory import shared_bytes
from tests.support.latent_reference import latent_reference
from tests.unit.kernels.paged_world import make_paged_world

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
RANK, ROPE, PAGE = 512, 64, 16
SCALE = 192**-0.5
MOST = 1e-2


def memory_of(lengths: list[int]) -> tuple[PagedLatents, Tensor]:
    """The latents of rows in shuffled pages, NaN elsewhere; and the slots of the rows."""
    world = make_paged_world(lengths, 1, RANK + ROPE, PAGE, torch.bfloat16)
    return PagedLatents(world.kv.k_buffer.to(CUDA), RANK, world.kv.page_table.to(CUDA), PAGE), world.req_pool_indices


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=CUDA, dtype=torch.bfloat16)


def error_of(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def decode(
    q: Tensor,
    memory: PagedLatents,
    slots: Tensor,
    lengths: Tensor,
    out: Tensor,
    scratch: LatentScratch,
    is_streamed: bool,
) -> int:
    """Attend as the backend does with either kernel, and return the number of splits."""
    sizes = len(q), q.shape[1], 4096
    rows = q[..., :RANK], q[..., RANK:], memory, slots, lengths, SCALE, out
    if is_streamed:
        division = LatentDivision.of(*sizes, at_once())
        stream_latents(*rows, division, scratch)
        return division.cluster * division.groups
    splits = num_splits_of(*sizes, torch.cuda.get_device_properties(CUDA).multi_processor_count)
    latent_decode(*rows, splits, scratch, LatentTiles.choose(q.dtype, DECODE_PAIRS, shared_bytes(CUDA)))
    return splits


@cache
def at_once() -> Mapping[int, int]:
    """How many clusters of each size run at once; asked once, as by the backend, because a graph that is captured must not ask."""
    found = clusters_at_once(CUDA, torch.bfloat16, RANK, RANK + ROPE, PAGE)
    assert found is not None
    return found


def skip_without_kernel(is_streamed: bool) -> None:
    if is_streamed and torch.cuda.get_device_capability(CUDA) != (9, 0):
        pytest.skip("needs compute capability 9.0")


def scratch_of() -> LatentScratch:
    return LatentScratch.allocate(torch.cuda.get_device_properties(CUDA).multi_processor_count, RANK, CUDA)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["triton", "streamed"])
@pytest.mark.parametrize(("num_rows", "num_heads"), [(1, 16), (5, 128), (9, 20), (40, 16), (70, 16), (300, 16)])
def test_decodes_are_right_and_the_same_every_time(num_rows: int, num_heads: int, is_streamed: bool) -> None:
    skip_without_kernel(is_streamed)
    torch.manual_seed(0)
    lengths = torch.randint(1, 2000 if num_rows < 100 else 300, (num_rows,)).tolist()
    memory, slots = memory_of(lengths)
    q, on_device = randn(num_rows, num_heads, RANK + ROPE), torch.tensor(lengths, device=CUDA)
    out, scratch, where = randn(num_rows, num_heads, RANK), scratch_of(), slots.to(CUDA)
    torch.cuda.synchronize()  # a dependent launch reads slots, lengths and latents before earlier kernels have ended
    splits = decode(q, memory, where, on_device, out, scratch, is_streamed)
    assert (splits > 1) == (num_rows < 100)
    rows = [(int(slot), length - 1, 1) for slot, length in zip(slots, lengths, strict=True)]
    expected = latent_reference(q, memory.latents, RANK, memory.page_table, PAGE, rows, SCALE)
    assert error_of(out, expected) < MOST
    again = torch.empty_like(out)
    for _ in range(20):
        decode(q, memory, where, on_device, again, scratch, is_streamed)
        assert torch.equal(again, out)

    # A single row has all pages, and attention does not ask for their order: so half of them are read twice, and half never.
    twice = replace(memory, page_table=memory.page_table // 2, latents=memory.latents.nan_to_num())
    torch.cuda.synchronize()
    decode(q, twice, where, on_device, again, scratch, is_streamed)
    assert error_of(again, expected) > 0.3, "half of the pages lost"
    unrotated = q.clone()
    unrotated[..., RANK:] = 0.0
    decode(unrotated, memory, where, on_device, again, scratch, is_streamed)
    assert error_of(again, expected) > 5 * MOST, "the rotated part lost"


@pytest.mark.parametrize("num_heads", [16, 128])
def test_chunks_see_their_prefix_and_themselves(num_heads: int) -> None:
    torch.manual_seed(1)
    prefixes, counts = [0, 700, 33], [150, 64, 1]
    memory, slots = memory_of([p + c for p, c in zip(prefixes, counts, strict=True)])
    q, on_device = randn(sum(counts), num_heads, RANK + ROPE), torch.tensor(counts, device=CUDA)
    out = randn(sum(counts), num_heads, RANK)
    tiles = LatentTiles.choose(q.dtype, max(counts) * num_heads, shared_bytes(CUDA))
    rows = slots.to(CUDA), torch.tensor(prefixes, device=CUDA), on_device, on_device.cumsum(0) - on_device
    latent_extend(q[..., :RANK], q[..., RANK:], memory, *rows, max(counts), SCALE, out, tiles)
    known = [(int(slot), p, c) for slot, p, c in zip(slots, prefixes, counts, strict=True)]
    expected = latent_reference(q, memory.latents, RANK, memory.page_table, PAGE, known, SCALE)
    assert error_of(out, expected) < MOST


@pytest.mark.parametrize("is_streamed", [False, True], ids=["triton", "streamed"])
def test_a_graph_serves_any_lengths(is_streamed: bool) -> None:
    skip_without_kernel(is_streamed)
    torch.manual_seed(2)
    memory, slots = memory_of([900, 1500])
    q, lengths = randn(2, 16, RANK + ROPE), torch.tensor([1, 1], device=CUDA)
    out, scratch, where = randn(2, 16, RANK), scratch_of(), slots.to(CUDA)
    decode(q, memory, where, lengths, out, scratch, is_streamed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(q, memory, where, lengths, out, scratch, is_streamed)
    for some in ([900, 1500], [0, 7], [640, 1]):
        lengths.copy_(torch.tensor(some))
        graph.replay()
        rows = [(int(slot), length - 1, 1) for slot, length in zip(slots, some, strict=True) if length]
        kept = [index for index, length in enumerate(some) if length]
        expected = latent_reference(q[kept], memory.latents, RANK, memory.page_table, PAGE, rows, SCALE)
        assert error_of(out[kept], expected) < MOST
        assert all(not out[index].any() for index in range(2) if index not in kept)
