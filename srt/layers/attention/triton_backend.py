"""Attention through our own kernels, nearly all in Triton. Importing this module imports Triton: call `require_triton` first.

On a CPU the kernels run in Triton's interpreter, which is for tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from srt.kernels.attention.decode_attention import (
    PROGRAMS_PER_PROCESSOR,
    DecodeScratch,
    DecodeTiles,
    decode_attention,
    most_splits,
)
from srt.kernels.attention.even_attention import (
    MOST_ROWS,
    EvenShares,
    can_be_even,
    even_attention,
    find_shares,
    is_worth_it,
    shares_at_once,
)
from srt.kernels.attention.extend_attention import ExtendTiles, extend_any_rows, extend_attention
from srt.kernels.attention.fused_decode import can_fuse_decode, fused_decode
from srt.kernels.attention.paged_kv import PagedKV
from srt.kernels.attention.shared_prefix import SharedPrefix, can_share, find_shared, shared_attention
from srt.kernels.attention.stream_attention import LEAST_ROWS, can_stream, is_streamed, shares_of, stream_attention
from srt.kernels.attention.wide_decode import is_wide, wide_decode, wide_splits
from srt.kernels.attention.write_kv import write_kv
from srt.kernels.build.pdl import EARLY, has_pdl, pdl_for
from srt.kernels.build.shared_memory import shared_bytes
from srt.kernels.build.triton_support import require_triton
from srt.layers.attention.attention_spec import AttentionLayer, AttentionSpec
from srt.layers.attention.base import (
    LEAST_SAVED,
    AnyRows,
    AttentionBackend,
    DecodeGraphs,
    DecodeReadings,
    DraftReadings,
    PromptGraphs,
    Reading,
    TokenRows,
)

if TYPE_CHECKING:
    from srt.mem_cache.memory_pool import ReqToTokenPool
    from srt.model_executor.forward_batch_info import ForwardBatch, PackedDecodes

MOST_CAPTURED_DIM: Final = 128  # head size up to which Triton's kernel for prompts is fast enough for captured steps
MOST_FUSED_ROWS: Final = 1  # with more rows the fused kernel saves nothing (measured for 0.6B and 8B on an H200)
INTERPRETER_PROCESSORS: Final = 2  # used on a CPU in place of the device's number of multiprocessors


class TritonAttentionBackend(AttentionBackend):
    """Supports any page size and grouping of heads, heads up to 256, float32, float16 and bfloat16, also over an fp8 KV memory.

    The plan of a decode step does not depend on lengths, so a captured step serves every step of its size.
    """

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        require_triton(device.type)
        self._group, self._num_kv_heads = spec.num_heads // spec.num_kv_heads, spec.num_kv_heads
        self._head_dim = spec.head_dim
        self._max_graph_rows = 0
        self._shared_memory: SharedPrefix | None = None
        self._shared: SharedPrefix | None = None  # for the current step
        self._even_memory: dict[int | None, EvenShares] = {}  # by window
        self._even: dict[int | None, EvenShares] = {}  # for the current step; empty: it reads in another way
        self._drafts: tuple[TokenRows, int] | None = None  # for the current step
        self._reads_by_row = False  # whether no row of the current step reads keys that the step stores for another
        if device.type == "cuda":
            self._num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        else:
            self._num_processors = INTERPRETER_PROCESSORS
        self._pdl = has_pdl(device)
        self._shared_bytes = shared_bytes(device)
        self._readings = {Reading.BY_ROW}
        is_plain = spec.softcap is None and not spec.has_sinks
        sees_all = is_plain and None in spec.windows
        if sees_all and can_share(spec.dtype, spec.head_dim, self._group):
            self._readings.add(Reading.SHARED)
        # Only facts that are equal on all ranks may decide which graphs exist. Whether the compiler succeeds is not such a fact.
        heads = self._group, self._num_kv_heads
        has_stream = is_plain and is_streamed(device, spec.dtype, spec.kv_dtype, spec.head_dim, *heads, spec.page_size)
        self._streams = has_stream and can_stream(device, spec.kv_dtype, spec.head_dim, self._group, spec.page_size)
        self._is_wide = is_plain and is_wide(
            device, spec.dtype, spec.kv_dtype, spec.head_dim, self._group, spec.page_size
        )
        shape = spec.dtype, spec.head_dim, self._num_kv_heads, self._num_processors, self._shared_bytes
        if sees_all and not has_stream and can_be_even(*shape):  # with the streaming kernel, BY_ROW is even already
            self._readings.add(Reading.EVEN)
        # Captured prompts have room for many decodes. If there are few, other kernels would give each to one program.
        self._even_windows = spec.windows if self._streams else (None,)
        captures = sees_all and self._streams and spec.head_dim <= MOST_CAPTURED_DIM
        self._captures_prompts = captures or Reading.EVEN in self._readings
        self._max_extend_len = 0
        self._max_context = 0
        self._scratch: DecodeScratch | None = None

    @property
    def decode_graphs(self) -> DecodeGraphs:
        return self

    @property
    def decode_readings(self) -> DecodeReadings:
        return self

    @property
    def packed_decodes(self) -> PackedDecodes | None:
        return self

    @property
    def draft_readings(self) -> DraftReadings:
        return self

    def begin_drafts(self, rows: TokenRows, most_tokens: int) -> None:
        self._drafts = rows, most_tokens

    @property
    def prompt_graphs(self) -> PromptGraphs | None:
        return self if self._captures_prompts else None

    def plan_extend(self, batch: ForwardBatch) -> None:
        self._max_extend_len = int(batch.extend_seq_lens_cpu.max())

    def _begin_step(self, reads_by_row: bool = False) -> None:
        """Forget how the step before read its keys and values."""
        self._shared, self._even, self._drafts = None, {}, None
        self._reads_by_row = reads_by_row

    def plan_decode(self, batch: ForwardBatch) -> None:
        self._max_context = batch.req_to_token_pool.max_pages * batch.req_to_token_pool.page_size
        self._begin_step()
        if batch.num_extend_rows and self._can_stream(batch.num_decode_rows):
            self._find_shares(batch.seq_lens[batch.num_extend_rows :], batch)

    def can_read(self, reading: Reading, num_rows: int) -> bool:
        if reading is Reading.EVEN and not is_worth_it(num_rows, self._num_kv_heads, self._num_processors):
            return False
        return reading in self._readings

    def begin_decodes(self, batch: ForwardBatch, reading: Reading) -> None:
        self._begin_step(reads_by_row=reading is Reading.BY_ROW)
        if reading is Reading.EVEN or (reading is Reading.BY_ROW and self._can_stream(batch.num_decode_rows)):
            self._find_shares(batch.seq_lens, batch)
        if reading is not Reading.SHARED:
            return
        pool = batch.req_to_token_pool
        memory = self._shared_memory or self._allocate_shared_memory(pool)
        self._shared = memory.of(batch.batch_size, self._group, self._num_kv_heads, self._num_processors)
        find_shared(
            batch.req_pool_indices,
            batch.seq_lens,
            pool.page_table,
            pool.page_size,
            self._group,
            LEAST_SAVED,
            self._shared.lens,
        )

    def _can_stream(self, num_rows: int) -> bool:
        return self._streams and LEAST_ROWS <= num_rows <= MOST_ROWS

    def _find_shares(self, seq_lens: torch.Tensor, batch: ForwardBatch) -> None:
        self._even = self._even_memory or self._allocate_even_memory(batch.req_to_token_pool)
        for window, shares in self._even.items():
            find_shares(seq_lens, shares, window)

    def begin_any(self, rows: AnyRows, batch: ForwardBatch) -> None:
        self._max_context = batch.req_to_token_pool.max_pages * batch.req_to_token_pool.page_size
        self._begin_step()
        if self._can_stream(len(rows.decode_lens)) or Reading.EVEN in self._readings:
            self._find_shares(rows.decode_lens, batch)

    def attend_any(
        self, q: torch.Tensor, rows: AnyRows, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor
    ) -> None:
        kv, heads = _paged_kv(layer, batch), (-1, layer.num_heads, layer.head_dim)
        queries, attended = q.view(heads), out.view(heads)
        # Decodes come first, because they may write zeros for missing rows where tokens of prompts are.
        decodes = slice(len(queries) - len(rows.decode_slots), None)
        self._decode(
            queries[decodes], kv, rows.decode_slots, rows.decode_lens, layer, attended[decodes], may_be_none=True
        )
        extend_any_rows(
            queries,
            kv,
            rows.extend_slots,
            rows.extend_prefix_lens,
            rows.extend_lens,
            layer.scale,
            attended,
            self._extend_tiles(len(queries), layer, q.dtype),
            layer.window,
            layer.softcap,
            layer.sinks,
        )

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        extend_attention(
            q,
            _paged_kv(layer, batch),
            batch.req_pool_indices[: batch.num_extend_rows],
            batch.extend_prefix_lens,
            batch.extend_seq_lens,
            batch.extend_start_loc,
            self._max_extend_len,
            layer.scale,
            out,
            self._extend_tiles(self._max_extend_len, layer, q.dtype),
            layer.window,
            layer.softcap,
            layer.sinks,
        )

    def _extend_tiles(self, most_tokens: int, layer: AttentionLayer, dtype: torch.dtype) -> ExtendTiles:
        pairs = most_tokens * layer.num_heads // layer.num_kv_heads
        return ExtendTiles.choose(dtype, layer.head_dim, pairs, self._shared_bytes)

    def forward_decode(self, q: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor) -> None:
        slots, lens = batch.req_pool_indices[batch.num_extend_rows :], batch.seq_lens[batch.num_extend_rows :]
        self._decode(q, _paged_kv(layer, batch), slots, lens, layer, out)

    def _decode(
        self,
        q: torch.Tensor,
        kv: PagedKV,
        slots: torch.Tensor,
        lens: torch.Tensor,
        layer: AttentionLayer,
        out: torch.Tensor,
        may_be_none: bool = False,
    ) -> None:
        """Attend with one query per row. With `may_be_none`, all lengths may be 0."""
        if self._drafts is not None:
            self._attend_drafts(q, kv, *self._drafts, layer, out)
            return
        shares = self._even.get(layer.window)
        if shares is not None and self._streams:
            stream_attention(q, kv, slots, lens, layer.scale, out, shares, layer.window)
            return
        if shares is not None:
            pdl = (
                pdl_for(len(q)) if self._pdl and not may_be_none else 0
            )  # without rows no program would wait for its inputs
            even_attention(q, kv, slots, lens, layer.scale, out, shares, pdl)
            return
        num_programs = len(q) * layer.num_kv_heads
        tiles = DecodeTiles.choose(
            q.dtype,
            layer.head_dim,
            num_programs,
            self._max_context,
            self._num_processors,
            self._shared_bytes,
        )
        shared = self._shared if layer.window is None else None
        if shared is not None:
            shared_attention(q, kv, slots, layer.scale, shared, self._pdl)
        pdl = pdl_for(len(q)) if self._pdl and shared is None else 0
        decode_attention(
            q,
            kv,
            slots,
            lens,
            layer.scale,
            out,
            tiles,
            self._scratch or self._allocate_scratch(layer, q.device),
            layer.window,
            pdl,
            shared,
            softcap=layer.softcap,
            sinks=layer.sinks,
            starts_early=pdl == EARLY or tiles.fill(num_programs, self._num_processors),
        )

    def _attend_drafts(
        self,
        q: torch.Tensor,
        kv: PagedKV,
        rows: TokenRows,
        most_tokens: int,
        layer: AttentionLayer,
        out: torch.Tensor,
    ) -> None:
        tiles = self._extend_tiles(most_tokens, layer, q.dtype)
        chunks = rows.slots, rows.prefix_lens, rows.lens, rows.firsts
        extend_attention(q, kv, *chunks, most_tokens, layer.scale, out, tiles, layer.window, layer.softcap, layer.sinks)

    def decode_packed(
        self,
        qkv: torch.Tensor,
        norm_weights: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        is_plus_one: bool = False,
    ) -> torch.Tensor | None:
        kv, num_rows = _paged_kv(layer, batch), len(qkv)
        if num_rows > MOST_FUSED_ROWS and not self._reads_by_row:
            return None
        if self._is_wide:
            attend = wide_decode
            num_splits = wide_splits(layer.head_dim, self._group, num_rows, layer.num_kv_heads, self._num_processors)
        elif num_rows > MOST_FUSED_ROWS or is_plus_one or not can_fuse_decode(kv, qkv.dtype):
            return None  # 1 + weight was not measured
        else:
            attend = fused_decode
            num_splits = most_splits(num_rows * layer.num_kv_heads, self._max_context, self._num_processors)
        if not num_splits:
            return None
        return attend(
            qkv,
            norm_weights,
            eps,
            cos,
            sin,
            batch.locations_of(layer.layer_id),
            kv,
            batch.req_pool_indices,
            batch.seq_lens,
            layer.scale,
            num_splits,
            self._scratch or self._allocate_scratch(layer, qkv.device),
            layer.window,
            self._pdl,
            is_plus_one,
        )

    def _allocate_scratch(self, layer: AttentionLayer, device: torch.device) -> DecodeScratch:
        """Allocate scratch memory for every batch: rows are split into at most as many programs as run at once."""
        programs = PROGRAMS_PER_PROCESSOR * self._num_processors
        group = layer.num_heads // layer.num_kv_heads
        self._scratch = DecodeScratch.allocate(programs, group, 1, 1, layer.head_dim, device)
        return self._scratch

    def _allocate_shared_memory(self, pool: ReqToTokenPool) -> SharedPrefix:
        """Allocate the memory once, large enough for every batch, because graphs keep its addresses."""
        rows, kv_heads = max(pool.num_slots, self._max_graph_rows), self._num_kv_heads
        self._shared_memory = SharedPrefix.allocate(
            rows, self._group * kv_heads, kv_heads, self._head_dim, self._num_processors, pool.page_table.device
        )
        return self._shared_memory

    def _allocate_even_memory(self, pool: ReqToTokenPool) -> dict[int | None, EvenShares]:
        """Allocate the memory once, large enough for every batch, because graphs keep its addresses."""
        rows, kv_heads = max(pool.num_slots, self._max_graph_rows), self._num_kv_heads
        shares = (shares_of if self._streams else shares_at_once)(kv_heads, self._num_processors)
        first, *others = self._even_windows
        memory = EvenShares.allocate(
            rows, self._group * kv_heads, kv_heads, self._head_dim, shares, pool.page_table.device
        )
        self._even_memory = {first: memory, **{window: memory.beside() for window in others}}
        return self._even_memory

    def init_cuda_graph_state(self, max_bs: int) -> None:
        self._max_graph_rows = max_bs

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> None:
        self.plan_decode(batch)

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> None:
        locations = batch.locations_of(layer.layer_id)
        write_kv(layer.split_kv_heads(k), layer.split_kv_heads(v), locations, _paged_kv(layer, batch))


def _paged_kv(layer: AttentionLayer, batch: ForwardBatch) -> PagedKV:
    pool, tables = batch.token_to_kv_pool, batch.req_to_token_pool
    return PagedKV(
        *pool.get_kv(layer.layer_id),
        batch.page_table_of(layer.layer_id),
        tables.page_size,
        pool.k_scales[layer.layer_id],
        pool.v_scales[layer.layer_id],
    )
