"""Requests that grow step by step, and what attention must give them: dense, in float64, without a page."""

from __future__ import annotations

import numpy as np
import torch

from srt.layers.attention.attention_spec import AttentionSpec
from srt.layers.attention.base import AttentionBackend
from srt.layers.attention.radix_attention import AttentionSinks, RadixAttention
from srt.mem_cache.memory_pool import KVHeads, MHATokenToKVPool, ReqToTokenPool
from srt.model_executor.forward_batch_info import ForwardBatch, HostRows, RowArrays
from srt.model_executor.step.step_planner import row_arrays

MAX_TOKENS = 200
NUM_SLOTS = 8


def spec_of(
    group: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    window: int | None = None,
    fp8: bool = False,
    softcap: float | None = None,
    has_sinks: bool = False,
) -> AttentionSpec:
    """Of two KV heads."""
    kv_dtype = torch.float8_e4m3fn if fp8 else dtype
    return AttentionSpec(
        2 * group, 2, head_dim, head_dim**-0.5, dtype, kv_dtype, page_size, MAX_TOKENS, (window,), softcap, has_sinks
    )


class AttentionWorld:
    """Steps a backend and compares every token's output with the dense answer.

    Memory starts as NaN, so that whoever reads a place never written is found out; pages come in no order.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device = torch.device("cpu"),  # noqa: B008  immutable
        window: int | None = None,
        kv_dtype: torch.dtype | None = None,
        softcap: float | None = None,
        has_sinks: bool = False,
    ) -> None:
        num_pages = NUM_SLOTS * -(-MAX_TOKENS // page_size)
        self._backend = backend
        self._dtype = dtype
        self._device = device
        sinks = AttentionSinks(num_heads, 0, num_heads) if has_sinks else None
        if sinks is not None:  # about as large as the largest of the scores, and different for each head
            sinks.values.copy_(torch.linspace(-2, 4, num_heads))
            sinks.to(device, dtype)
        self._layer = RadixAttention(num_heads, head_dim, num_kv_heads, 1, head_dim**-0.5, window, softcap, sinks)
        self._tables = ReqToTokenPool(NUM_SLOTS, MAX_TOKENS, num_pages, page_size, device)
        scales = ([1.0, 0.02], [1.0, 0.01]) if kv_dtype is torch.float8_e4m3fn else None
        self._memory = MHATokenToKVPool(
            num_pages, page_size, [KVHeads(num_kv_heads, head_dim)] * 2, kv_dtype or dtype, device, scales
        )
        for buffer in (*self._memory.k_buffer, *self._memory.v_buffer):
            buffer.copy_(torch.full((), float("nan")))
        self._random = torch.Generator().manual_seed(0)
        self._free_pages = torch.randperm(num_pages, generator=self._random).tolist()
        self._dense: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # slot -> all its k and v

    def step(self, extends: list[tuple[int, int]], decodes: list[int]) -> float:
        """Run rows of (slot, new tokens), then decoding slots; the largest error of any output."""
        rows = [*extends, *((slot, 1) for slot in decodes)]
        batch = self.make_batch(rows, len(extends))
        fused = self.make_qkv(rows)
        self._backend.init_forward_metadata(batch)
        return self.error_of(rows, fused, self.attend(fused, batch))

    def make_qkv(self, rows: list[tuple[int, int]]) -> torch.Tensor:
        """As models give them: one fused projection."""
        layer = self._layer
        width = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
        return self._randn(sum(count for _, count in rows), width).to(self._device)

    def attend(self, fused: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        out: torch.Tensor = self._layer(*self._split(fused), batch)
        return out

    def error_of(self, rows: list[tuple[int, int]], fused: torch.Tensor, out: torch.Tensor) -> float:
        q, k, v = self._split(fused)
        assert out.shape == q.shape
        assert out.dtype == self._dtype
        return max(
            self._error_of_row(slot, *(t[first : first + count].cpu() for t in (q, k, v, out)))
            for (slot, count), first in zip(rows, _starts(rows), strict=True)
        )

    def _split(self, fused: torch.Tensor) -> tuple[torch.Tensor, ...]:
        heads, kv_heads, head_dim = self._layer.num_heads, self._layer.num_kv_heads, self._layer.head_dim
        return tuple(fused.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=1))

    def _error_of_row(self, slot: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> float:
        layer = self._layer
        k, v = (t.view(-1, layer.num_kv_heads, layer.head_dim).double() for t in (k, v))
        if slot in self._dense:
            k, v = torch.cat((self._dense[slot][0], k)), torch.cat((self._dense[slot][1], v))
        self._dense[slot] = (k, v)
        group = layer.num_heads // layer.num_kv_heads
        queries = q.view(-1, layer.num_heads, layer.head_dim).double()
        scores = torch.einsum("thd,shd->hts", queries, k.repeat_interleave(group, 1)) * layer.scale
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        num_queries, length = queries.shape[0], k.shape[0]
        seen = torch.ones(num_queries, length, dtype=torch.bool).tril(length - num_queries)
        if layer.window is not None:
            seen = seen.triu(length - num_queries - layer.window + 1)
        scores = scores.masked_fill(~seen, float("-inf"))
        if layer.sinks is not None:
            scores = torch.cat((scores, layer.sinks.double().cpu().view(-1, 1, 1).expand(-1, num_queries, 1)), dim=-1)
        weights = scores.softmax(-1)[..., :length]
        expected = torch.einsum("hts,shd->thd", weights, v.repeat_interleave(group, 1))
        error = (out.double() - expected.reshape(out.shape)).abs().max().item()
        return error if error == error else float("inf")

    def make_batch(self, rows: list[tuple[int, int]], num_extends: int) -> ForwardBatch:
        page_size = self._tables.page_size
        prefixes = [int(self._tables.seq_lens[slot]) for slot, _ in rows]
        for (slot, count), prefix in zip(rows, prefixes, strict=True):
            for position in range(prefix, prefix + count):
                if position % page_size == 0:
                    self._tables.page_table[slot, position // page_size] = self._free_pages.pop()
        row_slots = np.array([slot for slot, _ in rows])
        counts = np.array([count for _, count in rows[:num_extends]], dtype=np.int64)
        extend_prefixes = np.array(prefixes[:num_extends], dtype=np.int64)
        seq_lens = np.array([prefix + count for (_, count), prefix in zip(rows, prefixes, strict=True)])
        host = HostRows(row_slots, seq_lens, extend_prefixes, counts, np.zeros(0, np.int64))
        arrays = row_arrays(host)
        on_device = (torch.from_numpy(getattr(arrays, name)).to(self._device) for name in RowArrays.__match_args__)
        return ForwardBatch.init_new(host, RowArrays(*on_device), self._tables, self._memory, self._backend)

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._random).to(self._dtype)


def _starts(rows: list[tuple[int, int]]) -> list[int]:
    counts = [count for _, count in rows]
    return [sum(counts[:index]) for index in range(len(counts))]
