"""Build a model of the library transformers on the meta device from config.json alone, and compute its buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from srt.models.library.attention import PAGED, register
from srt.utils.model_error import ModelError


def build_architecture(architecture: str, folder: str | Path, overrides: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Return the library's model; ModelError if the library does not have it, or has it without the interface that we need."""
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            f"{architecture} is run by the library transformers, which cannot be imported ({error}): install transformers>=5."
        ) from error
    version = transformers.__version__
    config = _read_config(architecture, folder, overrides, version)
    build = getattr(transformers, architecture, None)
    if build is None:
        raise ModelError(f"Neither this server nor transformers {version} has the architecture {architecture}.")
    _refuse_kinds(architecture, build, config)
    register()
    return _built(architecture, build, config, PAGED, dtype)


def build_encoder(
    architecture: str, folder: str | Path, overrides: Mapping[str, Any], dtype: torch.dtype, *, is_classifier: bool
) -> Any:
    """Return the library's encoder, with its head if it is a classifier, and without any otherwise."""
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            f"{architecture} is run by the library transformers, which cannot be imported ({error}): install transformers>=5."
        ) from error
    config = _read_config(architecture, folder, overrides, transformers.__version__)
    kind = getattr(transformers, architecture) if is_classifier else transformers.AutoModel._model_mapping[type(config)]
    has_pooling_layer = not is_classifier and "add_pooling_layer" in signature(kind).parameters
    build = partial(kind, add_pooling_layer=False) if has_pooling_layer else kind
    return _built(architecture, build, config, "sdpa" if kind._supports_sdpa else "eager", dtype)


def _built(architecture: str, build: Callable[[Any], Any], config: Any, attention: str, dtype: torch.dtype) -> Any:
    """Return the library's model on the meta device, with this attention; ModelError if the library cannot build it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # the library computes some constants in it
    try:
        with torch.device("meta"):
            config._attn_implementation = attention
            model = build(config).eval()
            model.tie_weights()
            return model
    except Exception as error:  # models choose their attention in their own ways, some from a table
        reason = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        outside = " with attention from outside" if attention == PAGED else ""
        raise ModelError(
            f"{architecture} cannot be served by the library transformers: it cannot be built{outside}"
            f" ({type(error).__name__}: {reason})."
        ) from error
    finally:
        torch.set_default_dtype(before)


def _read_config(architecture: str, folder: str | Path, overrides: Mapping[str, Any], version: str) -> Any:
    from transformers import AutoConfig

    try:
        config, unused = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, return_unused_kwargs=True, **overrides
        )
    except Exception as error:  # the library raises many kinds, also for values that it checks
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ModelError(
            f"{architecture} is not one of this server's own architectures, and transformers {version} cannot read its config.json:"
            f" {reason}."
        ) from error
    if unused:
        raise ModelError(f"--json-model-override-args: {next(iter(unused))} has no effect on {architecture}.")
    return config


def _refuse_kinds(architecture: str, build: Any, config: Any) -> None:
    kinds = {
        "has an encoder beside its decoder": config.is_encoder_decoder,
        "keeps a state instead of keys and values": getattr(build, "_is_stateful", False),
        "has no head for the next token": not hasattr(build, "prepare_inputs_for_generation"),
    }
    for kind, applies in kinds.items():
        if applies:
            raise ModelError(f"{architecture} cannot be served by the library transformers: it {kind}.")
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        rope_type = rope.get("rope_type")
        if rope_type in ("dynamic", "longrope"):
            raise ModelError(
                f"config.json: RoPE type {rope_type!r} is not supported, since its angles depend on the longest row of the batch."
            )


def _ropes(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of each rotation: one for all layers, or one for each type of layer."""
    if isinstance(parameters, Mapping):
        yield parameters
        for value in parameters.values():
            yield from _ropes(value)


def compute_buffers(model: Any, dtype: torch.dtype) -> None:
    """Replace the buffers that no checkpoint holds, such as frequencies of rotations, by computed ones on the CPU.

    The library computes them when it draws initial weights. It does so twice here, over different contents: what differs afterwards was
    not computed.
    """
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # so the library draws none
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        _compute_all(model)
    finally:
        torch.set_default_dtype(before)


def _compute_all(model: Any) -> None:
    stored = model.state_dict().keys()
    for path, module in model.named_modules():
        names = [
            name for name in module._buffers if _join(path, name) not in stored and module._buffers[name] is not None
        ]
        if not names:
            continue
        first, second = (_filled(model, module, names, content) for content in (0, 1))
        for name in names:
            if not torch.equal(first[name], second[name]):
                raise ModelError(f"nothing says how to compute {_join(path, name)}")


def _filled(model: Any, module: nn.Module, names: list[str], content: int) -> dict[str, Tensor]:
    for name in names:
        buffer = module._buffers[name]
        assert buffer is not None
        setattr(module, name, torch.full(buffer.shape, content, dtype=buffer.dtype, device="cpu"))
    model._init_weights(module)
    return {name: getattr(module, name) for name in names}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
