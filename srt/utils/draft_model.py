"""The options with which a model that drafts is loaded."""

from __future__ import annotations

from dataclasses import replace

from srt.server_args import ServerArgs


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
