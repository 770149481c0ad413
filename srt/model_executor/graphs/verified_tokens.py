"""What a step that verifies drafts reads from the tables, and what it writes back: by a kernel each, or in plain PyTorch on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from srt.layers.sampler import Draws
from srt.mem_cache.memory_pool import DRAW_DTYPES, DrawTables, ReqToTokenPool
from srt.model_executor.graphs.row_tokens import TokenInputs

# Lines of the staged numbers. The first four have a column for each token, the others one for each row of the step.
SLOTS, OFFSETS, FIRSTS, LASTS, ROW_SLOTS, ROW_LENS, ROW_FIRSTS = range(7)


class GatheredTokens(NamedTuple):
    """Inputs of tokens, at fixed addresses. The numbers are int64."""

    ids: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens]
    seq_lens: torch.Tensor  # [tokens]: one more than the position, which is where the draw behind the token goes
    locations: torch.Tensor  # [page groups, tokens]
    prefix_lens: torch.Tensor  # [rows]: positions before the row's first token
    draws: DrawTables  # of each token's slot

    @classmethod
    def allocate(cls, tables: ReqToTokenPool, max_tokens: int, device: torch.device) -> GatheredTokens:
        numbers = torch.zeros((4, max_tokens), dtype=torch.int64, device=device)
        locations = torch.zeros((len(tables.page_tables), max_tokens), dtype=torch.int64, device=device)
        draws = DrawTables(*(torch.zeros(max_tokens, dtype=dtype, device=device) for dtype in DRAW_DTYPES))
        ids, positions, seq_lens, prefix_lens = numbers
        return cls(ids, positions, seq_lens, locations, prefix_lens, draws)

    def first(self, size: int) -> GatheredTokens:
        numbers = (self.ids[:size], self.positions[:size], self.seq_lens[:size])
        return GatheredTokens(*numbers, self.locations[:, :size], self.prefix_lens[:size], self.draws.first(size))

    def inputs_of(self, slots: torch.Tensor) -> TokenInputs:
        return TokenInputs(self.ids, slots, self.positions, self.seq_lens, tuple(self.locations))


Gather = Callable[[torch.Tensor, ReqToTokenPool, GatheredTokens], None]
Accept = Callable[[torch.Tensor, Draws, ReqToTokenPool, int, torch.Tensor], None]


def table_operations(device: torch.device) -> tuple[Gather, Accept]:
    """Return what gathers a step's inputs, and what keeps its draws that count."""
    if device.type != "cuda":
        return gather_reference, accept_reference
    # Imported here because Triton is installed only with PyTorch for CUDA.
    from srt.kernels.elementwise.verify_rows import accept_draws, gather_tokens

    def gather(staged: torch.Tensor, tables: ReqToTokenPool, out: GatheredTokens) -> None:
        own = tables.page_tables, tables.token_table, tables.seq_lens, tables.draws
        gather_tokens(staged, *own, tables.page_size, out[:5], out.draws)

    def accept(
        staged: torch.Tensor, draws: Draws, tables: ReqToTokenPool, most_of_row: int, outcome: torch.Tensor
    ) -> None:
        own = tables.token_table, tables.seq_lens, tables.dummy_slot
        accept_draws(staged, draws.ids, draws.values, *own, most_of_row, outcome)

    return gather, accept


def gather_reference(staged: torch.Tensor, tables: ReqToTokenPool, out: GatheredTokens) -> None:
    """Do what the kernel `gather_tokens` does, in plain PyTorch."""
    size = len(out.ids)
    slots, row_slots = staged[SLOTS, :size], staged[ROW_SLOTS, :size]
    inputs = TokenInputs.of(tables, slots, tables.seq_lens[slots] + staged[OFFSETS, :size])
    out.ids.copy_(inputs.ids)
    out.positions.copy_(inputs.positions)
    out.seq_lens.copy_(inputs.seq_lens)
    out.prefix_lens.copy_(tables.seq_lens[row_slots])
    out.locations.copy_(torch.stack(inputs.locations))
    for target, found in zip(out.draws, tables.draws.of(slots), strict=True):
        target.copy_(found)


def accept_reference(
    staged: torch.Tensor, draws: Draws, tables: ReqToTokenPool, most_of_row: int, outcome: torch.Tensor
) -> None:
    """Do what the kernel `accept_draws` does, in plain PyTorch."""
    size = len(draws.ids)
    slots, offsets, firsts, is_last = staged[: LASTS + 1, :size]
    assert not size or int(offsets.max()) < most_of_row, "a row has more tokens than that"
    positions = tables.seq_lens[slots] + offsets + 1
    drafted = tables.tokens(slots, positions)
    is_finite = torch.isfinite(draws.values)
    breaks = ((is_last > 0) | (draws.ids != drafted) | ~is_finite).to(torch.int64)
    num_before = torch.cumsum(breaks, 0) - breaks
    is_open = num_before == num_before[firsts]
    is_kept = is_open & (is_finite | (offsets == 0)) & (slots != tables.dummy_slot)
    tables.write_tokens(slots, positions, torch.where(is_kept, draws.ids, drafted))
    tables.seq_lens.index_add_(0, slots, is_kept.to(torch.int64))
    outcome.copy_(torch.where(is_open & is_finite, draws.ids, -1))
