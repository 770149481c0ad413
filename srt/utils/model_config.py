"""The model that a checkpoint folder describes: config.json, old or new, and generation_config.json. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from srt.utils.config_values import names, positive_int, shown, token_ids
from srt.utils.families.encoders import Encoder, encoder_of, num_positions
from srt.utils.families.family import ConfigReader, Family
from srt.utils.families.library import LibraryConfigReader
from srt.utils.families.registry import FAMILIES, family_of
from srt.utils.layer_spec import NO_SCALES, Experts, FastPath, FeedForward, LatentAttention, LayerSpec, NormSpec, Scales
from srt.utils.model_error import ModelError as ModelError
from srt.utils.pooling_config import PoolingSpec, generating_architecture, read_pooling
from srt.utils.quantization import WHAT_WORKS, WeightFormats, read_formats
from srt.utils.rope_config import rope_parameters

if TYPE_CHECKING:
    from srt.server_args import ServerArgs

DTYPES = ("float32", "bfloat16", "float16")
Implementation = Literal["srt", "transformers"]

READ_KEYS = frozenset(
    "architectures model_type hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
    " intermediate_size vocab_size hidden_act rms_norm_eps tie_word_embeddings attention_bias mlp_bias"
    " max_position_embeddings original_max_position_embeddings rope_parameters rope_scaling rope_theta"
    " partial_rotary_factor use_sliding_window sliding_window max_window_layers layer_types quantization_config dtype"
    " torch_dtype bos_token_id eos_token_id num_nextn_predict_layers layer_norm_eps hidden_activation query_pre_attn_scalar"
    " attn_logit_softcapping final_logit_softcapping logit_scale embedding_multiplier logits_scaling"
    " residual_multiplier attention_multiplier no_rope_layers no_rope_layer_interval sliding_window_pattern"
    " rope_local_base_freq use_bidirectional_attention num_experts num_local_experts num_experts_per_tok"
    " moe_intermediate_size shared_expert_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers clip_qkv"
    " n_routed_experts n_shared_experts n_group topk_group routed_scaling_factor first_k_dense_replace use_qk_norm"
    " q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim rope_interleave topk_method scoring_func"
    " moe_layer_freq swiglu_alpha swiglu_limit qkv_bias is_causal id2label num_labels".split()
)
"""Keys of config.json that have an effect. Overriding any other key is refused, because it would be ignored."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model as it will run, with every default resolved and every override applied. Equal on all ranks."""

    architecture: str
    model_type: str
    implementation: Implementation
    """Whose layers run the model: ours, or those of the library transformers."""
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    """What each layer computes. A window that would hide nothing is None here. Empty if the library's layers run the model: only a worker
    can ask the library, and it replaces this field."""
    vocab_size: int
    norm: NormSpec
    scales: Scales
    tie_word_embeddings: bool
    max_position_embeddings: int
    context_length: int
    """Largest number of positions of a request, prompt and output together."""
    torch_dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    num_mtp_layers: int
    """Extra layers for multi-token prediction that the checkpoint may hold; they are not loaded."""
    weight_formats: WeightFormats
    """How the checkpoint's linear layers are stored."""
    sampling_defaults: dict[str, float | int]
    """Defaults from generation_config.json for requests: any of temperature, top_k, top_p, min_p, repetition_penalty."""
    pooling: PoolingSpec | None = None
    """How an embedding model or a classifier makes a vector of a text; None for a model that generates text."""
    is_encoder: bool = False
    """Whether tokens see all others of their text. Nothing is kept of them then, and each text is computed whole."""

    @classmethod
    def served_from(cls, folder: Path | str, args: ServerArgs) -> ModelConfig:
        """Read the folder as a server with these options serves it."""
        return cls.from_folder(
            folder,
            args.model_overrides(),
            args.context_length,
            args.quantization,
            args.model_impl,
            is_embedding=args.is_embedding,
        )

    @classmethod
    def from_folder(
        cls,
        path: str | Path,
        overrides: Mapping[str, Any] | None = None,
        context_length: int | None = None,
        quantization: str | None = None,
        model_impl: str = "auto",
        *,
        is_embedding: bool = False,
    ) -> ModelConfig:
        """Read the folder, with `overrides` replacing keys of config.json; ModelError for anything wrong or unsupported.

        `quantization` and `model_impl` are those of the options. "auto" leaves architectures that are not ours to the library.
        With `is_embedding` the model shall embed texts even if its checkpoint does not say that it does.
        """
        folder, overrides = Path(path), overrides or {}
        stated = _read_json(folder / "config.json", required=True)
        architecture = _architecture({**stated, **overrides})
        pooling = read_pooling(folder, architecture, {**stated, **overrides}, is_asked_for=is_embedding)
        encoder = encoder_of(architecture)
        if encoder is not None and pooling is not None and model_impl != "srt":
            config = cls._of_encoder(
                encoder, architecture, {**stated, **overrides}, folder, context_length, quantization
            )
            return replace(config, pooling=pooling)
        if pooling is not None:
            family, raw = _pooling_family(architecture, model_impl), _merged(stated, overrides)
            config = cls._of_family(family, raw, folder, context_length, quantization)
            # There is no output layer. One that shares the embedding's weight takes no memory.
            return replace(config, architecture=architecture, tie_word_embeddings=True, pooling=pooling)
        if encoder is not None:
            raise ModelError(
                f"{architecture} is an encoder, which generates no text: embed texts with it by --is-embedding."
            )
        if model_impl == "transformers" or (model_impl == "auto" and architecture not in FAMILIES):
            raw = {**stated, **overrides}
            return cls._of_library(architecture, raw, folder, context_length, quantization)
        raw = _merged(stated, overrides)
        return cls._of_family(family_of(architecture), raw, folder, context_length, quantization)

    @classmethod
    def of_values(cls, folder: Path, architecture: str, values: Mapping[str, Any]) -> ModelConfig:
        """Read values like those of a config.json of this architecture, which `folder` holds in another form."""
        return cls._of_family(family_of(architecture), _merged(values, {}), folder, None, None)

    @classmethod
    def _of_family(
        cls,
        family: Family,
        raw: Mapping[str, Any],
        folder: Path,
        context_length: int | None,
        quantization: str | None,
    ) -> ModelConfig:
        reader = ConfigReader(raw, family)
        layers = family.read_layers(reader)
        context_length = _context_length(context_length, reader.max_position_embeddings, layers)
        layers = without_useless_windows(layers, context_length)
        return cls(
            architecture=family.architecture,
            implementation="srt",
            hidden_size=reader.hidden_size,
            layers=tuple(_with_fast_paths(layer, family) for layer in layers),
            vocab_size=reader.positive_int("vocab_size"),
            norm=NormSpec(family.norm, reader.positive_number(family.eps_key, 1e-6)),
            scales=family.read_scales(reader),
            tie_word_embeddings=reader.flag("tie_word_embeddings"),
            max_position_embeddings=reader.max_position_embeddings,
            context_length=context_length,
            weight_formats=_weight_formats(raw, quantization, layers),
            **_outside_the_layers(raw, folder),
        )

    @classmethod
    def _of_library(
        cls,
        architecture: str,
        raw: Mapping[str, Any],
        folder: Path,
        context_length: int | None,
        quantization: str | None,
    ) -> ModelConfig:
        """Read what all processes need to know. The library applies norms, factors and ties by itself, so they are not described here."""
        reader = LibraryConfigReader(raw)
        return cls(
            architecture=architecture,
            implementation="transformers",
            hidden_size=reader.hidden_size,
            layers=(),
            vocab_size=reader.vocab_size,
            norm=NormSpec("rms", 1e-6),
            scales=NO_SCALES,
            tie_word_embeddings=False,
            max_position_embeddings=reader.max_position_embeddings,
            context_length=_context_length(context_length, reader.max_position_embeddings, ()),
            weight_formats=_plain_formats(architecture, raw, quantization),
            **_outside_the_layers(raw, folder),
        )

    @classmethod
    def _of_encoder(
        cls,
        encoder: Encoder,
        architecture: str,
        raw: Mapping[str, Any],
        folder: Path,
        context_length: int | None,
        quantization: str | None,
    ) -> ModelConfig:
        """Read an encoder. Its context has one position more than its texts, for the token that is drawn behind each and never computed."""
        length = num_positions(encoder, raw) + 1
        config = cls._of_library(
            architecture, {**raw, "max_position_embeddings": length}, folder, context_length, quantization
        )
        return replace(config, is_encoder=True)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def fast_paths(self) -> set[FastPath]:
        """The fast paths that can run all layers. PyTorch's compiler reads plain matrices, so it cannot run quantised weights."""
        paths = set.intersection(*(set(layer.fast_paths) for layer in self.layers)) if self.layers else set()
        return paths if self.weight_formats.is_plain else paths - {"compiled"}

    def config_hash(self) -> str:
        """Return a hash of all fields above, which processes compare in the handshake to be sure that they run the same model."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def check_tp(self, tp_size: int, ep_size: int = 1, expert_ranks: int = 0) -> None:
        """Raise ModelError if the layers cannot be split over `tp_size` ranks, of which `ep_size` groups divide the experts.

        `expert_ranks`, unless 0, are the ranks that share experts if these are more, with several attention groups.
        """
        for layer in dict.fromkeys(self.layers):
            heads, kv_heads = layer.attention.num_heads, layer.attention.num_kv_heads
            if heads % tp_size:
                raise ModelError(
                    f"--tp {tp_size} does not divide the model's {heads} query heads: choose another --tp."
                )
            if kv_heads % tp_size and tp_size % kv_heads:
                raise ModelError(
                    f"--tp {tp_size} neither divides the model's {kv_heads} KV heads nor is a multiple of them:"
                    " choose another --tp."
                )
            expert_ranks = expert_ranks or tp_size
            for size, num_ranks in _split_sizes(layer.feed_forward, tp_size, ep_size, expert_ranks):
                if size % num_ranks:
                    groups = "" if num_ranks in (tp_size, expert_ranks) else f" with --ep-size {ep_size}"
                    raise ModelError(
                        f"--tp {expert_ranks}{groups} does not divide the model's intermediate size, {size}: choose another --tp."
                    )
            if isinstance(layer.feed_forward, Experts) and layer.feed_forward.routing.num_experts % ep_size:
                raise ModelError(
                    f"--ep-size {ep_size} does not divide the model's {layer.feed_forward.routing.num_experts} experts: choose"
                    " another --ep-size."
                )


def _split_sizes(spec: FeedForward | Experts, tp_size: int, ep_size: int, expert_ranks: int) -> list[tuple[int, int]]:
    """Return the sizes of a layer that ranks share, each with the number of ranks that it must divide by."""
    if isinstance(spec, FeedForward):
        return [(spec.size, tp_size)]
    shared = [] if spec.shared is None else [(spec.shared.size, expert_ranks)]
    return [(spec.size, expert_ranks // ep_size), *shared]


def _outside_the_layers(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the fields that have nothing to do with layers."""
    generation = _read_json(folder / "generation_config.json", required=False)
    return {
        "model_type": str(raw.get("model_type") or ""),
        "torch_dtype": _dtype(raw),
        "bos_token_id": _first(token_ids("config.json", raw, "bos_token_id")),
        "eos_token_ids": token_ids("generation_config.json", generation, "eos_token_id")
        or token_ids("config.json", raw, "eos_token_id"),
        "num_mtp_layers": positive_int(raw, "num_nextn_predict_layers") if raw.get("num_nextn_predict_layers") else 0,
        "sampling_defaults": _sampling_defaults(generation),
    }


def _merged(stated: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the overrides on top, and all RoPE parameters under `rope_parameters`."""
    unread = sorted(set(overrides) - READ_KEYS)
    if unread:
        raise ModelError(f"--json-model-override-args: {unread[0]} has no effect on any supported model.")
    raw = {**stated, **overrides, "rope_parameters": rope_parameters(stated, overrides)}
    if "torch_dtype" in overrides and "dtype" not in overrides:
        raw["dtype"] = overrides["torch_dtype"]
    return raw


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise ModelError(f"{path.parent} has no {path.name}: it is not a Hugging Face checkpoint folder.") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object.")
    return content


def _architecture(raw: Mapping[str, Any]) -> str:
    architectures = names(raw, "architectures")
    if not architectures:
        raise ModelError("config.json names no model in architectures.")
    return architectures[0]


def _pooling_family(architecture: str, model_impl: str) -> Family:
    """Return the family of a model that pools. Its layers are those of a model that generates text."""
    if model_impl == "transformers":
        raise ModelError("--model-impl transformers embeds no texts: leave the option out.")
    base = generating_architecture(architecture)
    return FAMILIES[base] if base in FAMILIES else family_of(architecture)


def _with_fast_paths(layer: LayerSpec, family: Family) -> LayerSpec:
    return layer if family.fast_paths is None else replace(layer, fast_paths=family.fast_paths(layer))


def without_useless_windows(layers: Sequence[LayerSpec], context_length: int) -> list[LayerSpec]:
    """Return the layers without those windows that hide no position of the longest request."""
    return [_without_useless_window(layer, context_length) for layer in layers]


def _without_useless_window(layer: LayerSpec, context_length: int) -> LayerSpec:
    attention = layer.attention
    if isinstance(attention, LatentAttention) or attention.window is None or attention.window < context_length:
        return layer
    return replace(layer, attention=replace(attention, window=None))


def _context_length(asked: int | None, max_position_embeddings: int, layers: Sequence[LayerSpec]) -> int:
    """Return the model's stated context, or the one asked for: it may be shorter, or as long as the RoPE scaling allows."""
    ropes = [layer.attention.rope for layer in layers if layer.attention.rope is not None]
    limit = min((rope.context_limit(max_position_embeddings) for rope in ropes), default=max_position_embeddings)
    if asked is None:
        return max_position_embeddings
    if asked < 1:
        raise ModelError(f"--context-length must be at least 1, not {asked}.")
    if asked > limit:
        raise ModelError(
            f"--context-length {asked} is more than the {limit} positions that the model supports: choose a shorter one."
        )
    return asked


def _dtype(raw: Mapping[str, Any]) -> str:
    value = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"config.json: dtype {shown(value)} is not supported; supported are {', '.join(DTYPES)}.")
    return name


def _weight_formats(raw: Mapping[str, Any], quantization: str | None, layers: Sequence[LayerSpec]) -> WeightFormats:
    """Return the formats of our own layers; ModelError if there is none for the way in which the checkpoint stores its experts."""
    formats = read_formats(raw, quantization)
    layouts = {layer.feed_forward.layout for layer in layers if isinstance(layer.feed_forward, Experts)}
    if formats.method == "mxfp4" and layouts != {"transposed"}:
        raise ModelError(
            f"config.json: quant_method 'mxfp4' is supported for the experts of gpt-oss only: {WHAT_WORKS}."
        )
    if formats.method not in (None, "mxfp4") and "transposed" in layouts:
        raise ModelError(
            f"The experts of gpt-oss are not supported in {formats.method}: choose its checkpoint in mxfp4 or in bfloat16,"
            " without --quantization."
        )
    is_stored = any(form.layout != "plain" for _, form in formats.groups)
    if is_stored and "input_output" in layouts:
        raise ModelError(
            f"Experts that are stored in one tensor for all are not supported in {formats.method}: choose an unquantised"
            " checkpoint, which --quantization fp8 or int8 quantises while it is loaded."
        )
    return formats


def _plain_formats(architecture: str, raw: Mapping[str, Any], quantization: str | None) -> WeightFormats:
    """Return the formats of weights that are not quantised; ModelError if they are."""
    formats = read_formats(raw, quantization)
    if not formats.is_plain:
        raise ModelError(
            f"{architecture} is run by the library transformers, for which quantised weights ({formats.method}) are not supported:"
            " choose an unquantised checkpoint, without --quantization."
        )
    return formats


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None


def _sampling_defaults(generation: Mapping[str, Any]) -> dict[str, float | int]:
    """Return the repetition penalty always, and the other defaults only if the file enables sampling, as in transformers.

    Ranges are not checked here: a server may be told not to use these defaults, so the code that uses them checks.
    """
    keys = ["repetition_penalty"]
    if generation.get("do_sample"):
        keys += ["temperature", "top_k", "top_p", "min_p"]
    defaults: dict[str, float | int] = {}
    for key in keys:
        value = generation.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"generation_config.json: {key} must be a number, not {shown(value)}.")
        if key == "top_k" and isinstance(value, float) and value.is_integer():
            value = int(value)  # some programs write every number as a float, such as 50.0
        defaults[key] = value
    if defaults.get("top_k") == 0:
        defaults["top_k"] = -1  # 0 means "no filter" in transformers
    return defaults
