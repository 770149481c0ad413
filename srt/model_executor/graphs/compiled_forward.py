"""A model's forward pass of few tokens with PyTorch's compiler: what lies between two attentions becomes a few kernels.

Layers of a model are alike, so there are three things to compile, whatever their number: what comes before the first attention,
between two, and behind the last. Attention itself is launched as always.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from srt.layers.ops import TORCH_OPS, Rotation, Stream
from srt.model_executor.forward_batch_info import ForwardBatch
from srt.models.decoder import CausalLM, DecoderLayer
from srt.utils.errors import StartError

Queries = tuple[Tensor, Tensor, Tensor]


class CompiledForward:
    """Called like the model, with the same results but for rounding; on one rank. For no more than `most_tokens`."""

    def __init__(self, model: CausalLM, most_tokens: int) -> None:
        """StartError where there is nothing to compile with. Compiles nothing yet: the first calls with one token and with two do."""
        self.most_tokens = most_tokens
        if next(model.parameters()).device.type == "cpu":
            _require_compiler()
        self._model = model.model
        self._layers = cast("list[DecoderLayer]", list(self._model.layers))
        self._begin = _compiled(_begin)
        self._between = _compiled(_between)
        self._end = _compiled(_end)
        self.num_steps = 0
        """Forward passes so far."""

    def __call__(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        self.num_steps += 1
        model = self._model
        rotation = model.rotary_emb(positions)
        angles = rotation.cos, rotation.sin
        queries, hidden = self._begin(self._layers[0], model.embed_tokens(input_ids), *angles)
        for layer, following in pairwise(self._layers):
            attended = layer.self_attn.attn(*queries, batch)
            queries, hidden = self._between(layer, following, attended, hidden, *angles)
        last = self._layers[-1]
        return self._end(last, model.norm, last.self_attn.attn(*queries, batch), hidden)  # type: ignore[no-any-return]


def _begin(layer: DecoderLayer, embedded: Tensor, cos: Tensor, sin: Tensor) -> tuple[Queries, Tensor]:
    return _project(layer, Stream(embedded), cos, sin)


def _between(
    layer: DecoderLayer, following: DecoderLayer, attended: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Queries, Tensor]:
    return _project(following, _finish(layer, attended, hidden), cos, sin)


def _end(layer: DecoderLayer, norm: Any, attended: Tensor, hidden: Tensor) -> Tensor:
    return TORCH_OPS.norm_stream(_finish(layer, attended, hidden), norm.norm)[0]


def _project(layer: DecoderLayer, stream: Stream, cos: Tensor, sin: Tensor) -> tuple[Queries, Tensor]:
    """(what attention takes, the stream's sum)."""
    attention = layer.self_attn
    norm = layer.input_layernorm.norm
    qkv, hidden = TORCH_OPS.linear_of_norm(stream, norm, attention.qkv_proj.affine)
    return TORCH_OPS.split_qkv(qkv, attention.head_norms, Rotation(cos, sin), attention.attn), hidden


def _finish(layer: DecoderLayer, attended: Tensor, hidden: Tensor) -> Stream:
    """The layer from its attention on."""
    mlp = layer.mlp
    stream = TORCH_OPS.linear_onto(hidden, attended, layer.self_attn.o_proj.affine)
    norm = layer.post_attention_layernorm.norm
    activated, hidden = TORCH_OPS.gated_linear_of_norm(stream, norm, mlp.gate_up_proj.affine)
    return TORCH_OPS.linear_onto(hidden, activated, mlp.down_proj.affine)


@contextmanager
def compiling() -> Iterator[None]:
    """Around the first calls: in this process alone, with a StartError that says what went wrong."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor import config

    try:
        with config.patch(compile_threads=1):
            yield
    except TorchDynamoException as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise StartError(f"--enable-torch-compile: PyTorch could not compile this model: {reason}.") from error


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True, fullgraph=True)


def _require_compiler() -> None:
    """On a GPU kernels are Triton's, which are needed in any case."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        compiler = get_cpp_compiler()
    except InvalidCxxCompiler:
        compiler = ""
    if shutil.which(compiler) is None:
        raise StartError(
            "--enable-torch-compile needs a C++ compiler on a CPU, and there is none: install g++, or leave the option out."
        )
