"""One row's attention from the packed projection by the kernel in CUDA C++, at the sizes of real models, against float32."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from srt.kernels.attention.decode_attention import DecodeScratch
from srt.kernels.attention.paged_kv import PagedKV
from srt.kernels.attention.wide_decode import is_wide, wide_decode, wide_splits

pytestmark = pytest.mark.gpu

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
EPS, SCALE = 1e-6, 0.09
LENGTHS = (1, 2, 8, 9, 33, 34, 64, 65, 66, 700, 1023, 1025, 1070, 2050, 9000)
SHAPES = ((128, 1, 8), (128, 2, 8), (128, 4, 8), (128, 8, 4), (128, 8, 1), (256, 2, 4))  # head size, group, KV heads
MOST = 5e-3


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=CUDA).to(BF16)


def error_of(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@dataclass
class World:
    """Rows of one new token each. `offset` is added to the weights of norms; None: there are no norms."""

    head_dim: int
    group: int
    kv_heads: int
    page_size: int = 16
    window: int | None = None
    offset: int | None = 0
    most_tokens: int = 9024
    rows: int = 1

    def __post_init__(self) -> None:
        assert is_wide(CUDA, BF16, BF16, self.head_dim, self.group, self.page_size)
        processors = torch.cuda.get_device_properties(CUDA).multi_processor_count
        heads = self.group * self.kv_heads
        self.num_splits = wide_splits(self.head_dim, self.group, self.rows, self.kv_heads, processors)
        self.scratch = DecodeScratch.allocate(self.rows, heads, heads, self.num_splits, self.head_dim, CUDA)
        self.scratch.partial.fill_(float("nan"))
        self.scratch.lse.fill_(float("nan"))
        self.pages = torch.randperm(self.rows * self.most_tokens // self.page_size, device=CUDA).to(torch.int32)
        self.pages = self.pages.view(self.rows, -1)
        self.slots = torch.randperm(self.rows, device=CUDA)
        self.keys, self.values = (
            randn(self.pages.numel() * self.page_size, self.kv_heads, self.head_dim) for _ in "kv"
        )
        self.lens = torch.ones(self.rows, dtype=torch.int64, device=CUDA)
        self.new = torch.zeros(self.rows, dtype=torch.int64, device=CUDA)
        self.qkv = randn(self.rows, (heads + 2 * self.kv_heads) * self.head_dim)
        self.weights = None if self.offset is None else (randn(self.head_dim), randn(self.head_dim))
        angles = torch.rand(self.rows, self.head_dim // 2, device=CUDA) * 6
        self.cos, self.sin = angles.cos(), angles.sin()
        self.memory = PagedKV(self.keys.clone(), self.values.clone(), self.pages, self.page_size)

    def locations(self, row: int) -> Tensor:
        pages = self.pages[self.slots[row]].long().repeat_interleave(self.page_size) * self.page_size
        return pages + torch.arange(len(pages), device=CUDA) % self.page_size

    def begin(self, lengths: list[int]) -> None:
        """Give the rows these lengths. What a row must not read is not a number: its new token, what is behind, and before its window."""
        self.memory.k_buffer.copy_(self.keys)
        self.memory.v_buffer.copy_(self.values)
        self.lens.copy_(torch.tensor(lengths))
        for row, length in enumerate(lengths):
            at = self.locations(row)
            unread = [at[length - 1 :], at[: max(length - (self.window or length), 0)]]
            for places in unread:
                self.memory.k_buffer[places] = self.memory.v_buffer[places] = float("nan")
            self.new[row] = at[length - 1]

    def attend(self) -> Tensor:
        rows = self.new, self.memory, self.slots, self.lens
        return wide_decode(
            self.qkv, self.weights, EPS, self.cos, self.sin, *rows, SCALE, self.num_splits, self.scratch,
            self.window, True, self.offset == 1,
        )  # fmt: skip

    def prepared(self, heads: Tensor, norm: int) -> Tensor:
        if self.weights is not None:
            factors = self.weights[norm].float() + (self.offset or 0)
            heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + EPS) * factors
        low, high = heads.chunk(2, dim=-1)
        cos, sin = self.cos[:, None], self.sin[:, None]
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(BF16).float()

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return results, new keys and new values."""
        heads = self.group * self.kv_heads
        packed = self.qkv.float().view(self.rows, -1, self.head_dim)
        queries, keys, values = packed.split((heads, self.kv_heads, self.kv_heads), dim=1)
        queries, keys = self.prepared(queries, 0), self.prepared(keys, 1)
        results = torch.empty_like(queries)
        for row, length in enumerate(self.lens.tolist()):
            at = self.locations(row)[max(length - (self.window or length), 0) : length - 1]
            all_keys = torch.cat((self.keys[at].float(), keys[row : row + 1])).repeat_interleave(self.group, 1)
            all_values = torch.cat((self.values[at].float(), values[row : row + 1])).repeat_interleave(self.group, 1)
            shares = (torch.einsum("hd,phd->hp", queries[row], all_keys) * SCALE).softmax(-1)
            results[row] = torch.einsum("hp,phd->hd", shares, all_values)
        return results.flatten(1), keys, values

    def check(self, got: Tensor) -> None:
        results, keys, values = self.expected()
        lengths = self.lens.tolist()
        assert error_of(got, results) < MOST, lengths
        assert error_of(self.memory.k_buffer[self.new], keys) < MOST, lengths
        assert self.memory.v_buffer[self.new].equal(values.to(BF16)), lengths
        assert not self.scratch.arrived.any(), lengths


@pytest.fixture(autouse=True)
def _exact_products_of_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("window", "offset"), [(None, None), (None, 0), (1024, 1), (30, 0)])
def test_a_row_is_normed_rotated_stored_and_attended(
    shape: tuple[int, int, int], window: int | None, offset: int | None
) -> None:
    """Launched again and again behind each other: each launch may start before the one before it has ended."""
    world = World(*shape, window=window, offset=offset)
    for length in LENGTHS:
        world.begin([length])
        for got in [world.attend() for _ in range(10)]:
            world.check(got)


@pytest.mark.parametrize("page_size", [1, 64])
def test_pages_of_any_size_are_read(page_size: int) -> None:
    world = World(128, 8, 4, page_size)
    for length in (1, 65, 1100):
        world.begin([length])
        world.check(world.attend())


@pytest.mark.parametrize(("kv_heads", "window"), [(4, None), (4, 30), (1, None)])
@pytest.mark.parametrize("lengths", [[700, 1], [1, 2000, 65], [1043, 5, 64, 2047, 1, 700, 1024, 66]], ids=str)
def test_rows_of_different_lengths_are_attended_at_once(lengths: list[int], kv_heads: int, window: int | None) -> None:
    world = World(128, 8, kv_heads, rows=len(lengths), most_tokens=2048, window=window)
    for some in (lengths, lengths[::-1]):
        world.begin(some)
        for got in [world.attend() for _ in range(10)]:
            world.check(got)


@pytest.mark.parametrize("shape", [(128, 8, 4), (128, 4, 8)], ids=str)
def test_a_graph_serves_every_length(shape: tuple[int, int, int]) -> None:
    world = World(*shape)
    world.begin([5])
    world.attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = world.attend()
    for length in (9000, 1, 66, 1043):
        world.begin([length])
        got.fill_(float("nan"))
        graph.replay()
        world.check(got)


def test_other_angles_give_other_results() -> None:
    """So that the test above can fail."""
    world = World(128, 8, 4)
    world.begin([1043])
    results, _, _ = world.expected()
    world.cos, world.sin = world.cos.flip(1), world.sin.flip(1)
    assert error_of(world.attend(), results) > 10 * MOST
