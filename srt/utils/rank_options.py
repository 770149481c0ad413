"""The options that say how many ranks a server has, and what they share."""

from __future__ import annotations

from dataclasses import dataclass

from srt.utils.lora_options import LoraOptions
from srt.utils.option import option

DEVICE = "Devices and kernels"


@dataclass(frozen=True, slots=True)
class RankOptions(LoraOptions):
    """The options of ranks as the user gave them; a part of ServerArgs."""

    tp_size: int = option(
        1, "GPUs (or CPU processes) that share each layer", group=DEVICE, aliases=("--tp", "--tensor-parallel-size")
    )
    dp_size: int = option(
        1,
        "replicas of the model behind one port, each on --tp-size GPUs (or CPU processes) of its own",
        group=DEVICE,
        aliases=("--dp", "--data-parallel-size"),
    )
    pp_size: int = option(
        1, "stages that divide the layers", group=DEVICE, aliases=("--pp", "--pipeline-parallel-size")
    )
    pp_layer_partition: tuple[int, ...] = option((), "numbers of layers of the stages (default: even)", group=DEVICE)
    ep_size: int = option(
        1, "groups of --tp ranks that divide the experts", group=DEVICE, aliases=("--ep", "--expert-parallel-size")
    )
    enable_dp_attention: bool = option(
        False,
        "divide the --tp-size ranks into --dp-size groups: all share the experts, and each runs attention for requests of its own",
        group=DEVICE,
    )
    load_balance_method: str = option(
        "auto",
        "replica for a request; auto: one that has its prefix, else the one with fewer requests; round_robin: in turn;"
        " total_requests: the one with the fewest requests; total_tokens: the one with the fewest tokens",
        group=DEVICE,
        choices=("auto", "round_robin", "total_requests", "total_tokens"),
    )

    @property
    def attention_ranks(self) -> int:
        """Ranks that share a layer's attention: all of --tp-size, or those of one attention group."""
        return self.tp_size // self.dp_size if self.enable_dp_attention else self.tp_size

    @property
    def num_ranks(self) -> int:
        """Workers of a replica: those that share layers, in each stage. With attention groups, a group counts as a replica."""
        return self.attention_ranks * self.pp_size
