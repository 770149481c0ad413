"""Draft with a head on a CPU in one call of compiled code: all drafts of a step. See `decode_step.cpp`.

For rows without filters, penalties, biases and logprobs. Entries, and how tokens are counted, are as in `model_executor/head_steps.py`.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import Structure, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from srt.kernels.build.cpu_library import load_library
from srt.kernels.cpu.decode_step import DTYPES, KINDS, LANES, CpuHeads, CpuLayer, CpuModel, address_of, matrix_of
from srt.kernels.cpu.sequence_steps import MOST_TOKENS, DraftRows, Ints, PageGroup, Sequences, address

if TYPE_CHECKING:
    from srt.layers.linear import LinearLayer
    from srt.mem_cache.memory_pool import FeaturePool, MHATokenToKVPool, ReqToTokenPool
    from srt.models.eagle3 import Eagle3Head
    from srt.utils.eagle3_config import Eagle3Config


class _HeadTables(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("features", "locations")),
        ("stride", c_int64),
        *((name, c_void_p) for name in ("known", "logits")),
    )


class CpuHeadStep:
    """The compiled drafts of one head. Reads all tensors in place: they must not move while this object lives."""

    def __init__(
        self,
        head: Eagle3Head,
        config: Eagle3Config,
        pool: MHATokenToKVPool,
        features: FeaturePool,
        locations: Tensor,
        tables: ReqToTokenPool,
    ) -> None:
        """`tables` are those of the head, and `locations` [slots, tokens] say where each token of a slot lies."""
        library = load_library()
        assert library is not None, "`can_draft` asks for it"
        self._library, self._kept = library, list[Tensor]()
        layer, spec, (keys, values) = head.midlayer, config.layer.layers[0].self_attention, pool.get_kv(0)
        attention = layer.self_attn
        q_norm, k_norm = attention.q_norm, attention.k_norm
        self._layer = CpuLayer(
            input_norm=self._floats(layer.hidden_norm.weight),
            post_norm=self._floats(layer.post_attention_layernorm.weight),
            q_norm=None if q_norm is None else self._floats(q_norm.weight),
            k_norm=None if k_norm is None else self._floats(k_norm.weight),
            qkv=self._product_of(attention.qkv_proj),
            o=self._product_of(attention.o_proj),
            gate_up=self._product_of(layer.mlp.gate_up_proj),
            down=self._product_of(layer.mlp.down_proj),
            keys=address_of(keys),
            values=address_of(values),
        )
        known, output, vocab_size = head.known_tokens, head.output_layer, config.target_vocab_size
        self._model = CpuModel(
            layers=ctypes.pointer(self._layer),
            num_layers=1,
            embedding=address_of(head.embedding),
            final_norm=self._floats(head.norm.weight),
            frequencies=self._floats(head.rotary_emb.frequencies),
            head=matrix_of(output.weight, None),
            heads=CpuHeads(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale),
            hidden_size=config.layer.hidden_size,
            page_size=1,
            eps=config.layer.norm.eps,
            angle_factor=head.rotary_emb.attention_factor,
            kind=KINDS[pool.dtype],
            embedding_norm=self._floats(layer.input_layernorm.weight),
            begins_normed=config.norm_before_residual,
            ends_normed=config.norm_output,
        )
        logits = torch.empty((MOST_TOKENS, output.weight.shape[0]), dtype=pool.dtype)
        whole = torch.full((MOST_TOKENS, vocab_size), float("-inf"), dtype=pool.dtype)
        self._kept += [known, logits, whole, locations]
        self._group = PageGroup(tables.page_table.data_ptr(), tables.page_table.stride(0))
        self._sequences = Sequences(
            tables.token_table.data_ptr(),
            tables.token_table.stride(0),
            ctypes.pointer(self._group),
            1,
            1,
            tables.draws.temperatures.data_ptr(),
            tables.draws.seeds.data_ptr(),
            vocab_size,
            logits.data_ptr(),
            None,
        )
        self._tables = _HeadTables(
            address_of(features.memory), address_of(locations), locations.stride(0), address_of(known), whole.data_ptr()
        )
        self._runner = library.srt_new_runner(ctypes.byref(self._model), torch.get_num_threads())
        weakref.finalize(self, library.srt_delete_runner, self._runner)

    def draft(self, slots: Ints, starts: Ints, lengths: Ints, counts: Ints) -> None:
        """Draw `counts[i]` ids behind position `lengths[i]` of each slot, whose entries from `starts[i]` on are computed first."""
        num_tokens = int((lengths - starts).sum()) + len(slots)
        assert num_tokens <= MOST_TOKENS, f"{num_tokens} tokens in a step for {MOST_TOKENS}"
        entries = starts - 1, lengths - 1
        rows = DraftRows(len(slots), *(address(array) for array in (slots, *entries, counts)))
        self._library.srt_draft_with_head(
            self._runner, ctypes.byref(self._sequences), ctypes.byref(rows), ctypes.byref(self._tables)
        )

    def _product_of(self, linear: LinearLayer) -> Structure:
        matrix = linear.affine.matrix
        assert matrix is not None, "heads have plain weights"
        return matrix_of(matrix, None if linear.bias is None else self._floats(linear.bias))

    def _floats(self, values: Tensor) -> int:
        kept = values.float().contiguous()
        self._kept.append(kept)
        return address_of(kept)


def can_draft(head: Eagle3Head, config: Eagle3Config, dtype: torch.dtype) -> bool:
    """Return whether the compiled code is there and computes what this head does, for one rank."""
    layer, (spec,) = config.layer, config.layer.layers
    widths = layer.hidden_size, *spec.feed_forward.split_sizes
    return (
        load_library() is not None
        and dtype in DTYPES
        and head.embedding.shape[0] == config.target_vocab_size
        and all(width % LANES == 0 for width in widths)
        and spec.attention.head_dim % (2 * LANES) == 0
        and 2 * head.rotary_emb.frequencies.numel() == spec.attention.head_dim
    )
