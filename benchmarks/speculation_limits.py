"""The least time of a decode step with drafts: that for reading the weights and keys, or for the products, of both models."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.limits import Device, Shape
from srt.server_args import ServerArgs
from srt.utils.draft_model import draft_model_args
from srt.utils.eagle3_config import NUM_TAPS, Eagle3Config
from srt.utils.model_config import ModelConfig
from srt.utils.mtp_config import MtpConfig, served_mtp


@dataclass(frozen=True, slots=True)
class RoundShape:
    """The models of a round: one step of the large model, which verifies all drafts, and one step of the drafting model for each draft."""

    model: Shape  # with the weights that fuse its hidden states for a head
    drafter: Shape | None  # None: there are no drafts, or drafting reads no weights
    num_drafts: int

    @classmethod
    def of(cls, args: ServerArgs) -> RoundShape:
        """Return the shape of a server with these options."""
        config = ModelConfig.from_folder(args.model_path, args.model_overrides(), None, args.quantization)
        model, folder = Shape.of_config(config, args.kv_cache_dtype), args.speculative_draft_model_path
        match args.speculative_algorithm:
            case "STANDALONE" if folder is not None:
                small = draft_model_args(args)
                drafter = ModelConfig.from_folder(folder, small.model_overrides(), None, small.quantization)
                return cls(model, Shape.of_config(drafter, small.kv_cache_dtype), args.num_drafts)
            case "EAGLE3" if folder is not None:
                head = Eagle3Config.from_folder(folder)
                fusing = NUM_TAPS * head.target_hidden_size * head.layer.hidden_size
                fused = replace(model, linear_weights=model.linear_weights + fusing)
                return cls(fused, head_shape(head), args.num_drafts)
            case "NEXTN":
                return cls(model, mtp_shape(served_mtp(config)), args.num_drafts)
            case _:
                return cls(model, None, args.num_drafts)

    def round_s(self, device: Device, rows: int, context: float) -> float:
        """Return the least time of a round of `rows` rows, each behind `context` tokens.

        The first step that drafts reads the same as the others, though it also computes what the model accepted since. Drafts are taken
        to be behind as many tokens as the row.
        """
        least_s = self.model.verify_s(device, rows, context, 1 + self.num_drafts)
        if self.drafter is None:
            return least_s
        return least_s + self.num_drafts * self.drafter.decode_s(device, rows, context)


def head_shape(head: Eagle3Config) -> Shape:
    """Return the shape of a head of EAGLE-3: a layer whose queries, keys and values come from two vectors, and an output layer."""
    plain, (layer,) = Shape.of_config(head.layer), head.layer.layers
    spec = layer.self_attention
    second = head.layer.hidden_size * spec.head_dim * (spec.num_heads + 2 * spec.num_kv_heads)
    return replace(plain, linear_weights=plain.linear_weights + second)


def mtp_shape(head: MtpConfig) -> Shape:
    """Return the shape of an MTP layer, which first makes one vector of two."""
    plain, size = Shape.of_config(head.layer), head.layer.hidden_size
    return replace(plain, linear_weights=plain.linear_weights + 2 * size * size)
