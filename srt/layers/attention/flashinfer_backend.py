"""Attention through flashinfer: its prefill kernels of both generations, and its tensor-core decode.

A step is planned once, from arrays on the host. A plan writes to pinned memory that the device reads later, so plans use the entries of
a ring that is longer than the queue of steps. Importing this module imports flashinfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import numpy as np
import torch
from flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
)
from numpy.typing import NDArray

from srt.kernels.attention.gather_kv import gather_kv
from srt.kernels.attention.gather_pages import gather_pages
from srt.kernels.attention.paged_kv import PagedKV
from srt.layers.attention.attention_spec import AttentionLayer, AttentionSpec
from srt.layers.attention.base import AttentionBackend, DecodeGraphs, HostPlans

if TYPE_CHECKING:
    from srt.model_executor.forward_batch_info import ForwardBatch

T = TypeVar("T")
RING: Final = 4  # plans in flight: at most 2 steps are, and a mixed step has a plan of each kind
FA3_TILE: Final = 128
WELL_FILLED: Final = (
    0.6  # if tiles are filled less than this, other kernels, which pack the heads of a group, are faster
)
PLAN_BYTES: Final = 8 << 20
WORKSPACE_BYTES: Final = 256 << 20  # for partial results; shared by all plans, because one kernel runs at a time
MOST_GATHERED_BYTES: Final = 256 << 20
LEAST_QUERY_HEADS: Final = 4096
"""Fewest queries, by their heads, per stored position of a KV head for which copying keys and values out of their pages pays. On an H200
(Llama 3.1 8B, 32 query and 8 KV heads) chunks of 2,048 tokens gain 3 %, and those of 1,024 lose 10 %, as the host launches more."""


class FlashInferBackend(AttentionBackend):
    """Reads the keys and values of rows without a prefix from the step's own tensors, and those of all other rows through their pages.

    `kernels` is "fa2", or "fa3" for those of Hopper. With fa3, long chunks behind a prefix read a copy of keys and values in one piece
    where layers have no window, because that kernel is faster than the one over pages by more than the copy takes.

    `other` serves the prompts that these cannot serve or serve slowly: prompts with a prefix that are not copied if the KV memory has
    another type than the model, and, with fa3, short chunks, because its tiles have 128 tokens of one row (64 rows of 32 tokens after
    4,096 take 1,066 µs, with Triton's kernel 450).
    """

    def __init__(
        self, spec: AttentionSpec, device: torch.device, kernels: str, other: AttentionBackend | None = None
    ) -> None:
        self._spec = spec
        self._device = device
        self._other = other
        self._is_others = False  # whether `other` serves the step's prompts
        self._tile = FA3_TILE if kernels == "fa3" else 1
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._uploads = _Uploads(device)
        self._prefills = {
            window: _Ring([_PrefillPlans(self._workspace, kernels) for _ in range(RING)]) for window in spec.windows
        }
        self._decodes: dict[int | None, _Ring[Any]] = {}  # wrappers of eager decodes, made when first needed
        self._graph_decodes: dict[int, dict[int | None, Any]] = {}  # by the graph's rows
        self._graph_pages: dict[int | None, torch.Tensor] = {}
        self._graph_ints: dict[int | None, torch.Tensor] = {}
        self._graph_pins: _Ring[torch.Tensor] = _Ring([])
        self._active_decodes: dict[int | None, Any] = {}
        self._is_ragged = False
        self._gathered = _Gathered(spec, device) if kernels == "fa3" and None in spec.windows else None
        self._num_gathers = 0  # of the step's keys and values, for each layer without a window; 0: it reads pages

    @property
    def decode_graphs(self) -> DecodeGraphs:
        return self

    @property
    def host_plans(self) -> HostPlans:
        return self

    # ---- Prefill

    def plan_extend(self, batch: ForwardBatch) -> None:
        prefix_lens, counts = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
        self._is_ragged = not prefix_lens.any()
        self._num_gathers = 0
        if self._gathered is not None and not self._is_ragged:
            self._num_gathers = self._gathered.num_parts(prefix_lens, counts)
        self._is_others = self._other is not None and not self._suits(counts)
        if self._is_others:
            assert self._other is not None
            self._other.plan_extend(batch)
        elif self._is_ragged:
            for window, ring in self._prefills.items():
                ring.advance().plan_ragged(self._spec, window, _indptr(counts), _indptr(counts))
                ring.enqueued()
        else:
            self._plan_prefixes(batch, prefix_lens, counts)

    def _plan_prefixes(self, batch: ForwardBatch, prefix_lens: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        rows = _page_rows(prefix_lens + counts, self._spec.page_size)
        slots = batch.req_pool_indices[: batch.num_extend_rows]
        for window, ring in self._prefills.items():
            plans = ring.advance()
            if window is None and self._num_gathers:
                assert self._gathered is not None
                indptr = _indptr(prefix_lens + counts)
                self._gathered.begin(slots, self._uploads.upload(indptr), prefix_lens + counts)
                plans.plan_ragged(self._spec, window, _indptr(counts), indptr, self._num_gathers)
            else:
                pages = torch.empty(rows.total, dtype=torch.int32, device=self._device)
                self._gather(batch, slots, rows, pages, window, prefix_lens)
                plans.plan_paged(self._spec, window, _indptr(counts), rows, pages)
            ring.enqueued()

    def _suits(self, counts: NDArray[np.int64]) -> bool:
        reads_pages = not self._is_ragged and not (self._num_gathers and self._spec.windows == (None,))
        if reads_pages and self._spec.kv_dtype != self._spec.dtype:
            return False
        if self._gathered is not None and self._num_gathers and not self._gathered.is_used:
            return True
        return int(counts.sum()) >= WELL_FILLED * self._tile * int((-(-counts // self._tile)).sum())

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        if self._is_others:
            assert self._other is not None
            self._other.forward_extend(q, k, v, layer, batch, out)
            return
        plans = self._prefills[layer.window].current
        if self._is_ragged:
            plans.ragged.run(q, k, v, out=out)
        elif layer.window is None and self._num_gathers:
            assert self._gathered is not None
            self._gathered.attend(plans.ragged, q, layer, batch, out, self._num_gathers)
        else:
            plans.paged.run(q, _paged(layer, batch), out=out)

    # ---- Decode

    def plan_decode(self, batch: ForwardBatch) -> None:
        first = batch.num_extend_rows
        if not self._decodes:
            self._decodes = {window: _Ring([self._new_decode() for _ in range(RING)]) for window in self._spec.windows}
        lengths = batch.seq_lens_cpu[first:]
        rows = _page_rows(lengths, self._spec.page_size)
        self._active_decodes = {}
        for window, ring in self._decodes.items():
            pages = torch.empty(rows.total, dtype=torch.int32, device=self._device)
            self._gather(batch, batch.req_pool_indices[first:], rows, pages, window, lengths - 1)
            self._active_decodes[window] = wrapper = ring.advance()
            _plan_decode(wrapper, self._spec, window, rows, pages)
            ring.enqueued()

    def forward_decode(self, q: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor) -> None:
        wrapper = self._active_decodes[layer.window]
        pool = batch.token_to_kv_pool
        wrapper.run(
            q,
            _paged(layer, batch),
            out=out,
            k_scale=pool.k_scales[layer.layer_id],
            v_scale=pool.v_scales[layer.layer_id],
        )

    def init_cuda_graph_state(self, max_bs: int) -> None:
        most = max_bs * -(-self._spec.max_context // self._spec.page_size)
        self._graph_pages = {
            window: torch.empty(most, dtype=torch.int32, device=self._device) for window in self._spec.windows
        }
        pins = [torch.empty(PLAN_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(RING)]
        self._graph_pins = _Ring(pins)
        self._graph_ints = {
            window: torch.empty(PLAN_BYTES, dtype=torch.uint8, device=self._device) for window in self._spec.windows
        }

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> None:
        num_rows = batch.batch_size
        if num_rows not in self._graph_decodes:
            wrappers = {window: self._new_decode(num_rows, window) for window in self._spec.windows}
            for window, wrapper in wrappers.items():
                # Every replay is planned anew, so graphs of all sizes share what their plans are written to.
                wrapper._int_workspace_buffer = self._graph_ints[window]
            self._graph_decodes[num_rows] = wrappers
        self.init_forward_metadata_replay_cuda_graph(batch)

    def init_forward_metadata_replay_cuda_graph(self, batch: ForwardBatch) -> None:
        rows = _page_rows(batch.seq_lens_cpu, self._spec.page_size)
        self._active_decodes = self._graph_decodes[batch.batch_size]
        for window, wrapper in self._active_decodes.items():
            pages = self._graph_pages[window][: rows.total]
            self._gather(batch, batch.req_pool_indices, rows, pages, window, batch.seq_lens_cpu - 1)
            wrapper._pin_memory_int_workspace_buffer = self._graph_pins.advance()
            _plan_decode(wrapper, self._spec, window, rows, pages)
            self._graph_pins.enqueued()

    def _new_decode(self, graph_rows: int | None = None, window: int | None = None) -> Any:
        if graph_rows is None:
            return BatchDecodeWithPagedKVCacheWrapper(self._workspace, use_tensor_cores=True, backend="fa2")
        return BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=torch.empty(graph_rows + 1, dtype=torch.int32, device=self._device),
            paged_kv_indices_buffer=self._graph_pages[window],
            paged_kv_last_page_len_buffer=torch.empty(graph_rows, dtype=torch.int32, device=self._device),
            backend="fa2",
        )

    def _gather(
        self,
        batch: ForwardBatch,
        slots: torch.Tensor,
        rows: _PageRows,
        out: torch.Tensor,
        window: int | None,
        positions: NDArray[np.int64],
    ) -> None:
        """Concatenate the rows' pages for layers with this window. `positions` are those of the rows' first queries.

        The kernels may read pages behind the window, though what they read there does not count. Such pages may be another request's, so
        the row's first page of the window stands in for them.
        """
        tables, indptr = batch.req_to_token_pool, self._uploads.upload(rows.indptr)
        if window is None or not tables.group_of(window):
            gather_pages(tables.page_table, slots, indptr, rows.most_pages, out)
            return
        columns = np.maximum(positions - window + 1, 0) // tables.page_size
        firsts = self._uploads.upload(columns.astype(np.int32))
        table = tables.page_tables[tables.group_of(window)]
        gather_pages(table, slots, indptr, rows.most_pages, out, firsts)


@dataclass(frozen=True, slots=True)
class _PageRows:
    """Pages of rows in the form that flashinfer expects."""

    indptr: NDArray[np.int32]
    last_page_lens: NDArray[np.int32]
    most_pages: int

    @property
    def total(self) -> int:
        return int(self.indptr[-1])


def _page_rows(lengths: NDArray[np.int64], page_size: int) -> _PageRows:
    counts = -(-lengths // page_size)
    return _PageRows(_indptr(counts), (lengths - (counts - 1) * page_size).astype(np.int32), int(counts.max()))


def _indptr(counts: NDArray[np.int64]) -> NDArray[np.int32]:
    indptr = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    return indptr


class _Gathered:
    """Memory for a layer's keys and values in one piece, or those of a part of its heads at a time; all layers use it in turn."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self._group, self._num_kv_heads, self._head_dim = (
            spec.num_heads // spec.num_kv_heads,
            spec.num_kv_heads,
            spec.head_dim,
        )
        token_bytes = 2 * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize
        num_tokens = min(spec.max_context, MOST_GATHERED_BYTES // token_bytes)
        self._memory = torch.empty(2, num_tokens * spec.num_kv_heads * spec.head_dim, dtype=spec.dtype, device=device)
        self.is_used = False
        """False until the first rows with a prefix. These are copied whatever their sizes: a server starts with such rows, so the kernel is
        compiled before a client waits for it."""
        self._slots = self._indptr = torch.empty(0, device=device)  # of the current step
        self._longest = self._total = 0

    def num_parts(self, prefix_lens: NDArray[np.int64], counts: NDArray[np.int64]) -> int:
        """Return into how many parts the heads are divided for rows of these sizes; 0 if copying does not pay, or there is no room."""
        positions = int((prefix_lens + counts).sum())
        pairs = int((counts * (prefix_lens + (counts + 1) // 2)).sum())
        if self.is_used and pairs * self._group < LEAST_QUERY_HEADS * positions:
            return 0
        parts = (n for n in range(1, self._num_kv_heads + 1) if self._num_kv_heads % n == 0)
        return next((n for n in parts if positions * self._part_width(n) <= self._memory.shape[1]), 0)

    def begin(self, slots: torch.Tensor, indptr: torch.Tensor, lengths: NDArray[np.int64]) -> None:
        """Set the step's rows: their slots, and where each begins in the memory."""
        self.is_used = True
        self._slots, self._indptr, self._longest, self._total = slots, indptr, int(lengths.max()), int(lengths.sum())

    def attend(
        self, plan: Any, q: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor, num_parts: int
    ) -> None:
        """Run the plan for each part of the heads."""
        pool, tables = batch.token_to_kv_pool, batch.req_to_token_pool
        scales = pool.k_scales[layer.layer_id], pool.v_scales[layer.layer_id]
        kv = PagedKV(*pool.get_kv(layer.layer_id), batch.page_table_of(layer.layer_id), tables.page_size, *scales)
        num_heads = self._num_kv_heads // num_parts
        k, v = (
            memory[: self._total * self._part_width(num_parts)].view(self._total, num_heads, self._head_dim)
            for memory in self._memory
        )
        for first in range(0, self._num_kv_heads, num_heads):
            gather_kv(kv, first, self._slots, self._indptr, self._longest, k, v)
            heads = slice(first * self._group, (first + num_heads) * self._group)
            plan.run(q[:, heads], k, v, out=out[:, heads])

    def _part_width(self, num_parts: int) -> int:
        """Elements of a token's keys in one part."""
        return self._num_kv_heads // num_parts * self._head_dim


class _PrefillPlans:
    """Two wrappers of flashinfer, for rows without and with a prefix; a step uses one of them."""

    def __init__(self, workspace: torch.Tensor, kernels: str) -> None:
        self.ragged: Any = BatchPrefillWithRaggedKVCacheWrapper(workspace, backend=kernels)
        self.paged: Any = BatchPrefillWithPagedKVCacheWrapper(workspace, backend=kernels)

    def plan_ragged(
        self,
        spec: AttentionSpec,
        window: int | None,
        indptr: NDArray[np.int32],
        kv_indptr: NDArray[np.int32],
        num_parts: int = 1,
    ) -> None:
        """Plan runs over each of `num_parts` equal parts of the heads."""
        self.ragged.plan(
            torch.from_numpy(indptr),
            torch.from_numpy(kv_indptr),
            spec.num_heads // num_parts,
            spec.num_kv_heads // num_parts,
            spec.head_dim,
            causal=True,
            sm_scale=spec.scale,
            window_left=-1 if window is None else window - 1,
            q_data_type=spec.dtype,
        )

    def plan_paged(
        self, spec: AttentionSpec, window: int | None, indptr: NDArray[np.int32], rows: _PageRows, pages: torch.Tensor
    ) -> None:
        self.paged.plan(
            torch.from_numpy(indptr),
            torch.from_numpy(rows.indptr),
            pages,
            torch.from_numpy(rows.last_page_lens),
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.page_size,
            causal=True,
            sm_scale=spec.scale,
            window_left=-1 if window is None else window - 1,
            q_data_type=spec.dtype,
            max_token_per_sequence=int(np.diff(indptr).max()),
        )


def _plan_decode(wrapper: Any, spec: AttentionSpec, window: int | None, rows: _PageRows, pages: torch.Tensor) -> None:
    wrapper.plan(
        torch.from_numpy(rows.indptr),
        pages,
        torch.from_numpy(rows.last_page_lens),
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.page_size,
        window_left=-1 if window is None else window - 1,
        q_data_type=spec.dtype,
        kv_data_type=spec.kv_dtype,
        sm_scale=spec.scale,
    )


class _Ring(Generic[T]):
    """Members that are used in turn. Waits if the device still reads the next one, which a long enough ring avoids."""

    def __init__(self, members: Sequence[T]) -> None:
        self._members = members
        self._read = [torch.cuda.Event() for _ in members]
        self._turn = 0

    def advance(self) -> T:
        """Return the next member, which may then be written."""
        self._turn = (self._turn + 1) % len(self._members)
        self._read[self._turn].synchronize()
        return self.current

    def enqueued(self) -> None:
        """Record that everything that reads the current member is on the stream."""
        self._read[self._turn].record()

    @property
    def current(self) -> T:
        return self._members[self._turn]


class _Uploads:
    """Copies small int32 arrays to the device in stream order, through pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring = _Ring([torch.empty(1 << 16, dtype=torch.int32, pin_memory=True) for _ in range(8 * RING)])

    def upload(self, values: NDArray[np.int32]) -> torch.Tensor:
        pinned = self._ring.advance()[: len(values)]
        pinned.copy_(torch.from_numpy(values))
        uploaded = pinned.to(self._device, non_blocking=True)
        self._ring.enqueued()
        return uploaded


def _paged(layer: AttentionLayer, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the layer's memory as [pages, page_size, kv_heads, head_dim]."""
    page_size = batch.req_to_token_pool.page_size
    k_buffer, v_buffer = batch.token_to_kv_pool.get_kv(layer.layer_id)
    return k_buffer.unflatten(0, (-1, page_size)), v_buffer.unflatten(0, (-1, page_size))
