"""Facts about the model that the frontend reads from the checkpoint's configuration, without loading weights.

`utils/model_config.py` decides what counts in the configuration's files, such as the defaults of sampling parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

from srt.parsers.templates import reasoning_parser_of, tool_call_parser_of
from srt.server_args import NO_PARSER, ServerArgs
from srt.utils.chat_template import ChatTemplate, ChatTemplateError
from srt.utils.model_config import ModelConfig
from srt.utils.pooling_config import PoolingSpec


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
    tool_call_parser: str | None = None  # None: calls of tools are not looked for
    reasoning_parser: str | None = None  # None: reasoning is not told from the answer
    tool_strict_level: str = "auto"  # what is enforced of calls unasked, one of TOOL_STRICT_LEVELS
    pooling: PoolingSpec | None = None  # None: the model generates text
    hidden_size: int = 0


def read_model_facts(folder: str, args: ServerArgs, template: ChatTemplate | ChatTemplateError | None) -> ModelFacts:
    """Read the facts from the checkpoint's configuration; raise ModelError if it cannot be used.

    Without the options for them, the parsers are those of the template's form of calls and of reasoning.
    """
    source = template.source if isinstance(template, ChatTemplate) else ""
    config = ModelConfig.served_from(folder, args)
    return ModelFacts(
        folder=folder,
        architectures=(config.architecture,),
        model_type=config.model_type,
        context_length=config.context_length,
        vocab_size=config.vocab_size,
        eos_ids=tuple(i for i in config.eos_token_ids if i < config.vocab_size),
        sampling_defaults=config.sampling_defaults if args.sampling_defaults == "model" else {},
        has_chat_template=isinstance(template, ChatTemplate),
        tool_call_parser=_chosen(args.tool_call_parser, tool_call_parser_of(source)),
        reasoning_parser=_chosen(args.reasoning_parser, reasoning_parser_of(source)),
        tool_strict_level=args.tool_strict_level,
        pooling=config.pooling,
        hidden_size=config.hidden_size,
    )


def _chosen(option: str | None, known: str | None) -> str | None:
    return known if option is None else None if option == NO_PARSER else option
