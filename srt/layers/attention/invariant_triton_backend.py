"""Attention of a deterministic server on a GPU: prompts and decodes read all keys and values from the KV memory, and add them up alike.

Importing this module imports Triton: call `require_triton` first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from srt.kernels.attention.invariant_attention import InvariantTiles, attend_chunks, attend_decodes, most_arrivals
from srt.kernels.attention.paged_kv import PagedKV
from srt.kernels.attention.write_kv import write_kv
from srt.kernels.build.triton_support import require_triton
from srt.kernels.gemm.invariant_gemm import pdl_of
from srt.layers.attention.attention_spec import AttentionLayer, AttentionSpec
from srt.layers.attention.base import AttentionBackend, DecodeGraphs
from srt.utils.errors import StartError

if TYPE_CHECKING:
    from srt.model_executor.forward_batch_info import ForwardBatch

SHOWN_ON: Final = (9, 0)
"""The compute capability of the GPUs on which answers were compared."""
_INTERPRETER_PROCESSORS: Final = 2  # used on a CPU in place of the device's number of multiprocessors


class InvariantTritonBackend(AttentionBackend):
    """Serves heads of up to 256 without windows, in float32 and bfloat16, over a KV memory of the model's own type."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        """StartError if the same bits were not shown for this model or this GPU."""
        require_triton(device.type)
        check_shown(spec, torch.cuda.get_device_capability(device) if device.type == "cuda" else SHOWN_ON)
        self._num_processors = _INTERPRETER_PROCESSORS
        if device.type == "cuda":
            self._num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._arrivals = torch.zeros(most_arrivals(self._num_processors), dtype=torch.int32, device=device)
        self._max_extend_len = 0
        self._max_context = 0

    @property
    def decode_graphs(self) -> DecodeGraphs:
        return self

    def plan_extend(self, batch: ForwardBatch) -> None:
        self._max_extend_len = int(batch.extend_seq_lens_cpu.max())

    def plan_decode(self, batch: ForwardBatch) -> None:
        self._max_context = batch.req_to_token_pool.max_pages * batch.req_to_token_pool.page_size

    def init_cuda_graph_state(self, max_bs: int) -> None:
        """Graphs share the counts of programs, which are zero between launches."""

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> None:
        self.plan_decode(batch)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        attend_chunks(
            q,
            _paged_kv(layer, batch),
            batch.req_pool_indices[: batch.num_extend_rows],
            batch.extend_prefix_lens,
            batch.extend_seq_lens,
            batch.extend_start_loc,
            self._max_extend_len,
            layer.scale,
            out,
        )

    def forward_decode(self, q: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor) -> None:
        attend_decodes(
            q,
            _paged_kv(layer, batch),
            batch.req_pool_indices[batch.num_extend_rows :],
            batch.seq_lens[batch.num_extend_rows :],
            self._max_context,
            self._num_processors,
            layer.scale,
            out,
            pdl_of(q),
            arrivals=self._arrivals,
        )

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> None:
        locations = batch.locations_of(layer.layer_id)
        write_kv(layer.split_kv_heads(k), layer.split_kv_heads(v), locations, _paged_kv(layer, batch))


def check_shown(spec: AttentionSpec, capability: tuple[int, int]) -> None:
    """Raise StartError if the same bits were not shown for this model or a GPU of this compute capability."""
    option = "--enable-deterministic-inference"
    if capability != SHOWN_ON:
        raise StartError(
            f"{option} works on GPUs of compute capability {SHOWN_ON[0]}.{SHOWN_ON[1]} (Hopper), and this one has"
            f" {capability[0]}.{capability[1]}: leave it out."
        )
    group, most = spec.num_heads // spec.num_kv_heads, InvariantTiles.most_grouped(spec.dtype)
    if group > most:
        raise StartError(f"{option} serves at most {most} query heads for each KV head, not {group}: leave it out.")


def _paged_kv(layer: AttentionLayer, batch: ForwardBatch) -> PagedKV:
    tables = batch.req_to_token_pool
    return PagedKV(
        *batch.token_to_kv_pool.get_kv(layer.layer_id), batch.page_table_of(layer.layer_id), tables.page_size
    )
