"""Decode attention over latents as a CUDA C++ kernel, for Hopper and bfloat16, with latents of 512 and 64 rotated elements.

The Triton kernel loads one block ahead. Here two programs on a multiprocessor each load up to five blocks ahead. They begin while the
previous kernel still runs, if that lets them. Splits of a row are merged by the same kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from srt.kernels.attention.latent_attention import DECODE_PAIRS, PROGRAMS_PER_PROCESSOR, LatentScratch, PagedLatents
from srt.kernels.build.hopper import (
    BLOCK_K,
    Argument,
    launch,
    most_clusters,
    runs_on,
    source_of,
    tensor_map,
    with_alignment,
)

_SOURCE: Final = Path(__file__).with_suffix(".cu")
_OPERANDS: Final = Path(__file__).with_name("row_operands.cuh")
_RANK: Final = 512
_ROPE: Final = 64
_BLOCK: Final = 16  # positions per load
_LEAST_BLOCKS: Final = 2  # of a split of a row with several groups
_WARPS: Final = 4  # that multiply
_SLOTS: Final = 5
_CLUSTERS: Final = (8, 4, 2)
_MOST_GROUPS: Final = 4


@dataclass(frozen=True, slots=True)
class LatentDivision:
    """The splits of a decode row: groups of clusters of programs. A cluster's programs merge their splits without global memory."""

    cluster: int
    groups: int

    @classmethod
    def of(cls, num_rows: int, num_heads: int, max_context: int, at_once: Mapping[int, int]) -> LatentDivision:
        """Return the division with which all clusters run at once; `at_once` says how many of each size do.

        It depends on the batch's size alone, so a graph serves every step. The kernel uses fewer of the groups for short rows.
        """
        tiles = max(num_rows * -(-num_heads // DECODE_PAIRS), 1)
        most_splits = -(-max_context // (_BLOCK * _LEAST_BLOCKS))
        for cluster in _CLUSTERS:
            if tiles <= at_once[cluster] and cluster <= most_splits:
                groups = min(at_once[cluster] // tiles, most_splits // cluster, _MOST_GROUPS)
                return cls(cluster, groups if cluster == _CLUSTERS[0] else 1)
        return cls(1, 1)


@dataclass(frozen=True, slots=True)
class LatentVariant:
    """The kernel for splits of which `cluster` are merged by neighbouring programs."""

    page_size: int
    cluster: int

    @property
    def name(self) -> str:
        return "stream_latents"

    @property
    def source(self) -> str:
        return source_of(_SOURCE, 0, _OPERANDS)

    @property
    def num_threads(self) -> int:
        return 32 * (_WARPS + 1)

    @property
    def shared_bytes(self) -> int:
        """The ring; sums that warps exchange, of two blocks, twice; totals and barriers."""
        ring = _SLOTS * _BLOCK * 2 * (_RANK + _ROPE)
        exchanged = 2 * _WARPS * 2 * _BLOCK * DECODE_PAIRS * 4
        return with_alignment(ring + exchanged + 8 * DECODE_PAIRS + 16 + 16 * _SLOTS)

    @property
    def constants(self) -> Mapping[str, int]:
        return {
            "RANK": _RANK,
            "ROPE": _ROPE,
            "PAGE_SIZE": self.page_size,
            "SLOTS": _SLOTS,
            "WARPS": _WARPS,
            "PROGRAMS": PROGRAMS_PER_PROCESSOR,
            "CLUSTER": self.cluster,
            "MOST_GROUPS": _MOST_GROUPS,
            "LEAST_BLOCKS": _LEAST_BLOCKS,
        }


def clusters_at_once(
    device: torch.device, dtype: torch.dtype, rank: int, latent_dim: int, page_size: int
) -> Mapping[int, int] | None:
    """Return for each size of clusters how many run at once, or None if the kernel does not support such latents or does not run here.

    Programs of a cluster are neighbours, so clusters do not fill a device to the last program.
    """
    if dtype is not torch.bfloat16 or (rank, latent_dim) != (_RANK, _RANK + _ROPE) or page_size % _BLOCK:
        return None
    variant = LatentVariant(page_size, 1)
    if not runs_on(device, variant):
        return None
    return {size: most_clusters(variant, device.index, size) for size in _CLUSTERS}


def stream_latents(
    q: torch.Tensor,
    rotated: torch.Tensor,
    memory: PagedLatents,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    division: LatentDivision,
    scratch: LatentScratch,
) -> None:
    """Compute `latent_decode`. It reads lengths, tables, and all latents but those of the rows' last blocks before the previous kernel
    has ended. That kernel must not store them, and must let this one start only when all kernels before it have ended:
    as any launch does that is not dependent, and `head_products` if it is late."""
    num_rows, num_heads, rank = q.shape
    if not num_rows:
        return
    tiles = -(-num_heads // DECODE_PAIRS)
    assert q.dtype is memory.latents.dtype is out.dtype is torch.bfloat16, (q.dtype, memory.latents.dtype)
    assert q.stride(2) == rotated.stride(2) == 1 and rotated.shape == (num_rows, num_heads, _ROPE), rotated.shape
    assert rank == memory.rank == _RANK and out.is_contiguous() and out.shape == q.shape, (q.shape, out.shape)
    assert all(stride % 2 == 0 for stride in (*q.stride()[:2], *rotated.stride()[:2])), "lanes load pairs"
    assert slots.dtype is seq_lens.dtype is torch.int64 and memory.page_table.dtype is torch.int32
    if division.groups > 1:
        pairs = num_rows * tiles * DECODE_PAIRS * division.groups
        assert division.groups <= _MOST_GROUPS and scratch.partial.numel() >= pairs * rank, (q.shape, division)
        assert scratch.lse.numel() >= pairs * division.cluster, (q.shape, division)
        assert scratch.arrived.numel() >= num_rows * tiles * division.cluster, (q.shape, division)
    arguments: tuple[Argument, ...] = (
        q, rotated, memory.page_table, slots, seq_lens, scratch.partial, scratch.lse, scratch.arrived, out,
        scale * math.log2(math.e), num_heads, *q.stride()[:2], *rotated.stride()[:2], memory.page_table.stride(0),
    )  # fmt: skip
    grid = division.cluster * division.groups, tiles, num_rows
    with torch.cuda.device(q.device):
        launch(
            LatentVariant(memory.page_size, division.cluster),
            grid,
            (_map_of(memory.latents),),
            arguments,
            is_dependent=True,
        )


def _map_of(latents: torch.Tensor) -> object:
    """Return the tensor map of [locations, 1, latent_dim]. A load brings a line of some locations, then their next line, and so on."""
    locations, _, latent_dim = latents.shape
    assert latents.shape[1:] == (1, _RANK + _ROPE) and latents.stride(2) == 1, latents.shape
    lines = latent_dim // BLOCK_K
    shape, strides = (BLOCK_K, locations, lines), (2 * latents.stride(0), 2 * BLOCK_K)
    return tensor_map(latents.data_ptr(), shape, strides, (BLOCK_K, _BLOCK, lines))
