"""Small checkpoints with random weights, in the layout of the Hugging Face hub: to try the server, and to test it.

    python -m tests.support.random_checkpoint FOLDER --family qwen3 --seed 0

The weights say nothing, but everything else is as in a real checkpoint: a trained tokenizer with special tokens and a
chat template, a configuration written by `transformers`, one or several safetensors files. The same arguments give the
same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.random_tokenizer import FAMILY_TOKENS, FamilyTokens, train_tokenizer

FAMILIES = tuple(FAMILY_TOKENS)
"""The model families that can be written."""


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    """What a random checkpoint looks like. The defaults run quickly on a CPU."""

    family: str = "qwen3"
    seed: int = 0
    vocab_size: int = 1000
    hidden_size: int = 128
    intermediate_size: int | None = None
    """None is twice the hidden size."""
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int | None = None
    """None is 32, or hidden size / heads in the families that know no other."""
    context_length: int = 4096
    tied: bool = True
    num_shards: int = 1
    logit_std: float = 3.0
    """How far the logits spread. With 3 and a thousand tokens the best two are about 0.8 apart on average."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of config.json, such as `rope_parameters`; they win over the fields above."""
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of generation_config.json, such as sampling defaults."""


def write_random_checkpoint(folder: str | os.PathLike[str], spec: CheckpointSpec) -> None:
    """Write the whole checkpoint, or nothing: `folder` appears when it is complete, and replaces what was there."""
    folder = Path(folder)
    if spec.family not in FAMILIES:
        raise ValueError(f"unknown family {spec.family!r}; known are {', '.join(FAMILIES)}")
    if spec.num_shards < 1:
        raise ValueError(f"a checkpoint has at least one file, not {spec.num_shards}")
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        token_ids = write_tokenizer(partial, spec)
        _write_model(partial, spec, token_ids)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_tokenizer(folder: Path, spec: CheckpointSpec) -> dict[str, int]:
    """Write tokenizer.json and tokenizer_config.json; return the id of each special token."""
    tokens = FAMILY_TOKENS[spec.family]
    tokenizer = train_tokenizer(spec.vocab_size, tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens.bos,
        "eos_token": tokens.eos,
        "pad_token": tokens.pad,
        "add_bos_token": tokens.bos is not None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": spec.context_length,
        "chat_template": tokens.chat_template,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    return {token: tokenizer.token_to_id(token) for token in tokens.special}


def _write_model(folder: Path, spec: CheckpointSpec, token_ids: Mapping[str, int]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    tokens = FAMILY_TOKENS[spec.family]
    config = _build_config(spec, tokens, token_ids)
    # The meta device: no time is spent on an initialisation that is overwritten below.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.save_pretrained(folder)
    ends = {"eos_token_id": [token_ids[token] for token in tokens.ends], "pad_token_id": token_ids[tokens.pad]}
    start = {} if tokens.bos is None else {"bos_token_id": token_ids[tokens.bos]}
    _write_json(folder / "generation_config.json", {**start, **ends, **spec.generation_config})

    generator = torch.Generator().manual_seed(spec.seed)
    # A tied output layer has no weights in a checkpoint. Not every version of transformers ties before it loads.
    weights = {
        name: _draw_weight(name, tuple(parameter.shape), spec, generator)
        for name, parameter in model.named_parameters()
        if not (name == "lm_head.weight" and config.tie_word_embeddings)
    }
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    weights |= {name: _draw_weight(name, tuple(one.shape), spec, generator) for name, one in buffers.items()}
    if any(".experts." in name for name in weights):
        weights = _as_published(model, weights, folder / "published")
    _write_weights(folder, weights, spec.num_shards)


def _as_published(model: Any, weights: Mapping[str, Any], scratch: Path) -> dict[str, Any]:
    """Return the weights under the names and in the shapes of the family's checkpoints, which differ for experts."""
    from safetensors.torch import load_file

    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    model.save_pretrained(scratch)
    published = load_file(scratch / "model.safetensors")
    shutil.rmtree(scratch)
    return {name: tensor for name, tensor in published.items() if name != "lm_head.weight" or name in weights}


def _build_config(spec: CheckpointSpec, tokens: FamilyTokens, token_ids: Mapping[str, int]) -> Any:
    from transformers import AutoConfig

    bos_token_id = None if tokens.bos is None else token_ids[tokens.bos]
    fields: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size or 2 * spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "max_position_embeddings": spec.context_length,
        "tie_word_embeddings": spec.tied,
        "bos_token_id": bos_token_id,
        "eos_token_id": token_ids[tokens.eos],
        "pad_token_id": None,
        "dtype": "float32",
        "architectures": [tokens.architecture],
    }
    if tokens.names_head_dim:
        fields["head_dim"] = spec.head_dim or 32
    elif spec.head_dim not in (None, spec.hidden_size // spec.num_heads):
        raise ValueError(
            f"{spec.family} has no head_dim of its own: it is hidden size / heads, "
            f"here {spec.hidden_size} / {spec.num_heads}, not {spec.head_dim}"
        )
    return AutoConfig.for_model(spec.family, **{**fields, **tokens.config, **spec.config})


def _draw_weight(name: str, shape: tuple[int, ...], spec: CheckpointSpec, generator: Any) -> Any:
    """One parameter. Scales follow the layer's inputs, so that logits spread alike in every size of model."""
    import torch

    noise = torch.randn(shape, generator=generator, dtype=torch.float32)
    if name.endswith("norm.weight"):
        return FAMILY_TOKENS[spec.family].norm_mean + 0.2 * noise
    if name.endswith((".bias", "_bias", ".sinks")):
        return 0.5 * noise
    if name == "lm_head.weight" or (name.endswith("embed_tokens.weight") and spec.tied):
        return noise * (spec.logit_std / math.sqrt(spec.hidden_size))
    if name.endswith("embed_tokens.weight"):
        return noise
    return noise * (1.5 / math.sqrt(shape[-1]))


def _write_weights(folder: Path, weights: Mapping[str, Any], num_shards: int) -> None:
    """Write one file, or `num_shards` files of consecutive tensors and the index that names them."""
    from safetensors.torch import save_file

    names = list(weights)
    if num_shards == 1:
        save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
        return
    if num_shards > len(names):
        raise ValueError(f"{len(names)} tensors cannot be spread over {num_shards} files")
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = names[shard * len(names) // num_shards : (shard + 1) * len(names) // num_shards]
        save_file({name: weights[name] for name in part}, folder / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file_name))
    total_size = sum(weight.numel() * weight.element_size() for weight in weights.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _parse(argv: Sequence[str] | None) -> tuple[Path, CheckpointSpec]:
    default = CheckpointSpec()
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.random_checkpoint",
        description="Write a small checkpoint with random weights, to try or test the server with.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="where to write it; what is there is replaced")
    parser.add_argument("--family", choices=FAMILIES, default=default.family, help="the model family")
    parser.add_argument("--seed", type=int, default=default.seed, help="the weights follow from it")
    parser.add_argument("--vocab-size", type=int, default=default.vocab_size, help="rows of the embedding")
    parser.add_argument("--hidden", type=int, default=default.hidden_size, help="hidden size")
    parser.add_argument("--intermediate", type=int, default=None, help="MLP size; twice the hidden size if not given")
    parser.add_argument("--layers", type=int, default=default.num_layers, help="number of layers")
    parser.add_argument("--heads", type=int, default=default.num_heads, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=default.num_kv_heads, help="key and value heads")
    parser.add_argument(
        "--head-dim", type=int, default=None, help="size of a head; if not given 32, or hidden / heads for qwen2"
    )
    parser.add_argument("--context-length", type=int, default=default.context_length, help="positions")
    parser.add_argument("--shards", type=int, default=default.num_shards, help="number of safetensors files")
    parser.add_argument("--untied", dest="tied", action="store_false", help="give the output layer weights of its own")
    args = parser.parse_args(argv)
    spec = CheckpointSpec(
        family=args.family,
        seed=args.seed,
        vocab_size=args.vocab_size,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_layers=args.layers,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        context_length=args.context_length,
        tied=args.tied,
        num_shards=args.shards,
    )
    return args.folder, spec


def main(argv: Sequence[str] | None = None) -> int:
    """The command line: write the checkpoint and say where."""
    folder, spec = _parse(argv)
    write_random_checkpoint(folder, spec)
    print(f"wrote a random {spec.family} checkpoint to {folder}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
