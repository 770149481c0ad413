"""The slow, obvious versions of the attention kernels, in plain PyTorch: what the kernels are tested against.

One request at a time, one gather, one softmax in float32. Nothing here imports Triton.
"""

from __future__ import annotations

import torch

from srt.kernels.paged_kv import PagedKV


def write_kv_reference(
    k: torch.Tensor, v: torch.Tensor, locations: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor
) -> None:
    """Row t of k and v ([tokens, kv_heads, head_dim]) goes to flat location `locations[t]`."""
    for row, location in enumerate(locations.tolist()):
        k_buffer[location] = k[row].to(k_buffer.dtype)
        v_buffer[location] = v[row].to(v_buffer.dtype)


def decode_attention_reference(
    q: torch.Tensor, kv: PagedKV, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, scale: float
) -> torch.Tensor:
    """One query per row, over that row's first `seq_lens` positions; zeros for a row of length 0."""
    out = torch.zeros_like(q)
    for row, (slot, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        if length > 0:
            keys, values = _gather(kv, slot, length, q.shape[1])
            out[row] = _attend(q[row : row + 1], keys, values, first_position=length - 1, scale=scale)[0]
    return out


def extend_attention_reference(
    q: torch.Tensor,
    kv: PagedKV,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    start_locs: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Row r's queries are ``q[start_locs[r] :][: extend_lens[r]]``, at positions from `prefix_lens[r]` on.

    Causal; keys and values of prefix and chunk alike come from the paged memory. Tokens of no row are zeros.
    """
    out = torch.zeros_like(q)
    rows = zip(*(t.tolist() for t in (req_pool_indices, prefix_lens, extend_lens, start_locs)), strict=True)
    for slot, prefix, length, start in rows:
        if length > 0:
            keys, values = _gather(kv, slot, prefix + length, q.shape[1])
            out[start : start + length] = _attend(q[start : start + length], keys, values, prefix, scale)
    return out


def _gather(kv: PagedKV, slot: int, length: int, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The slot's first `length` keys and values, [length, heads, head_dim] float32, one copy per query head."""
    positions = torch.arange(length, device=kv.page_table.device)
    pages = kv.page_table[slot, positions // kv.page_size].long()
    locations = pages * kv.page_size + positions % kv.page_size
    group = num_heads // kv.num_kv_heads
    keys = kv.k_buffer[locations].float().repeat_interleave(group, dim=1)
    values = kv.v_buffer[locations].float().repeat_interleave(group, dim=1)
    return keys, values


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first_position: int, scale: float
) -> torch.Tensor:
    """Causal attention of q ([tokens, heads, head_dim], at `first_position` and on) over keys from position 0 on."""
    scores = torch.einsum("thd,shd->hts", q.float(), keys) * scale
    query_positions = first_position + torch.arange(q.shape[0], device=q.device)
    key_positions = torch.arange(keys.shape[0], device=q.device)
    scores.masked_fill_(key_positions[None, None, :] > query_positions[None, :, None], float("-inf"))
    return torch.einsum("hts,shd->thd", torch.softmax(scores, dim=-1), values).to(q.dtype)
