"""Device memory of a worker: the pages and tokens of each slot, and the keys and values of every layer.

Flat location of a position: ``page_table[slot, position // page_size] * page_size + position % page_size``.
Pages 0 … num_pages - 1 belong to requests; page `num_pages` is the dummy page, where padding rows read and write.

Layers that see only the last tokens have pages and tables of their own, group by group (`srt/utils/page_groups.py`). There, entries of
positions behind the window are outdated: their pages may be another request's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import numpy as np
import torch

from srt.sampling.logit_adjustments import MAX_BIASES, MAX_STOPS, NO_PENALTIES, AdjustmentArrays
from srt.sampling.no_filter import NO_TOP_K, NO_TOP_P

FP8_MAX: Final = 448.0  # largest value of float8_e4m3fn


DRAW_DTYPES: Final = (torch.float32, torch.int64, torch.int64, torch.float64, torch.float64)


class DrawTables(NamedTuple):
    """Sampling parameters of slots, or of the rows of a step: one entry each."""

    temperatures: torch.Tensor  # float32; 0 is greedy
    seeds: torch.Tensor  # int64, all 64 bits of it
    top_ks: torch.Tensor  # int64; NO_TOP_K: no filter
    top_ps: torch.Tensor  # float64; NO_TOP_P: no filter
    min_ps: torch.Tensor  # float64; 0: no filter

    def clear(self) -> None:
        """Make every entry greedy, without filters."""
        for table, value in zip(self, (0.0, 0, NO_TOP_K, NO_TOP_P, 0.0), strict=True):
            table.fill_(value)

    def of(self, slots: torch.Tensor) -> DrawTables:
        return DrawTables(*(table[slots] for table in self))

    def first(self, count: int) -> DrawTables:
        return DrawTables(*(table[:count] for table in self))


class AdjustmentTables(NamedTuple):
    """Changes that slots make to their logits before drawing: one row each. In each row, `limits` says how many biases and stops count."""

    penalties: torch.Tensor  # [slots, 3] float32: repetition, frequency, presence
    # [slots, 4] int64: number of prompt tokens, position before which stops are masked, number of biases, number of stops
    limits: torch.Tensor
    bias_ids: torch.Tensor  # [slots, MAX_BIASES] int32
    bias_values: torch.Tensor  # [slots, MAX_BIASES] float32
    stop_ids: torch.Tensor  # [slots, MAX_STOPS] int32

    @classmethod
    def allocate(cls, num_slots: int, device: torch.device) -> AdjustmentTables:
        """Create tables without adjustments for `num_slots` slots."""
        tables = cls(
            torch.empty((num_slots, len(NO_PENALTIES)), dtype=torch.float32, device=device),
            torch.empty((num_slots, 4), dtype=torch.int64, device=device),
            torch.zeros((num_slots, MAX_BIASES), dtype=torch.int32, device=device),
            torch.zeros((num_slots, MAX_BIASES), dtype=torch.float32, device=device),
            torch.zeros((num_slots, MAX_STOPS), dtype=torch.int32, device=device),
        )
        tables.clear()
        return tables

    def clear(self) -> None:
        """Remove all adjustments."""
        for column, value in enumerate(NO_PENALTIES):
            self.penalties[:, column] = value
        self.limits.zero_()

    def admit(self, news: AdjustmentArrays[torch.Tensor]) -> None:
        self.penalties[news.slots] = news.penalties
        self.limits[news.slots] = news.limits
        if len(news.bias_slots):
            self.bias_ids[news.bias_slots, news.bias_columns] = news.bias_ids.to(torch.int32)
            self.bias_values[news.bias_slots, news.bias_columns] = news.bias_values
        if len(news.stop_slots):
            self.stop_ids[news.stop_slots, news.stop_columns] = news.stop_ids.to(torch.int32)


ADJUSTMENT_BYTES: Final = 8 * MAX_BIASES + 4 * MAX_STOPS + 44  # per slot


class ReqToTokenPool:
    """The tables from which a batch is gathered, one row per slot; slot `num_slots` is the dummy of padding rows.

    `page_tables` [groups, slots + 1, max_pages] int32: the slot's pages in order; entries after its last page are undefined.
    `page_table` is that of the first group.
    `token_table` [slots + 1, max_request_tokens + 1] int32: the slot's prompt and sampled tokens by position.
    `seq_lens` [slots + 1] int64: positions whose keys and values are computed, counting the steps enqueued so far.
    `draws`: sampling parameters of each slot; `adjustments`: changes to its logits before drawing.

    All writes are enqueued on the compute stream, so that steps in flight never see a row change.
    """

    def __init__(
        self,
        num_slots: int,
        max_request_tokens: int,
        num_pages: int,
        page_size: int,
        device: torch.device,
        windows: Sequence[int] = (),
        window_pages: Sequence[int] = (),
    ) -> None:
        """`windows` and `window_pages` are the windows and the numbers of pages of the groups after the first."""
        self.num_slots = num_slots
        self.num_pages = num_pages
        self.windows, self.window_pages = tuple(windows), tuple(window_pages)
        self.page_size = page_size
        self.max_pages = -(-(max_request_tokens + 1) // page_size)
        rows = num_slots + 1
        self.page_tables = torch.empty((1 + len(self.windows), rows, self.max_pages), dtype=torch.int32, device=device)
        self._clear_page_tables()
        self.page_table = self.page_tables[0]
        self.token_table = torch.zeros((rows, max_request_tokens + 1), dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.draws = DrawTables(*(torch.empty(rows, dtype=kind, device=device) for kind in DRAW_DTYPES))
        self.draws.clear()
        self.adjustments = AdjustmentTables.allocate(rows, device)

    @property
    def dummy_slot(self) -> int:
        return self.num_slots

    def group_of(self, window: int | None) -> int:
        """Return the page group of layers with this window."""
        return 1 + self.windows.index(window) if window in self.windows else 0

    def locations(self, slots: torch.Tensor, positions: torch.Tensor, group: int = 0) -> torch.Tensor:
        """Return the flat KV locations (int64) of these positions of these slots; the two broadcast against each other."""
        pages = self.page_tables[group][slots, positions // self.page_size].long()
        return pages * self.page_size + positions % self.page_size

    def tokens(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the token ids (int64) at these positions of these slots."""
        return self.token_table[slots, positions].long()

    def admit(self, slots: torch.Tensor, cached: torch.Tensor, draws: DrawTables) -> None:
        """Start the slots for new requests with `cached` positions already computed. Tokens and pages are written separately."""
        self.seq_lens[slots] = cached
        for table, values in zip(self.draws, draws, strict=True):
            table[slots] = values

    def write_pages(
        self, slots: torch.Tensor, columns: torch.Tensor, pages: torch.Tensor, groups: torch.Tensor | None = None
    ) -> None:
        """Set entry `columns[i]` of the page table of slot `slots[i]` to `pages[i]`, in group `groups[i]` or the first. All are int64."""
        if groups is None or not len(groups):
            self.page_table[slots, columns] = pages.to(torch.int32)
        else:
            self.page_tables[groups, slots, columns] = pages.to(torch.int32)

    def write_tokens(self, slots: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> None:
        self.token_table[slots, positions] = ids.to(torch.int32)

    def _clear_page_tables(self) -> None:
        for table, count in zip(self.page_tables, (self.num_pages, *self.window_pages), strict=True):
            table.fill_(count)  # the dummy page

    def clear(self) -> None:
        """Restore the initial state."""
        self._clear_page_tables()
        self.token_table.zero_()
        self.seq_lens.zero_()
        self.draws.clear()
        self.adjustments.clear()


class KVHeads(NamedTuple):
    """The key and value heads of one layer on one rank."""

    num_heads: int
    head_dim: int


class FuseWeights(NamedTuple):
    """How hidden states are fused: as a product with a matrix [size, inputs], before which they may be normed."""

    matrix: torch.Tensor
    norm: torch.Tensor | None
    eps: float


OUTPUT: Final = -1
"""In place of a layer's number: what the model gives behind its last norm."""


def taps_within(taps: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return these taps for a model of which only this many layers run: the last of them in place of those that do not."""
    return tuple(min(tap, num_layers - 1) for tap in taps)


class FeaturePool:
    """Hidden states of some layers of a model, fused to one vector for each token, by flat location.

    A head that drafts reads them (EAGLE-3, MTP). Their locations are those of the first page group, so a cached prefix has them too.
    """

    def __init__(
        self,
        taps: Sequence[int],
        fuse: Callable[[torch.Tensor], torch.Tensor],
        weights: FuseWeights | None,
        num_locations: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`taps` are the layers whose inputs are fused, or OUTPUT alone; `fuse` makes vectors of `size` of their concatenation.

        `weights` say how, if it multiplies.
        """
        self.taps = tuple(taps)
        self.memory = _zeros((num_locations, size), dtype, device)
        self.weights = weights
        self._fuse = fuse
        self._inputs: torch.Tensor | None = None

    @property
    def reads_output(self) -> bool:
        """Whether the model's output is needed of all tokens."""
        return OUTPUT in self.taps

    def note(self, layer: int, hidden: torch.Tensor, locations: torch.Tensor) -> None:
        """Copy the input [tokens, hidden size] of a tapped layer. With the last of these layers, fuse and store them."""
        width = hidden.shape[1]
        if layer == min(self.taps):
            self._inputs = hidden.new_empty((len(hidden), len(self.taps) * width))
        assert self._inputs is not None, "layers run in order"
        for place, tap in enumerate(self.taps):
            if tap == layer:
                self._inputs[:, place * width : (place + 1) * width].copy_(hidden)
        if layer == max(self.taps):
            self.memory.index_copy_(0, locations, self._fuse(self._inputs))
            self._inputs = None

    @contextmanager
    def of_shortened(self, num_layers: int) -> Iterator[None]:
        """Inside, only this many of the model's layers run: the input of the last one serves for those of layers that do not."""
        taps = self.taps
        self.taps = taps_within(taps, num_layers)
        try:
            yield
        finally:
            self.taps = taps

    def note_output(self, hidden: torch.Tensor, locations: torch.Tensor) -> None:
        """Store the model's output [tokens, hidden size], if it is tapped."""
        if self.reads_output:
            self.note(OUTPUT, hidden, locations)


class MHATokenToKVPool:
    """Keys and values of all layers by flat location: the pages of the layer's group, followed by the dummy page.

    In float8_e4m3fn they are stored divided by their layer's `k_scales` and `v_scales`; with other dtypes the scales are 1.
    """

    features: FeaturePool | None = None
    """Where hidden states go that something else reads."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        heads: Sequence[KVHeads],
        dtype: torch.dtype,
        device: torch.device,
        scales: tuple[list[float], list[float]] | None = None,
        groups: Sequence[int] | None = None,
        window_pages: Sequence[int] = (),
    ) -> None:
        """`heads` and `groups` have an entry for each layer; the default is one group. `num_pages` are those of the first group.

        A layer without heads has no memory here: another stage of a pipeline runs it.
        """
        self.num_pages = num_pages
        self.group_of = [0] * len(heads) if groups is None else list(groups)  # by layer
        self.num_heads = max(
            (one.num_heads for one in heads), default=0
        )  # of the layers that have memory here, which are alike
        self.page_size = page_size
        self.dtype = dtype
        self.k_scales, self.v_scales = scales or ([1.0] * len(heads), [1.0] * len(heads))
        locations = [(count + 1) * page_size for count in (num_pages, *window_pages)]
        sizes = [locations[group] for group in self.group_of]
        # Initialised to zero, because a masked score still multiplies the value at its location.
        self.k_buffer = [_zeros((size, *one), dtype, device) for size, one in zip(sizes, heads, strict=True)]
        self.v_buffer = self._allocate_values()

    def _allocate_values(self) -> list[torch.Tensor]:
        return [_zeros(tuple(keys.shape), keys.dtype, keys.device) for keys in self.k_buffer]

    @staticmethod
    def bytes_per_token(heads: Sequence[KVHeads], dtype: torch.dtype) -> int:
        """Return the bytes of one token's keys and values in all layers."""
        return sum(2 * one.num_heads * one.head_dim * dtype.itemsize for one in heads)

    @property
    def nbytes(self) -> int:
        """The bytes that all layers take."""
        return sum(memory.nbytes for memory in (*self.k_buffer, *self.v_buffer))

    def set_kv(self, layer_id: int, locations: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store row i of k and v ([tokens, kv_heads, head_dim]) at `locations[i]`, converted to the pool's dtype."""
        _store(self.k_buffer[layer_id], locations, k, self.k_scales[layer_id])
        _store(self.v_buffer[layer_id], locations, v, self.v_scales[layer_id])

    def restore(
        self, layer_id: int, keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Convert keys and values read from the layer's memory to `dtype`, with their scales applied."""
        k_scale, v_scale = self.k_scales[layer_id], self.v_scales[layer_id]
        return (keys.float() * k_scale).to(dtype), (values.float() * v_scale).to(dtype)

    def get_kv(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's whole memory: two tensors [locations, kv_heads, head_dim]."""
        return self.k_buffer[layer_id], self.v_buffer[layer_id]


class MLATokenToKVPool(MHATokenToKVPool):
    """Latents of all layers by flat location, as keys of one head. The values are a view of them: their first `latent_rank` elements."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        latent_dims: Sequence[int],
        latent_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`latent_dims` has the size of a latent for each layer."""
        self._latent_rank = latent_rank
        super().__init__(num_pages, page_size, [KVHeads(1, size) for size in latent_dims], dtype, device)

    def _allocate_values(self) -> list[torch.Tensor]:
        return [latents[..., : self._latent_rank] for latents in self.k_buffer]

    @staticmethod
    def bytes_per_token(heads: Sequence[KVHeads], dtype: torch.dtype) -> int:
        """Return the bytes of one token's latents in all layers."""
        return sum(one.num_heads * one.head_dim * dtype.itemsize for one in heads)

    @property
    def nbytes(self) -> int:
        return sum(latents.nbytes for latents in self.k_buffer)

    def set_kv(self, layer_id: int, locations: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store the latents k ([tokens, 1, latent_dim]) at their locations. v is a part of them."""
        self.k_buffer[layer_id].index_copy_(0, locations, k.to(self.dtype))


def _store(buffer: torch.Tensor, locations: torch.Tensor, rows: torch.Tensor, scale: float) -> None:
    if buffer.dtype == torch.float8_e4m3fn:
        # Stored as bytes, because not every device can index this dtype. Values out of range are clamped.
        stored = (rows.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(buffer.dtype)
        buffer.view(torch.uint8).index_copy_(0, locations, stored.view(torch.uint8))
    else:
        buffer.index_copy_(0, locations, rows.to(buffer.dtype))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros. On a CPU the kernel creates the pages at first use, because writing gigabytes at the start takes seconds."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
