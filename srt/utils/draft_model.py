"""The options with which a model that drafts is loaded, and what drafts do not support on a GPU."""

from __future__ import annotations

from dataclasses import replace

from srt.server_args import ServerArgs
from srt.utils.layer_spec import Experts, LayerSpec, SelfAttention
from srt.utils.model_config import ModelConfig


def draft_model_args(args: ServerArgs) -> ServerArgs:
    """Return the options with which the smaller model is loaded."""
    assert args.speculative_draft_model_path is not None, "there is no smaller model"
    return replace(
        args,
        model_path=args.speculative_draft_model_path,
        json_model_override_args="{}",
        quantization=None,
        quantization_param_path=None,
        context_length=None,
        model_impl="auto",
        enable_torch_compile=False,
    )


def gpu_speculation_obstacle(args: ServerArgs, config: ModelConfig) -> str | None:
    """Name what drafts cannot be verified with on a GPU, if the model or the options have it."""
    decode = args.decode_attention_backend or args.attention_backend
    if decode not in (None, "triton", "fa3"):
        return f"the attention backend {decode} for decodes"
    if args.enable_torch_compile:
        return "--enable-torch-compile"
    if config.implementation == "transformers":
        return "the layers of the library transformers"
    return None


def gpu_drafting_obstacle(args: ServerArgs, config: ModelConfig) -> str | None:
    """Name what a model that drafts on a GPU must not have, if it or the options have it."""
    obstacle = gpu_speculation_obstacle(args, config)
    if obstacle is not None:
        return obstacle
    if not config.weight_formats.is_plain:
        return "quantised weights"
    return next((found for layer in config.layers if (found := _layer_obstacle(layer)) is not None), None)


def _layer_obstacle(layer: LayerSpec) -> str | None:
    attention = layer.attention
    if not isinstance(attention, SelfAttention):
        return "layers of latent attention"
    if attention.window is not None:
        return "layers with a window"
    return "layers of experts" if isinstance(layer.feed_forward, Experts) else None
