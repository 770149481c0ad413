"""Draw one token for every row. The result depends only on the row's seed, position and logits, not on the rest of the batch.

Penalties, bias, the min_new_tokens mask, temperature, top_k, top_p and min_p are applied in this order, each to the result of the one
before. Then the token with the largest logit / T + Gumbel noise in float32 wins; there is no noise at T = 0, and the lowest token id
wins a tie. Each of these steps touches only rows that asked for it. Every rank of a tensor-parallel group draws the same ids.

Logprobs are not computed here. step_sampler.py takes them from the model's own logits, before anything above is applied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from srt.distributed.parallel_state import TensorParallel
from srt.kernels.cpu.row_operations import row_operations
from srt.kernels.sampling.draw_rows import DrawRows
from srt.layers.logit_adjustments import adjust_logits
from srt.layers.logits_processor import gather_vocabulary
from srt.layers.philox import gumbel_noise
from srt.mem_cache.memory_pool import AdjustmentTables, DrawTables, ReqToTokenPool
from srt.sampling.sampling_batch_info import SamplingArrays, SamplingBatchInfo

MINUS_INF = float("-inf")
FindThreshold = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A function with the arguments and the result of `filter_threshold`."""


@dataclass(frozen=True, slots=True)
class Draws:
    """The drawn `ids` [R] int64 and the values that won.

    If a value is not finite, the model produced no usable logits for its row. The id is then within the vocabulary but meaningless.
    """

    ids: torch.Tensor
    values: torch.Tensor  # [R] float32


class Sampler:
    """Draws from this rank's shard of the vocabulary, token ids `shard_start` … `shard_start + columns - 1`."""

    def __init__(
        self,
        tp: TensorParallel,
        vocab_size: int,
        shard_start: int,
        tables: ReqToTokenPool,
        find_threshold: FindThreshold | None = None,
    ) -> None:
        """On a CPU, `find_threshold` replaces `filter_threshold`."""
        self._tp = tp
        self._vocab_size = vocab_size
        self._shard_start = shard_start
        self._tables = tables
        self._draw_from_shard: Callable[..., tuple[torch.Tensor, torch.Tensor]] = draw_from_shard
        self._thresholds: Callable[..., torch.Tensor] = partial(filter_thresholds, find=find_threshold)
        self._adjustment_kernels: Callable[..., None] | None = None  # created at first use, when the columns are known
        if tables.seq_lens.is_cuda:
            # Imported here because Triton is installed only with PyTorch for CUDA.
            from srt.kernels.build.pdl import has_pdl
            from srt.kernels.sampling.filter import filter_thresholds as kernel_thresholds
            from srt.kernels.sampling.sample import draw

            pdl = has_pdl(tables.seq_lens.device)
            self._draw_from_shard = partial(draw, pdl=pdl)
            self._thresholds = partial(kernel_thresholds, pdl=pdl)
        elif (compiled := row_operations()) is not None:
            self._draw_from_shard = compiled.draw

    def prepare(self, logits: torch.Tensor) -> None:
        """Allocate the memory that draws from logits of this shape need."""
        self._adjuster(logits)

    def draw(self, logits: torch.Tensor, info: SamplingBatchInfo) -> Draws:
        """Draw one id for every row of `logits` [R, columns] float32, which is overwritten."""
        if len(info.arrays.adjusted_rows):
            self._adjuster(logits)(logits, info.slots, info.positions, *self._adjustment_tables())
        return self._draw(logits, self._rows(logits, info))

    def draw_adjusted(
        self, logits: torch.Tensor, slots: torch.Tensor, rows: DrawTables, positions: torch.Tensor
    ) -> Draws:
        """Draw for rows with any adjustments and filters. Logits are overwritten if they are float32, and only then.

        Nothing here waits for the device, so a CUDA graph can hold it.
        """
        values = logits.to(torch.float32)
        self._adjuster(values)(values, slots, positions, *self._adjustment_tables())
        return self.draw_filtered(values, rows, positions)

    def draw_plain(
        self, logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> Draws:
        """Draw for rows that use only a temperature. The logits are not overwritten."""
        return self._draw(logits, DrawRows(temperatures, seeds, positions))

    def draw_filtered(self, logits: torch.Tensor, rows: DrawTables, positions: torch.Tensor) -> Draws:
        """Draw for rows, some of which use filters. The logits are not overwritten."""
        whole = gather_vocabulary(self._tp, logits, self._vocab_size)
        thresholds = self._thresholds(whole, None, rows.temperatures, rows.top_ks, rows.top_ps, rows.min_ps)
        return self._draw(logits, DrawRows(rows.temperatures, rows.seeds, positions, thresholds))

    def _adjuster(self, logits: torch.Tensor) -> Callable[..., None]:
        if not logits.is_cuda:
            return adjust_logits
        if self._adjustment_kernels is None:
            from srt.kernels.sampling.adjust_logits import AdjustmentKernels

            self._adjustment_kernels = AdjustmentKernels.allocate(
                self._tables.num_slots, logits.shape[1], logits.device
            )
        return self._adjustment_kernels

    def _adjustment_tables(self) -> tuple[torch.Tensor, AdjustmentTables, int]:
        return self._tables.token_table, self._tables.adjustments, self._shard_start

    def _rows(self, logits: torch.Tensor, info: SamplingBatchInfo) -> DrawRows:
        """Return the sampling parameters of every row. `info` lists only noisy rows, whose temperature is above 0; others are greedy."""
        arrays, device = info.arrays, logits.device
        temperatures = torch.zeros(info.num_rows, dtype=torch.float32, device=device)
        temperatures[arrays.noisy_rows] = arrays.temperatures
        seeds = torch.zeros(info.num_rows, dtype=torch.int64, device=device)
        seeds[arrays.noisy_rows] = arrays.seeds
        thresholds = None
        if len(arrays.filter_rows):
            thresholds = self._filter_thresholds(logits, temperatures[arrays.filter_rows], arrays)
        return DrawRows(temperatures, seeds, info.positions, thresholds)

    def _filter_thresholds(
        self, logits: torch.Tensor, temperatures: torch.Tensor, arrays: SamplingArrays[torch.Tensor]
    ) -> torch.Tensor:
        """Return for each row the smallest logit / T that passes all of its filters; -inf for a row without filters."""
        rows, filters = arrays.filter_rows, (arrays.top_ks, arrays.top_ps, arrays.min_ps)
        if self._tp.size == 1:
            return self._thresholds(logits[:, : self._vocab_size], rows, temperatures, *filters)
        # Filters need their rows' whole vocabulary.
        whole = gather_vocabulary(self._tp, logits[rows], self._vocab_size)
        thresholds = torch.full((len(logits),), MINUS_INF, device=logits.device)
        thresholds[rows] = self._thresholds(whole, None, temperatures, *filters)
        return thresholds

    def _draw(self, logits: torch.Tensor, rows: DrawRows) -> Draws:
        ids, values = self._draw_from_shard(logits, rows, self._shard_start, self._vocab_size)
        if self._tp.size > 1:
            packed = torch.stack((values.view(torch.int32), ids.to(torch.int32)))
            gathered = self._tp.all_gather(packed.unsqueeze(0), dim=0)
            values_by_rank = gathered[:, 0].contiguous().view(torch.float32)
            # argmax returns the first of equal values, so the rank with the lowest ids wins.
            winner = values_by_rank.argmax(dim=0, keepdim=True)
            values = values_by_rank.gather(0, winner).squeeze(0)
            ids = gathered[:, 1].gather(0, winner).squeeze(0).long()
        return Draws(ids, values)


def draw_from_shard(
    logits: torch.Tensor, rows: DrawRows, shard_start: int, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids [R] int64, winning values [R] float32) of logits [R, columns], which start at token id `shard_start`.

    Logits of ids from `vocab_size` on must be -inf. If a winning value is not finite, its id is valid but meaningless.
    """
    values = logits.to(torch.float32)
    noisy = torch.nonzero(rows.temperatures > 0).squeeze(1)
    if len(noisy):
        scaled = values[noisy] / rows.temperatures[noisy].unsqueeze(1)
        if rows.thresholds is not None:
            scaled.masked_fill_(scaled < rows.thresholds[noisy].unsqueeze(1), MINUS_INF)
        scaled += gumbel_noise(rows.seeds[noisy], rows.positions[noisy], shard_start, logits.shape[1])
        values = scaled if len(noisy) == len(values) else values.index_copy(0, noisy, scaled)
    ids = values.argmax(dim=-1)
    best = values.gather(1, ids.unsqueeze(1)).squeeze(1)
    return (ids + shard_start).clamp_(max=vocab_size - 1), best


def filter_thresholds(
    logits: torch.Tensor,
    rows: torch.Tensor | None,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    find: FindThreshold | None = None,
) -> torch.Tensor:
    """Return a threshold for each row of `logits` [rows, vocabulary]: the smallest logit / T that passes the row's filters.

    Only the rows with the indices `rows` (None: all) have filters; the other arguments have one entry for each of them. The threshold is
    -inf for all other rows, and for greedy rows (temperature 0). `find` replaces `filter_threshold`.
    """
    is_noisy = temperatures > 0
    scaled = logits if rows is None else logits[rows]
    scaled = scaled.to(torch.float32) / torch.where(is_noisy, temperatures, 1.0).unsqueeze(1)
    found = (find or filter_threshold)(scaled, top_ks, top_ps, min_ps).squeeze(1).masked_fill_(~is_noisy, MINUS_INF)
    if rows is None:
        return found
    return torch.full((len(logits),), MINUS_INF, device=logits.device).index_copy_(0, rows, found)


def filter_threshold(
    scaled: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor
) -> torch.Tensor:
    """Return the smallest value of each row that passes top_k, then top_p, then min_p, as [rows, 1].

    `scaled` [rows, vocabulary] is logit / T. Filters compare values only, so a value passes if it equals one that passes.
    """
    ordered = _sorted_descending(scaled)
    last = (top_ks.clamp(max=ordered.shape[1]) - 1).unsqueeze(1)
    threshold = ordered.gather(1, last)
    # The weights are probabilities relative to the best token's. They are float64, so that sums agree beyond float32's precision.
    weights = (ordered.to(torch.float64) - ordered[:, :1].to(torch.float64)).exp_()
    weights.masked_fill_(ordered < threshold, 0.0)
    sums = weights.cumsum(dim=1)
    in_nucleus = (sums - weights) < top_ps.unsqueeze(1) * sums[:, -1:]
    threshold = torch.maximum(threshold, _last_of(ordered, in_nucleus))
    return torch.maximum(threshold, _last_of(ordered, weights >= min_ps.unsqueeze(1)))


def _last_of(ordered: torch.Tensor, passes: torch.Tensor) -> torch.Tensor:
    """Return the last value of each row that passes. Passing values come first, and the first value always passes."""
    return ordered.gather(1, (passes.sum(dim=1, keepdim=True) - 1).clamp_(min=0))


def _sorted_descending(values: torch.Tensor) -> torch.Tensor:
    if values.device.type == "cpu":
        # About ten times faster than torch's sort, which also computes indices.
        ascending = np.sort(values.numpy(), axis=-1)
        return torch.from_numpy(np.ascontiguousarray(ascending[:, ::-1]))
    return values.sort(dim=-1, descending=True).values
