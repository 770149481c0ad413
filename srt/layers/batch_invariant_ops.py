"""The layer operations of a deterministic server: the result for a token does not depend on the other tokens of its step, to the bit.

They are chosen where a worker's model is built (--enable-deterministic-inference), in place of those of `ops.py`. What they leave to
PyTorch is done element by element without rounding in between: additions, conversions, and copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from srt.distributed.parallel_state import TensorParallel
from srt.kernels.cpu.batch_invariant import BatchInvariantKernels
from srt.layers.attention.radix_attention import RadixAttention
from srt.layers.logits_processor import LogitsProcessor, gather_vocabulary
from srt.layers.ops import Affine, LayerOps, Norm, Rotation
from srt.layers.sampler import Draws, Sampler
from srt.mem_cache.memory_pool import DrawTables, ReqToTokenPool

if TYPE_CHECKING:
    from srt.model_executor.forward_batch_info import ForwardBatch


class BatchInvariantOps(LayerOps):
    """The operations of layers with plain weights on a CPU."""

    def __init__(self, kernels: BatchInvariantKernels) -> None:
        self._kernels = kernels

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return self._kernels.norm(x, norm.weight, norm.eps)

    def linear(self, x: Tensor, affine: Affine) -> Tensor:
        matrix = affine.matrix
        assert matrix is not None, "quantised weights are refused at the start"
        return self._kernels.product(x, matrix, affine.bias)

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._kernels.product(x, weight, None)

    def project_into(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        self._kernels.product(x, weight, None, out)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return self._kernels.silu_and_mul(gate_up)

    def angles(self, positions: Tensor, frequencies: Tensor, factor: float) -> Rotation:
        return Rotation(*self._kernels.angles(positions, frequencies, factor))

    def attend(
        self,
        qkv: Tensor,
        norms: tuple[Norm, Norm] | None,
        rotation: Rotation,
        layer: RadixAttention,
        batch: ForwardBatch,
    ) -> Tensor:
        weights, eps = (None, 0.0) if norms is None else ((norms[0].weight, norms[1].weight), norms[0].eps)
        self._kernels.turn(qkv, weights, eps, rotation.cos, rotation.sin, layer)
        return layer(*layer.split_packed(qkv), batch)  # type: ignore[no-any-return]  # calls of modules are untyped


class RowLogprobs(Protocol):
    """Computes a row's logprobs without regard to the other rows."""

    def log_softmax(self, logits: Tensor) -> Tensor:
        """Return the logprobs [rows, vocabulary] float32 of float32 logits."""

    def largest(self, log_probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the ids [rows, count] int32 of the largest logprobs of each row, and their values. Equal ones are ordered by id."""


class BatchInvariantLogitsProcessor(LogitsProcessor):
    """Computes a row's logprobs without regard to the other rows, and orders equal ones by token id."""

    def __init__(self, tp: TensorParallel, vocab_size: int, kernels: RowLogprobs) -> None:
        super().__init__(tp, vocab_size)
        self._kernels = kernels

    def log_softmax(self, logits: Tensor) -> Tensor:
        return self._kernels.log_softmax(gather_vocabulary(self._tp, logits, self._vocab_size))

    def largest(self, log_probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return self._kernels.largest(log_probs, count)


class BatchInvariantGpuSampler(Sampler):
    """Filters float32 logits only: how a kernel adds up the weights of a row depends on the type that it reads."""

    def draw_filtered(self, logits: Tensor, rows: DrawTables, positions: Tensor) -> Draws:
        return super().draw_filtered(logits.to(torch.float32), rows, positions)


def batch_invariant_ops(device: torch.device) -> LayerOps:
    """Return the operations for this device."""
    if device.type != "cuda":
        return BatchInvariantOps(BatchInvariantKernels.load())
    # Imported here because Triton is installed only with PyTorch for CUDA.
    from srt.layers.batch_invariant_gpu import BatchInvariantGpuOps

    return BatchInvariantGpuOps(device)


def batch_invariant_logits_processor(
    tp: TensorParallel, vocab_size: int, device: torch.device
) -> BatchInvariantLogitsProcessor:
    """Return the logits processor for this device."""
    if device.type != "cuda":
        return BatchInvariantLogitsProcessor(tp, vocab_size, BatchInvariantKernels.load())
    from srt.layers.batch_invariant_gpu import GpuRowLogprobs

    return BatchInvariantLogitsProcessor(tp, vocab_size, GpuRowLogprobs())


def batch_invariant_sampler(tp: TensorParallel, vocab_size: int, shard_start: int, tables: ReqToTokenPool) -> Sampler:
    """Return the sampler for the device of the tables."""
    if tables.seq_lens.is_cuda:
        return BatchInvariantGpuSampler(tp, vocab_size, shard_start, tables)
    return Sampler(tp, vocab_size, shard_start, tables, BatchInvariantKernels.load().filter_threshold)
