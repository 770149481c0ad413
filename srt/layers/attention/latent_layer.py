"""The attention of one layer whose memory holds latents (MLA), with the two ways in which a backend may compute it.

Ordinary: `expand` makes the heads' keys and values of the latents. This is cheaper where many queries see the same latents.
Absorbed: `absorb` takes the queries into the space of latents, where all heads share one key, the latent, and one value, its first
part; `lift` makes the heads' results of those values. This reads the memory once for all heads, as decode steps want.
"""

from __future__ import annotations

import torch
from torch import Tensor

from srt.layers.attention.radix_attention import RadixAttention
from srt.layers.linear import ColumnParallelLinear
from srt.layers.ops import LayerOps
from srt.layers.quantization.weight import PlainWeight
from srt.layers.weights import ColumnPart
from srt.utils.layer_spec import LatentAttention


class LatentExpansion(ColumnParallelLinear):
    """kv_b_proj: for each head of this rank the rows that make its keys of a latent, then those that make its values."""

    def __init__(self, spec: LatentAttention, num_heads: int, rank: int, ops: LayerOps) -> None:
        """The rank `rank` has `num_heads` heads."""
        per_head = spec.nope_dim + spec.value_dim
        size = num_heads * per_head
        part = ColumnPart("kv_b_proj", spec.num_heads * per_head, rank * size, size)
        super().__init__(spec.latent_rank, [part], False, ops)
        self._per_head = per_head
        self._nope_dim = spec.nope_dim

    def finish(self, dtype: torch.dtype, device: torch.device) -> None:
        """Unpack a quantised weight, because its parts for keys and for values are multiplied from either side."""
        if self.weight.matrix is None:
            self.weight = PlainWeight.of(self.weight.unpacked(dtype, device))

    def take_finished_form(self) -> None:
        if self.weight.matrix is None:
            with torch.device("meta"):
                self.weight = PlainWeight(*self.weight.shape)

    @property
    def parts_of_heads(self) -> tuple[Tensor, Tensor]:
        """The matrices [heads, nope_dim, latent_rank] of keys and [heads, value_dim, latent_rank] of values."""
        matrix = self.weight.matrix
        assert matrix is not None, "the weight is used before it is finished"
        heads = matrix.view(-1, self._per_head, self.in_features)
        return heads[:, : self._nope_dim], heads[:, self._nope_dim :]


class LatentLayer(RadixAttention):
    """Attention over latents. A query has `head_dim` elements, the last `rope_dim` of which are rotated. Has no weights of its own."""

    def __init__(self, num_heads: int, spec: LatentAttention, layer_id: int, expansion: LatentExpansion) -> None:
        super().__init__(num_heads, spec.head_dim, 1, layer_id, spec.scale)
        self.value_dim = spec.value_dim
        self.latent_rank = spec.latent_rank
        self.latent_dim = spec.latent_dim
        self._nope_dim = spec.nope_dim
        self._expansion: tuple[LatentExpansion] = (expansion,)  # not a part of this module: its weight is loaded once

    def split_packed(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split packed rows (query heads, latents, first parts of latents)."""
        sizes = self.num_heads * self.head_dim, self.latent_dim, self.latent_rank
        q, latents, values = qkv.split(sizes, dim=-1)
        return q, latents, values

    def split_kv_heads(self, rows: Tensor) -> Tensor:
        """View latents, or their first parts, [tokens, size] as those of one head: [tokens, 1, size]."""
        return rows.unsqueeze(1)

    def absorb(self, q: Tensor) -> Tensor:
        """Take queries [rows, heads, head_dim] into the space of latents: [rows, heads, latent_dim]."""
        return torch.cat(self.absorb_parts(q), dim=-1)

    @property
    def matrices(self) -> tuple[Tensor, Tensor]:
        """The heads' matrices [heads, nope_dim, latent_rank] for keys and [heads, value_dim, latent_rank] for values."""
        return self._expansion[0].parts_of_heads

    def split_queries(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Split queries [rows, heads, head_dim] into what is absorbed and what is rotated."""
        plain, rotated = q.split((self._nope_dim, self.head_dim - self._nope_dim), dim=-1)
        return plain, rotated

    def absorb_parts(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two parts of `absorb`, [rows, heads, latent_rank] and the rotated one, as views of any strides."""
        keys, _ = self.matrices
        plain, rotated = self.split_queries(q)
        return torch.bmm(plain.transpose(0, 1), keys).transpose(0, 1), rotated

    def lift(self, attended: Tensor) -> Tensor:
        """Make the heads' results [rows, heads, value_dim] of weighted sums of latents [rows, heads, latent_rank]."""
        _, values = self.matrices
        return torch.bmm(attended.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)

    def lift_into(self, attended: Tensor, out: Tensor) -> None:
        """Store what `lift` returns in `out`."""
        _, values = self.matrices
        torch.bmm(attended.transpose(0, 1), values.transpose(1, 2), out=out.transpose(0, 1))

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Make the heads' keys [rows, heads, head_dim] and values [rows, heads, value_dim] of latents [rows, latent_dim]."""
        compressed, rotated = latents.split((self.latent_rank, self.latent_dim - self.latent_rank), dim=-1)
        made: Tensor = self._expansion[0](compressed)
        plain, values = made.unflatten(-1, (self.num_heads, -1)).split((self._nope_dim, self.value_dim), dim=-1)
        return torch.cat((plain, rotated.unsqueeze(1).expand(-1, self.num_heads, -1)), dim=-1), values


def latent_layer(layer: object) -> LatentLayer:
    """Return the layer, which a backend of latents was given."""
    assert isinstance(layer, LatentLayer), layer
    return layer
