"""The slow, obvious versions of the attention kernels, in plain PyTorch: what the kernels are tested against.

One request at a time, one gather, one softmax in float32. Nothing here imports Triton.
"""

from __future__ import annotations

import torch

from srt.kernels.attention.paged_kv import PagedKV


def write_kv_reference(k: torch.Tensor, v: torch.Tensor, locations: torch.Tensor, kv: PagedKV) -> None:
    """Row t of k and v ([tokens, kv_heads, head_dim]) goes to flat location `locations[t]`; as fp8 divided by the scales."""
    for buffer, rows, scale in ((kv.k_buffer, k, kv.k_scale), (kv.v_buffer, v, kv.v_scale)):
        if buffer.dtype == torch.float8_e4m3fn:
            rows = (rows.float() / scale).clamp(-448, 448)
        for row, location in enumerate(locations.tolist()):
            buffer[location] = rows[row].to(buffer.dtype)


def gather_pages_reference(page_table: torch.Tensor, slots: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
    """The first ``indptr[r + 1] - indptr[r]`` pages of slot `slots[r]`, row after row."""
    counts = indptr.diff().tolist()
    return torch.cat([page_table[slot, :count] for slot, count in zip(slots.tolist(), counts, strict=True)])


def decode_attention_reference(
    q: torch.Tensor,
    kv: PagedKV,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """One query per row, over that row's first `seq_lens` positions or the last `window` of them; zeros for length 0."""
    out = torch.zeros_like(q)
    for row, (slot, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        if length > 0:
            keys, values = _gather(kv, slot, length, q.shape[1])
            out[row] = _attend(q[row : row + 1], keys, values, length - 1, scale, window, softcap)[0]
    return out


def extend_attention_reference(
    q: torch.Tensor,
    kv: PagedKV,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    start_locs: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Row r's queries are ``q[start_locs[r] :][: extend_lens[r]]``, at positions from `prefix_lens[r]` on.

    Causal, or over the last `window` positions; keys and values of prefix and chunk alike come from the paged memory.
    Tokens of no row are zeros.
    """
    out = torch.zeros_like(q)
    rows = zip(*(t.tolist() for t in (req_pool_indices, prefix_lens, extend_lens, start_locs)), strict=True)
    for slot, prefix, length, start in rows:
        if length > 0:
            keys, values = _gather(kv, slot, prefix + length, q.shape[1])
            chunk = slice(start, start + length)
            out[chunk] = _attend(q[chunk], keys, values, prefix, scale, window, softcap)
    return out


def _gather(kv: PagedKV, slot: int, length: int, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The slot's first `length` keys and values, [length, heads, head_dim] float32, one copy per query head."""
    positions = torch.arange(length, device=kv.page_table.device)
    pages = kv.page_table[slot, positions // kv.page_size].long()
    locations = pages * kv.page_size + positions % kv.page_size
    group = num_heads // kv.num_kv_heads
    keys = (kv.k_buffer[locations].float() * kv.k_scale).repeat_interleave(group, dim=1)
    values = (kv.v_buffer[locations].float() * kv.v_scale).repeat_interleave(group, dim=1)
    return keys, values


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first_position: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Causal attention of q ([tokens, heads, head_dim], at `first_position` and on) over keys from position 0 on."""
    scores = torch.einsum("thd,shd->hts", q.float(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distances = first_position + torch.arange(q.shape[0])[:, None] - torch.arange(keys.shape[0])[None, :]
    hidden = distances < 0 if window is None else (distances < 0) | (distances >= window)
    scores.masked_fill_(hidden[None].to(q.device), float("-inf"))
    return torch.einsum("hts,shd->thd", torch.softmax(scores, dim=-1), values).to(q.dtype)
