"""A model's forward pass for few tokens as code from PyTorch's compiler (--enable-torch-compile).

Layers are alike, so two functions are compiled for all of them: what precedes the attention of a layer, and what follows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from srt.layers.ops import TORCH_OPS, Rotation, Stream
from srt.model_executor.forward_batch_info import ForwardBatch
from srt.models.causal_lm import CausalLM
from srt.models.decoder import Decoder, DecoderLayer
from srt.utils.errors import StartError


class CompiledForward:
    """Called like the model, with the same results but for rounding; on one rank, for at most `max_tokens` tokens."""

    def __init__(self, model: CausalLM, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_steps = 0  # forward passes so far
        self._model = cast("Decoder", model.model)  # no other layers declare this path
        self._project, self._finish = (torch.compile(f, dynamic=True, fullgraph=True) for f in (_project, _finish))

    @torch.inference_mode()
    def compile(self, run: Callable[[int], None]) -> None:
        """Call `run` with one row and with two, whose code differs, so that it compiles; StartError if PyTorch cannot."""
        from torch._dynamo.exc import TorchDynamoException
        from torch._inductor import config

        try:
            with config.patch(compile_threads=1):  # in this process alone
                for num_rows in range(1, min(2, self.max_tokens) + 1):
                    run(num_rows)
        except TorchDynamoException as error:
            reason = " ".join(str(error).strip().splitlines()[:2]).rstrip(".")
            raise StartError(
                f"--enable-torch-compile: PyTorch could not compile this model: {reason}."
                " On a CPU it needs a C++ compiler: install g++, or leave the option out."
            ) from error

    def __call__(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        self.num_steps += 1
        rotation = self._model.rotary_emb(positions)
        hidden, delta = self._model.embed_tokens(input_ids), None
        for layer in cast("list[DecoderLayer]", list(self._model.layers)):
            q, k, v, hidden = self._project(layer, hidden, delta, rotation.cos, rotation.sin)
            hidden, delta = self._finish(layer, layer.self_attn.attn(q, k, v, batch), hidden)
        return self._model.norm.of_stream(Stream(hidden, delta))


def _project(layer: DecoderLayer, hidden: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Return queries, keys and values for the stream `hidden` + `delta`, and the sum itself."""
    attention, norm = layer.self_attn, layer.input_layernorm.norm
    qkv, total = TORCH_OPS.linear_of_norm(Stream(hidden, delta), norm, attention.qkv_proj.affine)
    return *TORCH_OPS.split_qkv(qkv, attention.head_norms, Rotation(cos, sin), attention.attn), total


def _finish(layer: DecoderLayer, attended: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    """Run the layer from its attention's output on, and return the stream as two summands."""
    stream = TORCH_OPS.linear_onto(hidden, attended, layer.self_attn.o_proj.affine)
    norm = layer.post_attention_layernorm.norm
    activated, total = TORCH_OPS.gated_linear_of_norm(stream, norm, layer.gated_mlp.gate_up_proj.affine)
    stream = TORCH_OPS.linear_onto(total, activated, layer.gated_mlp.down_proj.affine)
    return stream.hidden, stream.delta
