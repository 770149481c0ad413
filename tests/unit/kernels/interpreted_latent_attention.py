"""Attention over latents in Triton's interpreter, against its reference."""

from __future__ import annotations

import pytest
import torch

from srt.kernels.attention.latent_attention import (
    LatentScratch,
    LatentTiles,
    PagedLatents,
    latent_decode,
    latent_extend,
    num_splits_of,
)
from srt.kernels.elementwise.prepare_latents import prepare_latents
from srt.layers.ops import TORCH_OPS
from srt.layers.rope import rotate_part
from tests.support.latent_reference import latent_reference
from tests.unit.kernels.paged_world import make_paged_world

TILES = LatentTiles.choose(torch.float32, 0, 0)
CPU = torch.device("cpu")
SCALE = 0.2


def memory_of(lengths: list[int], rank: int, rope: int, page_size: int) -> tuple[PagedLatents, torch.Tensor]:
    """The latents of rows in shuffled pages, NaN elsewhere; and the slots of the rows."""
    world = make_paged_world(lengths, 1, rank + rope, page_size, torch.float32)
    return PagedLatents(world.kv.k_buffer, rank, world.kv.page_table, page_size), world.req_pool_indices


def parts_of(q: torch.Tensor, memory: PagedLatents) -> tuple[torch.Tensor, torch.Tensor]:
    return q[..., : memory.rank], q[..., memory.rank :]


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_queries_are_rotated_and_latents_normed_rotated_and_stored(is_interleaved: bool) -> None:
    """Rows of both are parts of wider ones. Nothing else of the memory changes."""
    num_tokens, heads, nope, rope, rank = 5, 18, 8, 6, 20
    both = torch.randn(num_tokens, heads * (nope + rope) + rank + rope)
    before, memory = both.clone(), torch.full((9, 1, rank + rope), 7.0)
    weight, positions = torch.randn(rank), torch.tensor([0, 3, 100, 7, 2])
    rotation = TORCH_OPS.angles(positions, torch.rand(rope // 2), 1.5)
    q, latents = both.split((heads * (nope + rope), rank + rope), dim=-1)
    locations = torch.tensor([3, 0, 8, 5, 1])
    prepare_latents(
        q, nope + rope, latents, weight, 1e-3, rotation.cos, rotation.sin, is_interleaved, locations, memory
    )
    old_q, old_latents = before.split((heads * (nope + rope), rank + rope), dim=-1)
    plain, rotated = old_q.unflatten(-1, (heads, -1)).split((nope, rope), dim=-1)
    expected = torch.cat((plain, rotate_part(rotated, rotation, is_interleaved)), dim=-1)
    torch.testing.assert_close(q.unflatten(-1, (heads, -1)), expected)
    first, last = old_latents.split((rank, rope), dim=-1)
    last = rotate_part(last[:, None], rotation, is_interleaved)[:, 0]
    first = torch.nn.functional.rms_norm(first, (rank,), weight, 1e-3)
    torch.testing.assert_close(memory[locations, 0], torch.cat((first, last), dim=-1))
    assert (memory[[2, 4, 6, 7]] == 7.0).all()


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(("num_heads", "rank", "rope", "page_size"), [(4, 48, 16, 1), (18, 32, 8, 16)])
def test_decodes_see_all_positions_of_their_rows(
    num_heads: int, rank: int, rope: int, page_size: int, num_splits: int
) -> None:
    lengths = [1, 300, 17]
    memory, slots = memory_of(lengths, rank, rope, page_size)
    q, out = torch.randn(3, num_heads, rank + rope), torch.empty(3, num_heads, rank)
    scratch = LatentScratch.allocate(8, rank, CPU)
    latent_decode(*parts_of(q, memory), memory, slots, torch.tensor(lengths), SCALE, out, num_splits, scratch, TILES)
    rows = [(int(slot), length - 1, 1) for slot, length in zip(slots, lengths, strict=True)]
    expected = latent_reference(q, memory.latents, rank, memory.page_table, page_size, rows, SCALE)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_row_of_padding_gets_zeros(num_splits: int) -> None:
    memory, slots = memory_of([5], 32, 16, 4)
    q, out = torch.randn(1, 4, 48), torch.full((1, 4, 32), 7.0)
    scratch = LatentScratch.allocate(8, 32, CPU)
    latent_decode(*parts_of(q, memory), memory, slots, torch.tensor([0]), SCALE, out, num_splits, scratch, TILES)
    assert not out.any()


@pytest.mark.parametrize(("num_heads", "page_size"), [(4, 16), (3, 1)])
def test_chunks_see_their_prefix_and_themselves(num_heads: int, page_size: int) -> None:
    prefixes, counts = [0, 21, 40], [19, 1, 6]
    memory, slots = memory_of([p + c for p, c in zip(prefixes, counts, strict=True)], 48, 16, page_size)
    q = torch.randn(sum(counts) + 2, num_heads, 64)
    out = torch.full((len(q), num_heads, 48), 7.0)
    starts = torch.tensor(counts).cumsum(0) - torch.tensor(counts)
    rows = slots, torch.tensor(prefixes), torch.tensor(counts), starts
    latent_extend(*parts_of(q, memory), memory, *rows, max(counts), SCALE, out, TILES)
    known = [(int(slot), p, c) for slot, p, c in zip(slots, prefixes, counts, strict=True)]
    expected = latent_reference(q, memory.latents, 48, memory.page_table, page_size, known, SCALE)
    torch.testing.assert_close(out[:-2].double(), expected, rtol=1e-4, atol=1e-5)
    assert (out[-2:] == 7.0).all(), "tokens without a row changed"


def test_splits_fill_the_device_but_not_more_than_the_context_and_the_scratch_hold() -> None:
    assert num_splits_of(1, 16, 1 << 17, 132) == 32
    assert num_splits_of(1, 128, 1 << 17, 132) == 32
    assert num_splits_of(16, 16, 1 << 17, 132) == 16
    assert num_splits_of(1, 16, 300, 132) == 5
    assert num_splits_of(256, 128, 1 << 17, 132) == 1
    for rows, heads in ((1, 16), (3, 20), (7, 128), (131, 16), (20, 8)):
        pairs = rows * heads * num_splits_of(rows, heads, 1 << 17, 132)
        assert num_splits_of(rows, heads, 1 << 17, 132) == 1 or pairs <= LatentScratch.allocate(132, 8, CPU).lse.numel()
