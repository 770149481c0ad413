"""What each layer of a model computes, as numbers and names: read from config.json, without torch.

Everything that depends on a model's layers asks their specs: memory, attention, loading, graphs. Layers of one model may differ.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from srt.utils.rope_config import RopeConfig

FastPath = Literal["fused", "compiled", "resident"]
"""Paths that run a layer faster than `srt/models/plain_decoder.py` does: "fused" are the operations of `srt/models/decoder.py`, "compiled"
is the code of --enable-torch-compile, "resident" the kernel that runs all layers of a decode step."""

Activation = Literal["silu", "gelu_tanh"]
HeadNorms = Literal["head", "width"]
NormKind = Literal["rms", "rms_plus_one", "layer"]


@dataclass(frozen=True, slots=True)
class NormSpec:
    """The norms of a model, which are all of one kind."""

    kind: NormKind
    """"rms" multiplies x / rms(x) by the weight w, "rms_plus_one" by 1 + w; "layer" is LayerNorm without a bias."""
    eps: float


@dataclass(frozen=True, slots=True)
class Scales:
    """Factors outside the layers."""

    embedding: float = 1.0
    """Factor of the embedding, rounded to the model's dtype."""
    logits: float = 1.0
    logit_softcap: float | None = None
    """c in c * tanh(logits / c)."""


NO_SCALES: Final = Scales()


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """The attention of one layer. Head counts are those of the whole model, before it is split over ranks."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor of the products of queries and keys."""
    rope: RopeConfig | None
    """None: queries and keys are not rotated."""
    window: int | None = None
    """Positions that a token sees, its own included. None: all."""
    softcap: float | None = None
    """c in c * tanh(score / c), which limits the scaled products before the softmax."""
    norms: HeadNorms | None = None
    """Norms of queries and keys before the rotation: of each head by itself, or over the width of all heads."""
    has_sinks: bool = False
    """Whether each head has a sink: a score that takes its share of the softmax, but adds nothing to the result."""
    qkv_bias: bool = False
    o_bias: bool = False
    is_one_tensor: bool = False
    """Whether the checkpoint stores queries, keys and values as one tensor, qkv_proj."""

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def rope_dim(self) -> int:
        """Size of the vectors that `rope` describes: whole heads, though it may leave a part of them as it is."""
        return self.head_dim

    def kv_heads_per_rank(self, tp_size: int) -> int:
        """Return the KV heads in one rank's memory; heads are replicated if there are more ranks than heads."""
        return max(1, self.num_kv_heads // tp_size)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention whose KV memory holds one latent vector per token in place of the keys and values of all heads (MLA).

    A latent is `latent_rank` numbers, of which a matrix makes the keys and values of all heads, and `rope_dim` rotated numbers, which are
    the last part of every head's key. Every rank holds the whole latents, whatever its heads.
    """

    num_heads: int
    query_rank: int | None
    """Size of the normed vector of which queries are made. None: they are made of the hidden states."""
    latent_rank: int
    nope_dim: int
    """Elements of a head's queries and keys that are not rotated; they come first."""
    rope_dim: int
    """Elements that are rotated, by `rope`."""
    value_dim: int
    scale: float
    rope: RopeConfig

    @property
    def num_kv_heads(self) -> int:
        return 1

    @property
    def window(self) -> None:
        return None

    @property
    def head_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        return self.latent_rank + self.rope_dim


AttentionKind = SelfAttention | LatentAttention


@dataclass(frozen=True, slots=True)
class FeedForward:
    """The gated MLP of one layer: down(activation(gate(x)) * up(x))."""

    size: int
    """Outputs of `gate` and of `up`."""
    bias: bool = False
    activation: Activation = "silu"
    is_one_tensor: bool = False
    """Whether the checkpoint stores `gate` and `up` as one tensor, gate_up_proj."""

    @property
    def name(self) -> str:
        """Name of the whole in the checkpoint."""
        return "mlp"

    @property
    def split_sizes(self) -> list[int]:
        """The sizes that must divide by the number of ranks."""
        return [self.size]


Scoring = Literal["softmax", "sigmoid"]
ExpertLayout = Literal["gate_up_down", "w1_w3_w2", "input_output", "transposed"]


@dataclass(frozen=True, slots=True)
class Routing:
    """How the router of a layer chooses experts for a token, and weights their results."""

    num_experts: int
    top_k: int
    """Experts of a token."""
    scoring: Scoring = "softmax"
    is_renormalised: bool = True
    """Whether the weights of a token's experts are divided by their sum."""
    num_groups: int = 1
    num_chosen_groups: int = 1
    """Groups of neighbouring experts that a token chooses from: those with the largest sums of their best scores."""
    num_group_scores: Literal[1, 2] = 2
    """How many of a group's best scores are added."""
    scale: float = 1.0
    """Factor of all weights."""
    has_bias: bool = False
    """Whether the router's logits have a bias."""
    has_correction: bool = False
    """Whether a correction is added to the scores for the choice, but not for the weights."""


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """A gated MLP beside the experts, which every token takes."""

    name: str
    """Its name in the checkpoint."""
    size: int
    gate: str | None = None
    """Name of the layer whose sigmoid weights the result. None: the weight is 1."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: gated MLPs, of which every token takes a few."""

    routing: Routing
    size: int
    """Outputs of `gate` and of `up` of one expert."""
    shared: SharedExpert | None = None
    layout: ExpertLayout = "gate_up_down"
    """How the checkpoint stores them. "gate_up_down" and "w1_w3_w2" name the tensors of each expert. The others are two tensors for all
    experts: "input_output" as they are multiplied, "transposed" with rows and columns swapped, gates and ups in turns."""
    bias: bool = False
    limit: float | None = None
    """None: the activation is silu(gate) * up. Else it is that of gpt-oss, with gates and ups limited to this size."""
    name: str = "mlp"
    """Name of the whole in the checkpoint."""
    router_name: str = "gate"

    @property
    def split_sizes(self) -> list[int]:
        """The sizes that must divide by the number of ranks."""
        return [self.size] if self.shared is None else [self.size, self.shared.size]


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The places of a layer's norms, with their names in the checkpoint; None where there is no norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_feed_forward: str | None = "post_attention_layernorm"
    after_feed_forward: str | None = None

    @property
    def names(self) -> list[str]:
        places = self.before_attention, self.after_attention, self.before_feed_forward, self.after_feed_forward
        return [name for name in places if name is not None]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer of a decoder."""

    attention: AttentionKind
    feed_forward: FeedForward | Experts
    norms: LayerNorms = LayerNorms()
    is_parallel: bool = False
    """Whether the MLP reads what attention reads, instead of the stream after attention."""
    residual_scale: float = 1.0
    """Factor of what attention and MLP add to the stream."""
    fast_paths: tuple[FastPath, ...] = ()
    """The paths that can run this layer. The plain decoder can run every layer."""

    @property
    def self_attention(self) -> SelfAttention:
        """The attention of a layer that is known to have no latents."""
        assert isinstance(self.attention, SelfAttention), self.attention
        return self.attention


def num_distinct_layers(layers: Sequence[LayerSpec], formats: Sequence[Hashable]) -> int:
    """Return how many of the first layers use all kernels: two or more. The weights of layer i are stored in `formats[i]`.

    One of each kind is among them. A feed-forward part may prepare its output for the layer behind it. So of each kind of part that has a
    layer behind it, one that has is among them, and their last part is of the kind of the last of all.
    """
    kinds = _numbered(zip(layers, formats, strict=True))
    parts = _numbered((layer.feed_forward, form) for layer, form in zip(layers, formats, strict=True))

    def kernels_of(count: int) -> tuple[set[int], set[int], set[int]]:
        return set(kinds[:count]), set(parts[: count - 1]), set(parts[count - 1 : count])

    of_all = kernels_of(len(layers))
    for count in range(2, len(layers)):
        if all(map(set.issuperset, kernels_of(count), of_all)):
            return count
    return max(2, len(layers))


def _numbered(kinds: Iterable[Hashable]) -> list[int]:
    """Return a number for each of these, the same for equal ones."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(kind, len(numbers)) for kind in kinds]
