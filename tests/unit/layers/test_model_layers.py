"""The layers that models are built of, each alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from srt.distributed.parallel_state import TensorParallel
from srt.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from srt.layers.norm import RMSNorm
from srt.layers.ops import TORCH_OPS, LayerOps, Norm, rotate
from srt.layers.rope import RotaryEmbedding, compute_frequencies
from srt.layers.weights import WeightedModule
from srt.utils.rope_config import RopeConfig, read_rope
from tests.support.ranks import idle_rank, run_ranks, single_rank


def fill(module: WeightedModule, tensors: dict[str, Tensor], path: str = "") -> None:
    """Write this rank's parts of `tensors`; what they leave is zero, as after loading."""
    for parameter in module.parameters():
        parameter.zero_()
    for piece in module.weight_pieces(path):
        piece.target().copy_(tensors[piece.name].narrow(piece.dim, piece.start, piece.size))


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("vocab_size", "size"), [(10, 1), (10, 2), (11, 2), (11, 4), (5, 4), (1, 3)])
def test_embedding_and_head_are_whole_whatever_the_vocabulary(vocab_size: int, size: int, tmp_path: Path) -> None:
    weight, ids, hidden = randn(vocab_size, 8), torch.arange(vocab_size).flip(0), randn(3, 8)

    def work(tp: TensorParallel) -> tuple[Tensor, Tensor]:
        embedding = VocabParallelEmbedding(vocab_size, 8, tp)
        head = ParallelLMHead(vocab_size, 8, tp)
        fill(embedding, {"e.weight": weight}, "e")
        fill(head, {"e.weight": weight}, "e")
        assert head.shard_size * tp.size >= head.vocab_size == vocab_size
        logits = head.logits(hidden)
        assert logits.shape == (3, head.shard_size)
        assert not logits[:, head.shard_size_valid :].any()
        return embedding(ids), logits[:, : head.shard_size_valid]

    results = run_ranks(size, tmp_path, work)
    for embedded, _ in results:
        assert torch.equal(embedded, weight[ids])
    torch.testing.assert_close(torch.cat([logits for _, logits in results], dim=-1), hidden @ weight.T)


def test_a_tied_head_reads_nothing_of_its_own() -> None:
    embedding = VocabParallelEmbedding(10, 8, single_rank())
    head = ParallelLMHead(10, 8, single_rank(), tied=embedding)
    assert head.weight is embedding.weight
    assert list(head.weight_pieces("lm_head")) == []


def test_shards_start_where_their_first_id_is() -> None:
    heads = [ParallelLMHead(5, 2, idle_rank(rank, 4)) for rank in range(4)]
    assert [(head.shard_start, head.shard_size, head.shard_size_valid) for head in heads] == [
        (0, 2, 2),
        (2, 2, 2),
        (4, 2, 1),
        (5, 2, 0),
    ]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_columns_then_rows_are_one_matrix_product(size: int, tmp_path: Path) -> None:
    tensors = {
        "mlp.gate.weight": randn(8, 6),
        "mlp.gate.bias": randn(8),
        "mlp.up.weight": randn(8, 6) + 1,
        "mlp.up.bias": randn(8) + 1,
        "mlp.down.weight": randn(5, 8),
        "mlp.down.bias": randn(5),
    }
    x = randn(3, 6)

    def work(tp: TensorParallel) -> Tensor:
        gate_up = MergedColumnParallelLinear(6, (("gate", 8), ("up", 8)), True, tp)
        down = RowParallelLinear(8, 5, True, tp)
        fill(gate_up, tensors, "mlp.gate_up")
        fill(down, tensors, "mlp.down")
        result: Tensor = down(TORCH_OPS.silu_and_mul(gate_up(x)))
        return result

    gate = x @ tensors["mlp.gate.weight"].T + tensors["mlp.gate.bias"]
    up = x @ tensors["mlp.up.weight"].T + tensors["mlp.up.bias"]
    expected = (torch.nn.functional.silu(gate) * up) @ tensors["mlp.down.weight"].T + tensors["mlp.down.bias"]
    for result in run_ranks(size, tmp_path, work):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


class OneLaunch:
    """Memory of peers as a CPU has it: what it adds up comes of the group."""

    def __init__(self, tp: TensorParallel) -> None:
        self._tp = tp

    def add(self, x: Tensor) -> Tensor | None:
        return None

    def add_large(self, x: Tensor) -> Tensor | None:
        return None

    def add_and_norm(self, x: Tensor, hidden: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
        if len(x) == 1:
            return None
        total = hidden + self._tp.all_reduce(x)
        return TORCH_OPS.norm(total, Norm(weight, eps)), total


class PlainSums(LayerOps):
    """Operations that norm every sum alike, as those of deterministic servers do."""

    norms_while_summing = False


@pytest.mark.parametrize("ops", [TORCH_OPS, PlainSums()])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_sum_over_ranks_may_come_with_the_norm_behind_it(
    num_rows: int, bias: bool, ops: LayerOps, tmp_path: Path
) -> None:
    tensors = {"o.weight": randn(6, 8), "o.bias": randn(6)}
    x, hidden, weight = randn(num_rows, 8), randn(num_rows, 6), randn(6)
    total = hidden + x @ tensors["o.weight"].T + (tensors["o.bias"] if bias else 0)
    expected = TORCH_OPS.norm(total, Norm(weight, 1e-6))

    def work(tp: TensorParallel) -> bool:
        peers: Any = OneLaunch(tp)
        layer = RowParallelLinear(8, 6, bias, TensorParallel(tp.rank, tp.size, tp._group, tp.device, peers), ops)
        fill(layer, tensors, "o")
        norm = RMSNorm(6, 1e-6)
        norm.weight.copy_(weight)
        part = x[:, 4 * tp.rank : 4 * tp.rank + 4]
        stream = layer.onto(hidden, part, norm)
        normed, summed = TORCH_OPS.norm_stream(stream, norm.norm)
        torch.testing.assert_close(summed, total)
        torch.testing.assert_close(normed, expected)
        assert layer.onto(hidden, part, None).normed is None
        return stream.normed is not None

    assert run_ranks(2, tmp_path, work) == [num_rows > 1 and not bias and ops is TORCH_OPS] * 2


@pytest.mark.parametrize(("size", "kv_of_rank"), [(1, [[0, 1]]), (2, [[0], [1]]), (4, [[0], [0], [1], [1]])])
def test_kv_heads_stay_with_the_query_heads_that_use_them(size: int, kv_of_rank: list[list[int]]) -> None:
    # Head h of q, k and v is filled with h.
    heads = {"q_proj": 8, "k_proj": 2, "v_proj": 2}
    tensors = {
        f"{name}.weight": torch.arange(count).repeat_interleave(3).float()[:, None].expand(-1, 4)
        for name, count in heads.items()
    }
    for rank in range(size):
        layer = QKVParallelLinear(4, 8, 2, 3, False, idle_rank(rank, size))
        fill(layer, tensors, "qkv_proj")
        assert layer.weight.matrix is not None
        q, k, v = layer.weight.matrix[:, 0].split(layer.sizes)
        assert q[::3].tolist() == list(range(rank * 8 // size, (rank + 1) * 8 // size))
        assert k[::3].tolist() == v[::3].tolist() == kv_of_rank[rank]
        assert (layer.num_heads, layer.num_kv_heads) == (8 // size, len(kv_of_rank[rank]))


def test_rms_norm_keeps_the_type_and_measures_in_float32() -> None:
    norm = RMSNorm(64, 1e-6).to(torch.bfloat16)
    fill(norm, {"n.weight": torch.full((64,), 2.0)}, "n")
    x = (randn(3, 64) * 1e3).bfloat16()
    result = norm(x)
    assert result.dtype == torch.bfloat16
    exact = x.double() / x.double().square().mean(-1, keepdim=True).sqrt() * 2
    torch.testing.assert_close(result.double(), exact, rtol=1e-2, atol=1e-2)


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": None, "original_max_position_embeddings": 8192},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64, "beta_slow": 4},
]


@pytest.mark.parametrize("parameters", ROPES)
def test_cos_and_sin_are_those_of_transformers_to_the_bit(parameters: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    stated = dict(parameters)
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=dict(parameters)
    )
    rope = read_rope({key: value for key, value in stated.items() if value is not None}, {}, 131072)
    reference = LlamaRotaryEmbedding(config)
    assert torch.equal(compute_frequencies(rope, 128), reference.inv_freq)
    positions = torch.tensor([0, 1, 7, 4095, 4096, 60000, 131071])
    rotation = RotaryEmbedding(rope, 128)(positions)
    cos, sin = reference(torch.empty(0), positions[None])
    assert torch.equal(rotation.cos[:, 0], cos[0, :, :64])
    assert torch.equal(rotation.sin[:, 0], sin[0, :, :64])


def test_rotating_keeps_type_and_length_and_position_zero() -> None:
    embedding = RotaryEmbedding(RopeConfig("default", 1e4), 8)
    rotation = embedding(torch.tensor([0, 5]))
    x = randn(2, 3, 8)
    rotated = rotate(x, rotation)
    assert torch.equal(rotated[0], x[0])
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))
    assert rotate(x.bfloat16(), rotation).dtype == torch.bfloat16
    assert rotate(x[:0], embedding(torch.tensor([], dtype=torch.int64))).shape == (0, 3, 8)
