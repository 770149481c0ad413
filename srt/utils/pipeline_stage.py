"""Which layers each stage of a pipeline runs. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from srt.utils.errors import StartError

UNDIVIDED: Final = {
    "enable_torch_compile": "--enable-torch-compile",
    "enable_deterministic_inference": "--enable-deterministic-inference",
    "speculative_algorithm": "--speculative-algorithm",
    "enable_lora": "--enable-lora",
    "enable_memory_saver": "--enable-memory-saver",
    "lora_paths": "--lora-paths",
}
"""Options that a model divided into stages does not support."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The part of a model that one rank runs: some of its layers, and what stands before the first layer or behind the last."""

    index: int
    num_stages: int
    layers: range

    @classmethod
    def whole(cls, num_layers: int) -> Stage:
        """Return the only stage of a model that is not divided."""
        return cls(0, 1, range(num_layers))

    @property
    def is_first(self) -> bool:
        """Whether the stage embeds the tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage computes logits, and draws."""
        return self.index == self.num_stages - 1

    def has_embedding(self, is_tied: bool) -> bool:
        """Return whether the stage holds the embedding's weight. A tied one is the output layer's weight, too."""
        return self.is_first or (self.is_last and is_tied)


def stages_of(num_layers: int, num_stages: int, counts: Sequence[int] = ()) -> list[Stage]:
    """Divide the layers, in order; `counts`, if not empty, are those of --pp-layer-partition. StartError if they do not fit.

    By default the stages have equal numbers of layers, but for one more in the first ones. The last stage has the output layer as well.
    """
    if num_stages > num_layers:
        raise StartError(
            f"--pp-size {num_stages} is more than the {num_layers} layers of the model: choose at most {num_layers}."
        )
    if not counts:
        least, more = divmod(num_layers, num_stages)
        counts = [least + (stage < more) for stage in range(num_stages)]
    if sum(counts) != num_layers:
        raise StartError(
            f"--pp-layer-partition {' '.join(map(str, counts))} has {sum(counts)} layers in all, but the model has {num_layers}."
        )
    ends = list(accumulate(counts))
    return [
        Stage(index, num_stages, range(end - count, end))
        for index, (end, count) in enumerate(zip(ends, counts, strict=True))
    ]


def attention_groups_obstacle(values: Mapping[str, Any]) -> str | None:
    """Return a sentence about options that do not work with --enable-dp-attention; None if all work, or if it was not asked for."""
    if not values["enable_dp_attention"]:
        return None
    option, tp_size, dp_size = "--enable-dp-attention", values["tp_size"], values["dp_size"]
    if dp_size == 1:
        return f"{option} needs --dp-size of at least 2, the number of attention groups."
    if tp_size % dp_size:
        return (
            f"{option} divides the {tp_size} ranks of --tp into {dp_size} groups of --dp-size, which is not possible: choose a"
            " --tp that is a multiple of --dp-size."
        )
    for name in ("pp_size", "nnodes"):
        if values[name] > 1:
            return (
                f"{option} works with all layers in one process and on one host, not with --{name.replace('_', '-')}."
            )
    for name, what in UNDIVIDED.items():
        if values[name]:
            return f"{what} does not work with {option}: leave one of the two out."
    if values["load_format"] == "sharded_state":
        return f"--load-format sharded_state does not work with {option}: start from a checkpoint."
    if values["chunked_prefill_size"] == -1:
        return f"{option} needs a limit of prompt tokens in a step: choose another --chunked-prefill-size than -1."
    return None


def rank_obstacle(values: Mapping[str, Any]) -> str | None:
    """Return a sentence about options that do not work with these ranks; None if all work. `values` are the options."""
    tp_size, num_stages, counts = values["tp_size"], values["pp_size"], values["pp_layer_partition"]
    if (obstacle := attention_groups_obstacle(values)) is not None:
        return obstacle
    if values["enable_torch_compile"] and tp_size > 1:
        return f"--enable-torch-compile works on one GPU only, not with --tp {tp_size}."
    if tp_size % values["ep_size"]:
        return f"--ep-size {values['ep_size']} must divide --tp, which is {tp_size}: choose another of the two."
    if num_stages > 1:
        for name, what in UNDIVIDED.items():
            if values[name]:
                return f"{what} works with all layers in one process only, not with --pp-size {num_stages}."
    if counts and len(counts) != num_stages:
        return f"--pp-layer-partition has {len(counts)} numbers of layers, but --pp-size is {num_stages}."
    if any(count < 1 for count in counts):
        return f"--pp-layer-partition takes numbers of at least 1, not {min(counts)}."
    return None
