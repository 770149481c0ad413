"""A language model whose layers are those of the library transformers: our attention, sampling and loading around them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from srt.distributed.parallel_state import TensorParallel
from srt.layers.attention.radix_attention import RadixAttention
from srt.layers.embedding import VocabShard
from srt.layers.ops_choice import layer_ops
from srt.layers.weights import WeightPiece
from srt.models.library.architecture import build_architecture, compute_buffers
from srt.models.library.attention import Place, RunningStep
from srt.models.library.kernels import use_ops
from srt.models.library.parallel import split, split_head
from srt.models.library.trace import Call, check_tokens_are_independent, trace
from srt.models.library.weights import NamedWeights
from srt.utils.layer_spec import FeedForward, LayerSpec
from srt.utils.model_config import ModelConfig, without_useless_windows
from srt.utils.model_error import ModelError

if TYPE_CHECKING:
    from srt.model_executor.forward_batch_info import ForwardBatch

logger = logging.getLogger(__name__)


class LibraryCausalLM(nn.Module):
    """Called like `CausalLM`. Build one with `build`, on the meta device; a loader fills it."""

    def __init__(self, config: ModelConfig, library: Any, calls: list[Call], tp: TensorParallel) -> None:
        """`library` is the library's model, and `calls` are the calls of its attention, in the order of the layers."""
        super().__init__()
        self.config = config
        """The configuration with the layers as the library computes them."""
        self._weights = NamedWeights(library, tp)
        self._step = RunningStep()
        for number, (call, layer) in enumerate(zip(calls, config.layers, strict=True)):
            Place.give(call.module, _attention(number, layer, tp.size), self._step)
        self.base = library.base_model
        if tp.size > 1:
            self._weights.cut(split(self.base, tp))
        self.lm_head = LibraryHead(library, config.vocab_size, tp)

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        folder: str | Path,
        overrides: Mapping[str, Any],
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LibraryCausalLM:
        """Build the model and find out what its layers compute; ModelError if it cannot run over our attention."""
        library = build_architecture(config.architecture, folder, overrides, dtype)
        base = library.base_model
        try:
            calls, hidden_size = trace(base, library.config.num_hidden_layers)
            compute_buffers(library, dtype)
        except ModelError as error:
            raise _cannot(config.architecture, error) from error
        if device.type == "cuda" and dtype != torch.bfloat16 and any(one.ndim == 3 for one in base.parameters()):
            reason = "on a GPU its grouped products of experts need bfloat16 (choose --dtype bfloat16)"
            raise _cannot(config.architecture, reason)
        feed_forward = FeedForward(_widest(base, tp.size))
        layers = without_useless_windows([LayerSpec(call.spec, feed_forward) for call in calls], config.context_length)
        config = replace(config, hidden_size=hidden_size, layers=tuple(layers))
        _check_alike(config)
        if any(call.spec.num_kv_heads % tp.size or call.spec.num_heads % tp.size for call in calls):
            heads, kv_heads = calls[0].spec.num_heads, calls[0].spec.num_kv_heads
            raise _cannot(
                config.architecture, f"--tp {tp.size} does not divide its {heads} query and {kv_heads} KV heads"
            )
        logger.info(
            "%s is run by the layers of the library transformers, over this server's attention. They are slower than"
            " layers of our own.",
            config.architecture,
        )
        try:
            model = cls(config, library, calls, tp)
        except ModelError as error:
            raise _cannot(config.architecture, error) from error
        model.lm_head.check(hidden_size)
        if device.type == "cuda":
            use_ops(model, layer_ops(device))
        return model

    def check(self) -> None:
        """Raise ModelError if something but attention mixes tokens. Call it on all ranks when the weights are loaded."""
        try:
            check_tokens_are_independent(self.base, self.lm_head.weight.device)
        except ModelError as error:
            raise _cannot(self.config.architecture, error) from error

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """Return hidden states [tokens with output, hidden_size]; `lm_head` turns them into logits."""
        self._step.batch = batch
        try:
            output = self.base(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        finally:
            self._step.batch = None
        hidden: Tensor = output.last_hidden_state[0]
        return hidden if batch.output_tokens is None else hidden[batch.output_tokens]

    def weight_pieces(self, stored: Collection[str] | None) -> list[WeightPiece]:
        """Return the pieces of all parameters; `stored` are the names in the checkpoint, None if there is none."""
        return self._weights.pieces(stored)

    def unused_weights(self, stored: Collection[str]) -> tuple[list[str], list[tuple[str, str]]]:
        """Return the stored tensors that the model ignores, and pairs of which the second is used, and the first must be a copy."""
        return self._weights.unused(stored)

    @property
    def weights_per_layer(self) -> int:
        """The number of weights of a layer, on average."""
        num_weights: int = sum(weight.numel() for weight in self.base.parameters())
        return num_weights // self.config.num_layers

    @contextmanager
    def shortened(self, num_layers: int) -> Iterator[None]:
        """Run all layers, because the library's model cannot be shortened."""
        yield


class LibraryHead(nn.Module):
    """The library's head: whatever its model does to hidden states after its layers. Each rank computes its shard of the logits."""

    def __init__(self, library: Any, vocab_size: int, tp: TensorParallel) -> None:
        super().__init__()
        output = library.get_output_embeddings()
        if not isinstance(getattr(output, "weight", None), nn.Parameter):
            raise ModelError("it has no output layer")
        self._output = output
        setattr(library, library.base_model_prefix, _Passing())
        self._library = library
        self.vocab_size = vocab_size
        shard = VocabShard(vocab_size, tp)
        self.shard_start, self.shard_size, self.shard_size_valid = shard.start, shard.size, shard.size_valid
        if tp.size > 1:
            split_head(output, shard)

    def check(self, hidden_size: int) -> None:
        """Raise ModelError unless the head works without its layers, on the meta device."""
        rows = torch.empty((2, hidden_size), device="meta", dtype=self.weight.dtype)
        try:
            with torch.inference_mode():
                shape = self._logits(rows).shape
        except Exception as error:
            shape, reason = None, f" ({type(error).__name__}: {error})"
        if shape != (2, self.shard_size):
            what = reason if shape is None else f" of shape {list(shape)}"
            raise _cannot(type(self._library).__name__, f"its head gives no logits for hidden states alone{what}")

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self._output.weight
        return weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [rows, shard_size] f32 of hidden [rows, hidden_size]."""
        return self._logits(hidden).float()

    def logits_into(self, hidden: Tensor, out: Tensor) -> None:
        """Write the logits to `out` in the model's dtype."""
        out.copy_(self._logits(hidden))

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._library(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits


class _Passing(nn.Module):
    """Stands where the library's head expects the layers, and returns the hidden states that it is given."""

    @property
    def decoder(self) -> _Passing:
        """The layers themselves, for heads that look for them one level deeper."""
        return self

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Passed:
        return _Passed(inputs_embeds)


class _Passed:
    """An output that has hidden states and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        assert index == 0, f"only hidden states are passed on, not output {index}"
        return self.last_hidden_state


def _cannot(architecture: str, reason: object) -> ModelError:
    return ModelError(f"{architecture} cannot be served by the library transformers: {reason}.")


def _attention(layer_id: int, layer: LayerSpec, tp_size: int) -> RadixAttention:
    spec = layer.self_attention
    num_heads, num_kv_heads = spec.num_heads // tp_size, spec.num_kv_heads // tp_size
    return RadixAttention(num_heads, spec.head_dim, num_kv_heads, layer_id, spec.scale, spec.window, spec.softcap)


def _widest(base: nn.Module, tp_size: int) -> int:
    """Return the largest number of outputs of a product in the layers, by which memory is planned, as a multiple of `tp_size`."""
    most = max((module.out_features for module in base.modules() if isinstance(module, nn.Linear)), default=1)
    return -(-most // tp_size) * tp_size


def _check_alike(config: ModelConfig) -> None:
    shapes = {
        (one.num_heads, one.num_kv_heads, one.head_dim, one.scale, one.softcap)
        for one in (layer.self_attention for layer in config.layers)
    }
    if len(shapes) > 1:
        raise _cannot(config.architecture, "the attention of its layers differs in heads, sizes or factors")
