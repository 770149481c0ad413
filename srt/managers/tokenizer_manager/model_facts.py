"""Facts about the model that the frontend reads from the checkpoint's configuration, without loading weights."""

from __future__ import annotations

from dataclasses import dataclass

from srt.server_args import ServerArgs
from srt.utils.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model's properties that the APIs report and check requests against."""

    folder: str
    architectures: tuple[str, ...]
    model_type: str
    context_length: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    sampling_defaults: dict[str, float | int]
    has_chat_template: bool


def read_model_facts(folder: str, args: ServerArgs, has_chat_template: bool) -> ModelFacts:
    """Read the facts from the checkpoint's configuration; raise ModelError if it cannot be used."""
    config = ModelConfig.from_folder(folder, args.model_overrides(), args.context_length)
    return ModelFacts(
        folder=folder,
        architectures=(config.architecture,),
        model_type=config.model_type,
        context_length=config.context_length,
        vocab_size=config.vocab_size,
        eos_ids=tuple(i for i in config.eos_token_ids if i < config.vocab_size),
        sampling_defaults=config.sampling_defaults if args.sampling_defaults == "model" else {},
        has_chat_template=has_chat_template,
    )
