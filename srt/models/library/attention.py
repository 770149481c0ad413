"""Attention over the paged KV memory, called by the layers of the library in place of the library's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from srt.layers.attention.radix_attention import RadixAttention

if TYPE_CHECKING:
    from srt.model_executor.forward_batch_info import ForwardBatch

PAGED = "srt_paged"
"""The name under which the library knows this attention. It has no mask of that name, so the library computes none."""


class RunningStep:
    """The batch of the forward pass that runs; the library's layers do not pass it on."""

    def __init__(self) -> None:
        self.batch: ForwardBatch | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """What one attention module of the library needs to attend."""

    attention: RadixAttention
    step: RunningStep

    @staticmethod
    def give(module: nn.Module, attention: RadixAttention, step: RunningStep) -> None:
        """Let `module` attend by `attention`."""
        module.srt_place = Place(attention, step)  # type: ignore[assignment]  # the library calls with the module alone


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Store keys and values [1, KV heads, tokens, head_dim], and attend; the result is [1, tokens, heads, head_dim].

    Masks and factors among the other arguments were read when the model was traced, and are the same in every call.
    """
    place: Place = module.srt_place  # type: ignore[assignment]
    batch = place.step.batch
    assert batch is not None, "the library's layers run outside a step"
    q, k, v = (heads[0].transpose(0, 1).flatten(1) for heads in (query, key, value))
    out: Tensor = place.attention(q, k, v, batch)
    return out.view(1, len(out), -1, query.shape[-1]), None


def register() -> None:
    """Tell the library of this attention."""
    from transformers import AttentionInterface

    AttentionInterface.register(PAGED, attend)
