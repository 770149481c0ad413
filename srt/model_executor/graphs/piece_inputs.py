"""The fixed device memory that graphs of steps with prompts read."""

from __future__ import annotations

from dataclasses import replace

import torch

from srt.layers.attention.base import AnyRows
from srt.mem_cache.memory_pool import ReqToTokenPool
from srt.model_executor.forward_batch_info import ForwardBatch

MOST_WHOLE_EXTENDS = 64  # extend rows of a step that is captured with its attention
MOST_WHOLE_DECODES = 512  # decode rows of such a step


class PieceInputs:
    """Up to `most_tokens` tokens, the indices of the outputs needed, and the rows of steps that are captured with their attention.

    A step is padded to a size. Padding is written to the dummy page, and stands between the tokens that come first and those that come
    last.
    """

    def __init__(
        self,
        tables: ReqToTokenPool,
        most_tokens: int,
        device: torch.device,
        stage_input: torch.Tensor | None = None,
        no_adapter: int | None = None,
    ) -> None:
        """`stage_input` [most_tokens, hidden size] is the memory for what the stage before sends; None if there is none.

        `no_adapter` is the number that stands for no adapter; None if the graphs have no adapters.
        """

        def fill(count: int, value: int = 0) -> torch.Tensor:
            return torch.full((count,), value, dtype=torch.int64, device=device)

        self._dummy_locations = [pages * tables.page_size for pages in (tables.num_pages, *tables.window_pages)]
        self.stage_input = stage_input
        self.input_ids = fill(most_tokens)
        self.positions = fill(most_tokens)
        self.out_cache_loc, *self.window_locations = (fill(most_tokens, one) for one in self._dummy_locations)
        self.output_tokens = fill(tables.num_slots)
        self._zeros = fill(max(most_tokens, tables.num_slots))
        self._dummies = [fill(most_tokens, one) for one in self._dummy_locations]
        extends, decodes = (min(tables.num_slots, most) for most in (MOST_WHOLE_EXTENDS, MOST_WHOLE_DECODES))
        self._no_adapters = None if no_adapter is None else fill(most_tokens, no_adapter).int()
        self.adapters = None if self._no_adapters is None else self._no_adapters.clone()
        self.rows = AnyRows(*(fill(count) for count in (extends, extends, extends, decodes, decodes)))

    def rows_of(self, size: int) -> AnyRows:
        """Return the row buffers for a step of `size` tokens, which has at most `size` decode rows."""
        rows = self.rows
        return replace(rows, decode_slots=rows.decode_slots[:size], decode_lens=rows.decode_lens[:size])

    def populate_from_forward_batch(self, batch: ForwardBatch, size: int, num_first: int) -> None:
        """Copy the batch's first `num_first` tokens to the beginning of the `size` tokens, and the others to their end."""
        outputs, shift = batch.output_tokens, size - len(batch.input_ids)
        if outputs is not None:
            if num_first < len(batch.input_ids):
                outputs = torch.where(outputs < num_first, outputs, outputs + shift)
            _lay(outputs, len(outputs), self._zeros, self.output_tokens)
        if self.stage_input is not None:
            received = batch.received
            self.stage_input[:num_first].copy_(received[:num_first])
            if num_first < len(received):
                self.stage_input[num_first + shift : size].copy_(received[num_first:])
        _lay(batch.input_ids, num_first, self._zeros, self.input_ids[:size])
        _lay(batch.positions, num_first, self._zeros, self.positions[:size])
        sources = (batch.out_cache_loc, *batch.window_locations)
        targets = (self.out_cache_loc, *self.window_locations)
        for source, dummies, target in zip(sources, self._dummies, targets, strict=True):
            _lay(source, num_first, dummies, target[:size])

    def populate_adapters(self, numbers: torch.Tensor, size: int, num_first: int) -> None:
        """Copy the numbers of the tokens' adapters, in the places of the tokens."""
        assert self.adapters is not None and self._no_adapters is not None, "these graphs have no adapters"
        _lay(numbers, num_first, self._no_adapters, self.adapters[:size])

    def populate_rows(self, batch: ForwardBatch, size: int) -> None:
        """Copy the batch's extend rows to the beginning and its decode rows to the end, in the order of their tokens."""
        num_extends, rows = batch.num_extend_rows, self.rows_of(size)
        slots, padding = batch.req_pool_indices, self._zeros
        _lay(slots[:num_extends], num_extends, padding, rows.extend_slots)
        _lay(batch.extend_prefix_lens, num_extends, padding, rows.extend_prefix_lens)
        _lay(batch.extend_seq_lens, num_extends, padding, rows.extend_lens)
        _lay(slots[num_extends:], 0, padding, rows.decode_slots)
        _lay(batch.seq_lens[num_extends:], 0, padding, rows.decode_lens)

    def populate_padding(self, size: int) -> None:
        """Fill everything with padding, for a run that leaves the tables unchanged."""
        self.input_ids[:size].zero_()
        self.positions[:size].zero_()
        for target, dummy in zip((self.out_cache_loc, *self.window_locations), self._dummy_locations, strict=True):
            target[:size].fill_(dummy)
        self.output_tokens.zero_()
        if self.adapters is not None and self._no_adapters is not None:
            self.adapters.copy_(self._no_adapters)
        for lens in (self.rows.extend_lens, self.rows.decode_lens):
            lens.zero_()


def _lay(values: torch.Tensor, num_first: int, padding: torch.Tensor, out: torch.Tensor) -> None:
    """Copy the first `num_first` values to the beginning of `out` and the others to its end, with padding between them."""
    assert len(values) <= len(out), (len(values), len(out))
    torch.cat((values[:num_first], padding[: len(out) - len(values)], values[num_first:]), out=out)
