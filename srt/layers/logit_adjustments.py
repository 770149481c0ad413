"""Penalties, biases and masked stop tokens in plain PyTorch: used on a CPU, and the reference for the kernels.

Everything is computed from the tables at each draw, so no state has to be kept, reset or rebuilt when a request resumes.
"""

from __future__ import annotations

import torch

from srt.mem_cache.memory_pool import AdjustmentTables

MINUS_INF = float("-inf")


def adjust_logits(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    token_table: torch.Tensor,
    adjustments: AdjustmentTables,
    shard_start: int,
) -> None:
    """Apply the adjustments of the rows' slots to `logits` [R, columns] float32, which start at token id `shard_start`.

    `positions` [R] are the positions of the tokens to be drawn; the token table holds the tokens before them.
    """
    limits = adjustments.limits[slots]
    _penalise(logits, slots, positions, token_table, adjustments.penalties[slots], limits[:, 0], shard_start)
    rows, entries = _entries(limits[:, 2], adjustments.bias_ids.shape[1])
    if len(rows):
        ids, values = adjustments.bias_ids[slots[rows], entries], adjustments.bias_values[slots[rows], entries]
        _add(logits, rows, ids.long() - shard_start, values)
    rows, entries = _entries(limits[:, 3], adjustments.stop_ids.shape[1])
    if len(rows):
        ids = adjustments.stop_ids[slots[rows], entries].long() - shard_start
        is_early = positions[rows] < limits[rows, 1]
        _add(logits, rows, ids, torch.zeros(len(rows), device=logits.device).masked_fill_(is_early, MINUS_INF))


def _penalise(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    token_table: torch.Tensor,
    penalties: torch.Tensor,
    prompt_lens: torch.Tensor,
    shard_start: int,
) -> None:
    none = torch.tensor([1.0, 0.0, 0.0], device=logits.device)
    penalised = torch.nonzero((penalties != none).any(dim=1)).squeeze(1)
    if not len(penalised):
        return
    columns, known = logits.shape[1], positions[penalised]
    ids = token_table[slots[penalised], : int(known.max())].long() - shard_start
    at = torch.arange(ids.shape[1], device=logits.device).unsqueeze(0)
    # An extra column collects ids outside this shard and positions after the request's tokens.
    ids.masked_fill_((at >= known.unsqueeze(1)) | (ids < 0) | (ids >= columns), columns)
    seen = torch.zeros((len(ids), columns + 1), dtype=torch.bool, device=logits.device).scatter_(1, ids, True)
    is_output = at >= prompt_lens[penalised].unsqueeze(1)
    counts = torch.zeros((len(ids), columns + 1), dtype=torch.float32, device=logits.device)
    counts = counts.scatter_add_(1, ids, is_output.expand_as(ids).to(torch.float32))[:, :columns]
    repetition, frequency, presence = penalties[penalised].unsqueeze(2).unbind(1)
    rows = logits[penalised]
    rows = torch.where(seen[:, :columns], torch.where(rows > 0, rows / repetition, rows * repetition), rows)
    rows -= frequency * counts
    rows -= presence * (counts > 0)
    logits[penalised] = rows


def _entries(counts: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rows, entries) of the first `counts[row]` entries of every row."""
    rows, entries = torch.nonzero(torch.arange(width, device=counts.device) < counts.unsqueeze(1)).unbind(1)
    return rows, entries


def _add(logits: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, values: torch.Tensor) -> None:
    """Add the values to the columns that are in this shard. A column may occur only once per row."""
    is_here = (columns >= 0) & (columns < logits.shape[1])
    logits.index_put_((rows[is_here], columns[is_here]), values[is_here], accumulate=True)
