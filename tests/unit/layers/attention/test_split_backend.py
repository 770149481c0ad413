"""Prompts by one backend and decodes by another, in one step."""

from __future__ import annotations

import torch

from srt.layers.attention.attention_spec import AttentionLayer
from srt.layers.attention.split_backend import SplitBackend
from srt.layers.attention.torch_native import TorchNativeBackend
from srt.model_executor.forward_batch_info import ForwardBatch
from tests.unit.layers.attention.attention_world import AttentionWorld

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
EXTENDS, DECODES = [(2, 9), (6, 1)], [5, 0, 3]


class Counting(TorchNativeBackend):
    """Notes how many tokens it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.extended: list[int] = []
        self.decoded: list[int] = []

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        self.extended.append(len(q))
        super().forward_extend(q, k, v, layer, batch, out)

    def forward_decode(self, q: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor) -> None:
        self.decoded.append(len(q))
        super().forward_decode(q, layer, batch, out)


def world_of(backend: TorchNativeBackend | SplitBackend) -> AttentionWorld:
    world = AttentionWorld(backend, HEADS, KV_HEADS, HEAD_DIM, 4, torch.float32)
    assert world.step(extends=[(5, 30), (0, 2), (3, 17)], decodes=[]) <= 2e-6
    return world


def test_rows_that_decode_beside_a_chunk_go_to_the_decode_backend() -> None:
    prefill, decode = Counting(), Counting()
    world = world_of(SplitBackend(prefill, decode))
    assert world.step(EXTENDS, DECODES) <= 2e-6
    assert (prefill.extended, prefill.decoded) == ([49, 10], [])
    assert (decode.extended, decode.decoded) == ([], [3])


def test_they_get_what_they_would_get_as_chunks_of_one_token() -> None:
    rows = [*EXTENDS, *((slot, 1) for slot in DECODES)]
    attended = []
    for num_extends in (len(EXTENDS), len(rows)):
        backend = TorchNativeBackend()
        world = world_of(backend)
        batch, fused = world.make_batch(rows, num_extends), world.make_qkv(rows)
        backend.init_forward_metadata(batch)
        attended.append(world.attend(fused, batch))
    torch.testing.assert_close(attended[0], attended[1], atol=2e-6, rtol=0)
