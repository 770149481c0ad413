"""Find out what the attention of a library's model computes, by running the model once on the meta device, where nothing is computed.

Every call of attention is recorded with its sizes, factors and mask. What our attention cannot do is refused by name. A forward pass that
reads a tensor's value on the host fails on the meta device, so a model that passes can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from srt.models.library.attention import PAGED, Place
from srt.utils.layer_spec import SelfAttention
from srt.utils.model_error import ModelError

TRACED, ALONE = "srt_traced", "srt_alone"
NUM_TOKENS = 3
MOST_DIFFERENCE = 0.05
"""Limit of the relative difference between hidden states that should be equal: far above rounding in bfloat16."""
HARMLESS = frozenset(
    "position_ids position_embeddings cache_position use_cache output_attentions output_router_logits output_hidden_states"
    " return_dict is_causal deterministic layer_idx".split()
)
"""Further arguments of attention that change nothing when rows are taken apart by position, or that are read otherwise."""


@dataclass(frozen=True, slots=True)
class _Mask:
    """The mask that the library asks for. It travels through the model in place of a tensor."""

    function: Callable[..., Any]
    """Tells for (batch, head, query position, key position) whether the key is seen."""
    local_size: int | None

    def window(self) -> int | None:
        """Return the causal window; None if all earlier positions are seen. ModelError for any other mask."""
        size = self.local_size
        distances = [-1, 0, 1, 2, 5, *((size - 1, size, size + 1) if size else ())]
        last = 3 * (size or 4) + 7
        pairs = [(query, query - one) for query in (last, last - 1, size or 5) for one in distances if query >= one]
        expected = [key <= query and (size is None or query - key < size) for query, key in pairs]
        try:
            zero = torch.tensor(0)
            seen = [bool(self.function(zero, zero, *map(torch.tensor, pair))) for pair in pairs]
        except Exception:
            seen = []  # it depends on more than positions
        same = seen == expected
        if not same:
            raise ModelError("which tokens its attention sees is neither all earlier ones nor a window of them")
        return size


@dataclass(frozen=True, slots=True)
class Call:
    """One call of attention: the module that made it, and what it computes."""

    module: nn.Module
    spec: SelfAttention


_RECORDER: ContextVar[_Recorder] = ContextVar("_RECORDER")
"""The recorder of the trace that runs; the library finds attention by a name alone."""


class _Recorder:
    """Stands in for attention and for the making of masks."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def mask(self, *, mask_function: Callable[..., Any], local_size: int | None = None, **_: Any) -> _Mask:
        return _Mask(mask_function, local_size)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: object = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        sliding_window: int | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Record the call. The mask decides about windows, as in the library's own attention; `sliding_window` repeats it for others."""
        surplus = [name for name, given in others.items() if given is not None and name not in HARMLESS]
        if surplus:
            raise ModelError(f"its attention needs {surplus[0]}, which is not supported")
        if not isinstance(attention_mask, _Mask):
            raise ModelError("its attention adds a mask or a bias of its own")
        if value.shape[-1] != query.shape[-1] or key.shape[-1] != query.shape[-1]:
            raise ModelError(f"its heads have {query.shape[-1]} elements of queries and {value.shape[-1]} of values")
        if dropout or not getattr(module, "is_causal", True):
            raise ModelError("its attention sees later tokens, or drops some at random")
        if key.shape[2] != query.shape[2] or query.shape[1] % key.shape[1]:
            raise ModelError("its attention reads keys that other layers or tokens made")
        if any(call.module is module for call in self.calls):
            raise ModelError("several of its layers share one attention module")
        head_dim = query.shape[-1]
        scale = float(head_dim**-0.5 if scaling is None else scaling)
        spec = SelfAttention(query.shape[1], key.shape[1], head_dim, scale, None, attention_mask.window(), softcap)
        self.calls.append(Call(module, spec))
        return torch.empty_like(query).transpose(1, 2), None


def trace(base: Any, num_layers: int) -> tuple[list[Call], int]:
    """Return the calls of attention in the order of the layers, and the width of the hidden states.

    `base` is the model without its head, on the meta device. It is left with the attention PAGED. ModelError, which ends a sentence that
    names the model, if it cannot run over our attention.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    recorder = _Recorder()
    _RECORDER.set(recorder)
    AttentionInterface.register(TRACED, lambda *args, **given: _RECORDER.get().attend(*args, **given))
    AttentionMaskInterface.register(TRACED, lambda **given: _RECORDER.get().mask(**given))
    tokens = torch.zeros((1, NUM_TOKENS), dtype=torch.int64, device="meta")
    experts = getattr(base.config, "_experts_implementation", None)
    try:
        # Grouped products, which experts do by default, exist on the meta device for bfloat16 alone.
        base.config._experts_implementation = "batched_mm" if experts == "grouped_mm" else experts
        base.config._attn_implementation = TRACED
        # With a mask that hides nothing, the library does not look for the borders of sequences among the positions.
        _run(base, tokens, attention_mask=torch.ones_like(tokens, dtype=torch.bool))
        base.config._attn_implementation = PAGED
        with _attending_alone(base):
            hidden_size = _run(base, tokens).shape[-1]  # as steps run it: without a mask
    finally:
        base.config._attn_implementation, base.config._experts_implementation = PAGED, experts
    calls = recorder.calls
    if len(calls) != num_layers:
        raise ModelError(f"{len(calls)} of its {num_layers} layers have attention that can be replaced")
    return calls, hidden_size


def check_tokens_are_independent(base: Any, device: torch.device) -> None:
    """Raise ModelError if anything but attention takes from one token to another, such as a convolution over the tokens.

    `base` is complete, with its weights on `device`. The tokens of a step belong to several requests, in any order. Their hidden states
    must not depend on that order when attention is replaced by something that treats every token by itself.
    """
    tokens = torch.arange(2, 7, device=device).unsqueeze(0)
    order = torch.tensor([3, 0, 4, 2, 1], device=device)
    with _attending_alone(base):
        hidden, moved = _run(base, tokens), _run(base, tokens[:, order])
    difference = (moved - hidden[:, order]).float().norm() / hidden.float().norm()
    if not difference < MOST_DIFFERENCE:
        raise ModelError("its layers carry something from token to token outside their attention")


@contextmanager
def _attending_alone(base: Any) -> Iterator[None]:
    """Inside, a token's attention gives its own queries."""
    from transformers import AttentionInterface

    AttentionInterface.register(ALONE, _attend_alone)
    base.config._attn_implementation = ALONE
    try:
        yield
    finally:
        base.config._attn_implementation = PAGED


def _attend_alone(module: nn.Module, query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    place: Place | None = getattr(module, "srt_place", None)
    if place is not None and query.shape[1] != place.attention.num_heads:
        raise ModelError(
            f"each rank would attend with {query.shape[1]} heads, not {place.attention.num_heads} (use --tp 1)"
        )
    return query.transpose(1, 2).contiguous(), None


def _run(base: Any, tokens: Tensor, **given: Any) -> Tensor:
    try:
        with torch.inference_mode():
            hidden: Tensor = base(input_ids=tokens, position_ids=tokens, use_cache=False, **given).last_hidden_state
    except ModelError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        if _Mask.__name__ in reason:
            raise ModelError("its attention computes with the mask by itself, and cannot be replaced") from error
        raise ModelError(f"its forward pass cannot be planned ahead ({type(error).__name__}: {reason})") from error
    if hidden.shape[:2] != tokens.shape:
        raise ModelError(f"it makes hidden states of shape {list(hidden.shape)} from {list(tokens.shape)} tokens")
    return hidden
