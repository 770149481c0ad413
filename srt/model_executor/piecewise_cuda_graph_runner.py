"""Steps with prompt tokens as CUDA graphs: one for each stretch between two attentions, which are launched anew each time.

Such a step has about ten launches a layer. A chunk of a prompt may be done before the host has launched it: a small one, or any of a
small model. So for a few numbers of tokens all but attention, whose work depends on lengths, is captured. A step of fewer tokens than
a number is padded to it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from srt.layers.attention.base import AttentionBackend, Views
from srt.layers.attention.radix_attention import RadixAttention
from srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from srt.model_executor.cuda_graph_runner import Capture, Work
from srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

if TYPE_CHECKING:
    from srt.models.decoder import CausalLM

NO_ROWS = np.zeros(0, np.int64)
LAUNCH_S = 0.8e-3  # of a layer, one kernel after the other: 0.35 to 1.0 on hosts of an H200
FLOPS = 600e12  # that this GPU's prompts are computed with


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Where graphs of all numbers of tokens read and write."""

    qkv: torch.Tensor  # [tokens, (heads, KV heads, KV heads) * head_dim]
    attended: torch.Tensor  # [tokens, heads * head_dim]
    hidden: torch.Tensor  # [outputs, hidden size]: what comes out


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Piece i ends where layer i's attention begins; the last ends with the model."""

    replays: list[Work]
    layers: list[RadixAttention]


class _Breaks(AttentionBackend):
    """Stands for attention while pieces are captured: hands over its inputs, cuts, and goes on with what will be its output."""

    def __init__(self, runner: PiecewiseCudaGraphRunner, cut: Work) -> None:
        self._runner = runner
        self._cut = cut
        self.layers: list[RadixAttention] = []

    def place_of(self, qkv: torch.Tensor) -> torch.Tensor:
        return self._runner.place_of(qkv)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, batch: ForwardBatch
    ) -> torch.Tensor:
        out = self._runner.hand_over(q, k, v)
        self.layers.append(layer)
        self._cut()
        return out

    def plan_extend(self, batch: ForwardBatch) -> None:
        raise AssertionError("nothing is planned while pieces are captured")

    plan_decode = plan_extend

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        raise AssertionError("nothing is attended to while pieces are captured")

    def forward_decode(self, q: torch.Tensor, layer: RadixAttention, batch: ForwardBatch, out: torch.Tensor) -> None:
        raise AssertionError("nothing is attended to while pieces are captured")


class PiecewiseCudaGraphRunner:
    """Sizes are captured one at a time, the largest first; every rank is asked for it at the same places of the stream of steps."""

    def __init__(
        self,
        sizes: Sequence[int],
        model: CausalLM,
        attn_backend: AttentionBackend,
        tables: ReqToTokenPool,
        kv_pool: MHATokenToKVPool,
        device: torch.device,
        capture: Capture,
    ) -> None:
        """`sizes` are numbers of tokens, and not none."""
        self._sizes = tuple(sorted(sizes))
        self._model = model
        self._attn_backend = attn_backend
        self._tables = tables
        self._kv_pool = kv_pool
        self._capture = capture
        most = self._sizes[-1]
        self._dummy_location = tables.num_pages * tables.page_size
        self._input_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._locations = torch.full((most,), self._dummy_location, dtype=torch.int64, device=device)
        self._outputs = torch.zeros(tables.num_slots, dtype=torch.int64, device=device)
        self._buffers: _Buffers | None = None
        self._pieces: dict[int, _Pieces] = {}

    @property
    def num_left(self) -> int:
        return len(self._sizes) - len(self._pieces)

    def can_run(self, batch: ForwardBatch) -> bool:
        """Graphs give hidden states of no more tokens than there are requests."""
        if batch.output_tokens is None:
            return False
        place = bisect_left(self._sizes, len(batch.input_ids))
        return place < len(self._sizes) and self._sizes[place] in self._pieces

    @property
    def next_size(self) -> int:
        """The largest that is left."""
        return self._sizes[self.num_left - 1]

    def give_up(self, size: int) -> None:
        """Capture nothing more, and forget this size if it was captured."""
        self._pieces.pop(size, None)
        self._sizes = tuple(sorted(self._pieces))

    def capture_next(self) -> int:
        """Capture one more size; returns it. Tables stay as they are: only padding runs."""
        size = self.next_size
        self._buffers = self._buffers or self._take_buffers()
        self._fill(size, None)
        breaks, buffers = list[_Breaks](), self._buffers

        def work(cut: Work) -> None:
            breaks.append(_Breaks(self, cut))
            batch = self._padding_batch(size, breaks[-1])
            hidden = self._model(batch.input_ids, batch.positions, batch)
            buffers.hidden[: len(hidden)].copy_(hidden)

        replays = self._capture.pieces(work)
        self._pieces[size] = _Pieces(replays, breaks[-1].layers)
        return size

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states of a batch that `can_run`, as the model gives them; the next step overwrites them."""
        num_tokens = len(batch.input_ids)
        size = self._sizes[bisect_left(self._sizes, num_tokens)]
        self._fill(size, batch)
        self._attn_backend.init_forward_metadata(batch)
        pieces, buffers = self._pieces[size], self._buffers
        assert buffers is not None and batch.output_tokens is not None
        first = pieces.layers[0]  # heads are alike in all of them
        q, k, v = first.split_packed(buffers.qkv[:num_tokens])
        views = Views.of(q, k, v, first, batch, buffers.attended[:num_tokens])
        for replay, layer in zip(pieces.replays, pieces.layers, strict=False):
            replay()
            self._attn_backend.attend_views(views, layer, batch)
        pieces.replays[-1]()
        return buffers.hidden[: len(batch.output_tokens)]

    # ---- For pieces as they are captured

    def place_of(self, qkv: torch.Tensor) -> torch.Tensor:
        assert self._buffers is not None
        return self._buffers.qkv[: len(qkv)]

    def hand_over(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention's inputs, which are copied to where it reads them unless they are there; returns where its output will be."""
        buffers = self._buffers
        assert buffers is not None
        if q.data_ptr() != buffers.qkv.data_ptr():
            torch.cat((q, k, v), dim=-1, out=buffers.qkv[: len(q)])
        return buffers.attended[: len(q)]

    def _take_buffers(self) -> _Buffers:
        model, most = self._model.model, self._sizes[-1]
        attention, weight = model.layers[0].get_submodule("self_attn.attn"), model.norm.weight
        assert isinstance(attention, RadixAttention)
        q_size, kv_size = (heads * attention.head_dim for heads in (attention.num_heads, attention.num_kv_heads))

        def zeros(rows: int, columns: int) -> torch.Tensor:
            return torch.zeros((rows, columns), dtype=weight.dtype, device=weight.device)

        return _Buffers(zeros(most, q_size + 2 * kv_size), zeros(most, q_size), zeros(len(self._outputs), len(weight)))

    def _fill(self, size: int, batch: ForwardBatch | None) -> None:
        """The batch's tokens, and padding behind them, which is written to the dummy page."""
        count = num_outputs = 0
        if batch is not None:
            assert batch.output_tokens is not None
            count, num_outputs = len(batch.input_ids), len(batch.output_tokens)
            self._outputs[:num_outputs].copy_(batch.output_tokens)
            self._input_ids[:count].copy_(batch.input_ids)
            self._positions[:count].copy_(batch.positions)
            self._locations[:count].copy_(batch.out_cache_loc)
        self._input_ids[count:size].zero_()
        self._positions[count:size].zero_()
        self._locations[count:size].fill_(self._dummy_location)
        self._outputs[num_outputs:].zero_()

    def _padding_batch(self, size: int, breaks: _Breaks) -> ForwardBatch:
        none = self._input_ids[:0]
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=0,
            num_extend_rows=0,
            num_extend_tokens=size,
            input_ids=self._input_ids[:size],
            positions=self._positions[:size],
            out_cache_loc=self._locations[:size],
            req_pool_indices=none,
            seq_lens=none,
            extend_prefix_lens=none,
            extend_seq_lens=none,
            extend_start_loc=none,
            req_pool_indices_cpu=NO_ROWS,
            seq_lens_cpu=NO_ROWS,
            extend_prefix_lens_cpu=NO_ROWS,
            extend_seq_lens_cpu=NO_ROWS,
            req_to_token_pool=self._tables,
            token_to_kv_pool=self._kv_pool,
            attn_backend=breaks,
            output_tokens=self._outputs[:size],
        )


def worthwhile_tokens(num_layers: int, num_weights: int) -> int:
    """Steps of more tokens take the device longer than the host needs to launch them: there a graph only adds padding."""
    return int(LAUNCH_S * num_layers * FLOPS / (2 * num_weights))


def piece_sizes(most_tokens: int) -> tuple[int, ...]:
    """Numbers of tokens that are captured, each at most a third more than the one before from 64 on."""
    sizes = [32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048]
    sizes += range(2560, most_tokens, 512)
    return tuple(sorted({size for size in sizes if size <= most_tokens} | ({most_tokens} if most_tokens else set())))
