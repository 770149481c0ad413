"""x Wᵀ for up to 256 rows of x, fused with the operations before and after it: a CUDA C++ kernel.

With few rows, reading W takes most of the time. This kernel requests W before its inputs are ready, and its programs read each other's
shared memory; Triton supports neither. Kernels of this size take little longer than a launch, so fusing saves launches: the product
applies what follows it, and the norm before it. Of that norm, the previous product did everything but one factor per row.
`_most_rows` says up to how many rows this kernel serves each kind of product. Hopper and bfloat16 only: `tiles` returns None otherwise.
Keys and values may be stored in fp8. `packed_matrix.py` says how W is stored if not in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Final, TypeGuard

import torch

from srt.kernels.build.hopper import (
    BLOCK_K,
    WIDEST_LOAD,
    box_map,
    launch,
    map_of,
    most_clusters,
    pointer,
    room_for_stages,
    source_of,
    with_alignment,
)
from srt.kernels.build.pdl import LATE
from srt.kernels.gemm.fp8_gemm import quantise_rows
from srt.kernels.gemm.packed_matrix import BF16, E4M3, ROUNDED, Numbers, PackedMatrix
from srt.kernels.gemm.stream_added import AddedSums
from srt.kernels.gemm.stream_arguments import Added, EndingArguments

_SOURCE: Final = Path(__file__).with_suffix(".cu")
FEWEST_ROWS: Final = 2
MOST_ROWS: Final = 176
"""Limit for products that `_most_rows` gives no other limit. With more rows, cuBLAS followed by a norm is as fast, except for small
weights, which take little time."""
MOST_ROWS_OF_FEW_WEIGHTS: Final = 256
MOST_ROWS_OF_LONG: Final = 256
"""Limit for products whose inner dimension is the longer one, if they fill the device and read their weights once."""
MOST_PLAIN_ROWS: Final = 64
"""Limit for products with nothing to fuse; with more rows cuBLAS does these."""
MOST_GATED_ROWS: Final = 96
"""Limit for gated products. From there on (for small weights from 65 rows on) `gated_gemm.py` has a kernel for multiples of 64 rows."""
MOST_PACKED_ROWS: Final = 64
"""Limit for weights of e4m3 or 4-bit numbers that become bfloat16. `gemv` does one row of e4m3 with a scale for each output."""
FEWEST_ROUNDED_ROWS: Final = 2
"""Fewest rows for weights of e4m3 numbers whose inputs are rounded likewise; `gemv` does one as it is."""
_ROWS: Final[tuple[int, ...]] = (16, 32, *range(64, 257, 16))
"""Row counts of tiles. Large ones are close together, because multiplying padding takes power, which limits such steps."""
_WIDTHS: Final = (64, 128, 192)
"""Widths of tiles with more than few rows: whole warpgroups, because multiplying padding takes power."""
_FEW_ROWS: Final = 64
"""Up to this many rows, reading W takes most of the time; with more, reading x does too."""
_MOST_STAGES: Final = 12
_LONG_SPLIT: Final = 2048  # elements of the inner dimension: splitting into shorter parts costs more than it gains
_LEAST_SHARE: Final = 0.72  # smallest share of the multiprocessors that must have work
_SHORT_SHARE: Final = 0.45  # the same for small products: the idle multiprocessors start the next kernel's loads
_FEW_WEIGHTS: Final = 1 << 22
_FULL_SHARE: Final = 0.9
_MOST_W_ROWS: Final = 320
_MOST_PACKED_W_ROWS: Final = 384
_MOST_TEAMS: Final = 4
_LOADED_NS: Final = 38  # bytes of W that a program loads per ns
_TURN_NS: Final = 1500  # until the first weights have come
_LONG: Final = 1 << 16  # outputs of an LM head, for which cuBLAS is as fast
_HEAD_DIMS: Final = (64, 128)  # sizes of attention heads that fit in a warp
_REGISTERS: Final = 1 << 16  # per multiprocessor
_OTHER_REGISTERS: Final = 26  # per thread, for the multiply instruction, besides its sums
_CONVERTED_REGISTERS: Final = 38  # per thread, for packed numbers: two blocks of operands, addresses and scales
_CYCLES_NS: Final = 1.46  # effective cycles per ns, measured on an H200; includes all other delays
_WEIGHTS_NS: Final = 3600  # bytes of weights read per ns
_EXCHANGED_NS: Final = 20  # bytes of sums exchanged in a cluster per ns


@dataclass(frozen=True, slots=True)
class Ending:
    """Operations fused after the product."""

    is_gated: bool = False
    has_residual: bool = False
    is_weighted: bool = False  # also write the result times the next norm's weight, with its sums of squares
    is_scaled: bool = False  # x was written by a weighted product, so the factors of its rows are still to be applied
    head_dim: int = 0  # size of the heads if the result is queries, keys and values; else 0
    has_head_norm: bool = False
    is_fp8: bool = False  # keys and values are stored in fp8
    rank: int = 0  # of the adapters whose products are added (`Added`), padding included; 0: none
    low: int = 0  # that of all merged layers together

    def columns(self, w_rows: int) -> int:
        """Return the number of result columns that `w_rows` rows of W produce."""
        return w_rows // 2 if self.is_gated else w_rows


PLAIN: Final = Ending()


@dataclass(frozen=True, slots=True)
class StreamTiles:
    """The tiles into which a product is cut. They determine the variant of the kernel."""

    rows: int  # of x, padding included
    width: int  # columns of the result
    splits: int  # parts of the inner dimension
    stages: int
    ending: Ending = PLAIN
    form: Numbers = BF16
    lag: int = 1  # products in flight while packed numbers are converted
    teams: int = 1  # warpgroups, or groups of them, that take turns with the blocks: more convert packed numbers faster

    @property
    def w_rows(self) -> int:
        return self.width * (2 if self.ending.is_gated else 1)

    @property
    def warpgroups(self) -> int:
        """Number of warpgroups that multiply, each up to 64 rows of W."""
        return -(-self.w_rows // 64)

    @property
    def part(self) -> int:
        """Number of columns in each sum of squares."""
        return 16 if self.width % 64 else 64

    @property
    def share(self) -> int:
        """Rows of W that a warpgroup multiplies if x provides the instruction's rows and W its columns; 0 if it is the other way round.

        With x as the rows, the number of W's rows need not be a multiple of 64, but that of x must be.
        """
        if self.form.is_converted or self.rows != 64 or self.w_rows % 64 == 0:
            return 0
        return -(-self.w_rows // self.warpgroups // 8) * 8

    @property
    def added(self) -> AddedSums | None:
        """What adapters add; None if there are none."""
        if not self.ending.rank:
            return None
        at_once = 128 * self.warpgroups * self.teams // (self.width // 4)
        own_rows = -(-self.rows // (self.splits * at_once)) * at_once
        return AddedSums(self.rows, own_rows, self.ending.low, self.w_rows)

    @property
    def stage_bytes(self) -> int:
        line = 2 * BLOCK_K
        return line * (self.w_rows + self.form.x_blocks * self.rows) + self.form.scale_bytes(self.w_rows, self.width)

    @property
    def _overrun(self) -> int:
        """Bytes after the last stage that the last warpgroup reads and multiplies without using the result."""
        return 0 if self.share else 2 * BLOCK_K * (64 * self.warpgroups - self.w_rows)

    @property
    def shared_bytes(self) -> int:
        """Shared memory for the ring of stages, which the sums reuse afterwards."""
        sums = 4 * self.teams * self.rows * (self.w_rows + 8 if self.share else 64 * self.warpgroups + 4)
        return with_alignment(max(self.stages * self.stage_bytes + self._overrun, sums))

    @property
    def name(self) -> str:
        return "stream_gemm"

    @property
    def num_threads(self) -> int:
        return 128 * (self.warpgroups * self.teams + 1)

    @property
    def cluster(self) -> int:
        return self.splits

    @classmethod
    def choose(
        cls,
        num_rows: int,
        n: int,
        k: int,
        ending: Ending,
        num_processors: int,
        clusters_at_once: Callable[[int], int],
    ) -> StreamTiles | None:
        """Return the tiles for n columns of the result; None if cuBLAS is as fast or the shape does not fit.

        All programs run at once. `clusters_at_once(size)` is the number of clusters of that size that can.
        """
        most = _most_rows(n, k, ending)
        if not FEWEST_ROWS <= num_rows <= most or k % BLOCK_K or n % (64 if ending.is_weighted else 8) or n >= _LONG:
            return None

        is_short = k <= _LONG_SPLIT and n * k <= _FEW_WEIGHTS
        least = (_SHORT_SHARE if is_short else _LEAST_SHARE) * num_processors

        def fits(tiles: StreamTiles) -> bool:
            num_clusters = tiles.count(num_rows, n)
            runs_at_once = tiles.splits == 1 or num_clusters <= clusters_at_once(tiles.splits)
            return (
                tiles.fits(num_rows, n, k) and runs_at_once and least <= num_clusters * tiles.splits <= num_processors
            )

        def is_full(tiles: StreamTiles | None) -> TypeGuard[StreamTiles]:
            return tiles is not None and tiles.count(num_rows, n) * tiles.splits >= _FULL_SHARE * num_processors

        if num_rows > _FEW_ROWS and ending.is_gated:
            tiles = cls._fitted(num_rows, n, ending, num_processors, fits)
        elif num_rows > _FEW_ROWS:
            tiles = cls._for_more_rows(num_rows, n, k, ending, fits)
            if num_rows > MOST_ROWS and n * k > _FEW_WEIGHTS and not (is_full(tiles) and tiles.rows >= num_rows):
                return None
        else:
            tiles = cls._for_few_rows(num_rows, n, k, ending, fits)
            if not is_full(tiles) and n * k > _FEW_WEIGHTS and not ending.head_dim:
                tiles = cls._fitted(num_rows, n, ending, num_processors, fits) or tiles
        return None if tiles is None else tiles.with_stages(k)

    @classmethod
    def choose_packed(
        cls,
        num_rows: int,
        n: int,
        k: int,
        ending: Ending,
        form: Numbers,
        num_processors: int,
        clusters_at_once: Callable[[int], int],
    ) -> StreamTiles | None:
        """Return the tiles with the shortest estimated time for n columns of the result and packed numbers; None if none fit."""
        unit = 64 if ending.is_weighted else 8
        if not 0 < num_rows <= _ROWS[-1] or not form.suits(k) or n % unit or n >= _LONG:
            return None

        def fits(tiles: StreamTiles) -> bool:
            num_clusters = tiles.count(num_rows, n)
            runs_at_once = tiles.splits == 1 or num_clusters <= clusters_at_once(tiles.splits)
            return tiles.fits(num_rows, n, k) and runs_at_once

        def cost(tiles: StreamTiles) -> float:
            blocks = -(-k // form.stage_k // tiles.splits)
            turns = -(-tiles.count(num_rows, n) * tiles.splits // num_processors)
            program = 2 * BLOCK_K * tiles.w_rows * blocks / _LOADED_NS + _TURN_NS
            return turns * program + 4 * tiles.w_rows * tiles.rows * (tiles.splits - 1) / tiles.splits / _EXCHANGED_NS

        shapes = product(range(64, _MOST_PACKED_W_ROWS + 1, 16), (1, 2, 3, 4, 6, 8))
        every = (
            cls(cls.padded(num_rows), ending.columns(w_rows), splits, 2, ending, form) for w_rows, splits in shapes
        )
        tiles = min(filter(fits, every), key=cost, default=None)
        return None if tiles is None else tiles.with_teams(num_rows, n, k).with_stages(k)

    def with_teams(self, num_rows: int, n: int, k: int) -> StreamTiles:
        """Return the tiles with as many teams as have registers, and either fewer than half the stages or a stage for each block."""
        blocks = -(-k // self.form.stage_k // self.splits)

        def has_stages(tiles: StreamTiles) -> bool:
            stages = tiles.with_stages(k).stages
            return stages > 2 * tiles.teams or tiles.teams <= blocks <= stages

        more = (replace(self, teams=teams) for teams in range(_MOST_TEAMS, 1, -1))
        return next((one for one in more if one.fits(num_rows, n, k) and has_stages(one)), self)

    @classmethod
    def _for_few_rows(
        cls, num_rows: int, n: int, k: int, ending: Ending, fits: Callable[[StreamTiles], bool]
    ) -> StreamTiles | None:
        """Return tiles with the fewest splits that give most multiprocessors work, as measured on an H200.

        Prefer two splits of tiles twice as wide if each split is still long.
        """
        rows = cls.padded(num_rows)
        shapes = ((warpgroups, splits) for splits in (1, 2, 3, 4, 6, 8) for warpgroups in (1, 2, 3, 5))
        every = (cls(rows, ending.columns(64 * warpgroups), splits, 1, ending) for warpgroups, splits in shapes)
        tiles = next(filter(fits, every), None)
        if tiles is None or not tiles.warpgroups == tiles.splits == 1 or k < 2 * _LONG_SPLIT:
            return tiles
        wider = replace(tiles, width=2 * tiles.width, splits=2)
        return wider if tiles.count(num_rows, n) % 2 == 0 and fits(wider) else tiles

    @classmethod
    def _fitted(
        cls, num_rows: int, n: int, ending: Ending, num_processors: int, fits: Callable[[StreamTiles], bool]
    ) -> StreamTiles | None:
        """Return tiles just wide enough to give nearly all multiprocessors work, even if warpgroups then multiply some padding."""
        unit = 16 if ending.is_weighted else 8
        for splits in (1, 2):
            width = -(-n * splits // num_processors // unit) * unit
            tiles = cls(cls.padded(num_rows), width, splits, 1, ending)
            is_full = tiles.count(num_rows, n) * splits >= _FULL_SHARE * num_processors
            if is_full and 64 <= tiles.w_rows <= _MOST_W_ROWS and fits(tiles):
                return tiles
        return None

    @classmethod
    def _for_more_rows(
        cls, num_rows: int, n: int, k: int, ending: Ending, fits: Callable[[StreamTiles], bool]
    ) -> StreamTiles | None:
        """Return the tiles with the shortest estimated time: programs multiply, or wait for weights or for shared memory."""
        heights = {cls.padded(max(-(-num_rows // parts), _FEW_ROWS)) for parts in (1, 2, 3, 4)}
        shapes = product(heights, _WIDTHS, (1, 2, 3, 4, 6, 8))
        every = (cls(rows, width, splits, 1, ending) for rows, width, splits in shapes)
        return min(filter(fits, every), key=lambda tiles: tiles.cost(n, k), default=None)

    def cost(self, n: int, k: int) -> float:
        """Return the estimated time in ns of a product with more than few rows.

        For 30 products, measured in up to 40 cuts each, the lowest estimate is the fastest cut or at most 6 % slower.
        """
        multiplying = self.warpgroups * self.rows / 2  # cycles, for 16 columns
        reading, writing = self.warpgroups * (64 + self.rows) / 4, (self.w_rows + self.rows) / 4  # shared memory
        program = k / self.splits / 16 * max(multiplying, reading + writing) / _CYCLES_NS
        exchanged = 4 * self.width * self.rows * (self.splits - 1) / self.splits
        return max(program, 2 * n * k / _WEIGHTS_NS) + exchanged / _EXCHANGED_NS

    @staticmethod
    def padded(num_rows: int) -> int:
        """Return the rows of a tile that holds this many."""
        return next(rows for rows in _ROWS if num_rows <= rows)

    def count(self, num_rows: int, n: int) -> int:
        """Return the number of clusters."""
        return -(-num_rows // self.rows) * -(-n // self.width)

    def fits(self, num_rows: int, n: int, k: int) -> bool:
        """Return whether these tiles can compute such a product."""
        head_dim = self.ending.head_dim
        has_whole_heads = not head_dim or (
            head_dim in _HEAD_DIMS and n % self.width == 0 and self.width % head_dim == 0
        )
        registers = min(_REGISTERS // self.num_threads, 255) // 8 * 8
        others = _OTHER_REGISTERS + (_CONVERTED_REGISTERS if self.form.is_converted else 0)
        has_registers = self.rows // 2 + others <= registers
        has_blocks = k // self.form.stage_k >= self.splits
        return self.width <= WIDEST_LOAD and has_blocks and has_whole_heads and has_registers

    def with_stages(self, k: int) -> StreamTiles:
        """Return the tiles with as many stages as fit in shared memory and are useful."""
        blocks = -(-k // self.form.stage_k // self.splits)
        most, beside = _MOST_STAGES, 4 * self.rows + self._overrun  # 4 * rows: their factors
        if self.added is not None:
            most, beside = self.added.most_stages(most), beside + self.added.num_bytes + self.added.num_spare
        room = room_for_stages(most) - beside
        stages = min(room // self.stage_bytes, most, max(2, blocks))
        return replace(self, stages=stages)

    @property
    def source(self) -> str:
        return source_of(_SOURCE, self.share or self.rows)

    @property
    def constants(self) -> Mapping[str, int]:
        ending = self.ending
        return {
            "ROWS": self.rows,
            "WARPGROUPS": self.warpgroups,
            "WIDTH": self.width,
            "SHARE": self.share,
            "SPLITS": self.splits,
            "STAGES": self.stages,
            "GATED": int(ending.is_gated),
            "HAS_RESIDUAL": int(ending.has_residual),
            "WEIGHTED": int(ending.is_weighted),
            "SCALED": int(ending.is_scaled),
            "HEADS": int(ending.head_dim > 0),
            "HEAD_DIM": ending.head_dim or 64,
            "HEAD_NORM": int(ending.has_head_norm),
            "FP8": int(ending.is_fp8),
            "RANK": ending.rank,
            "LOW": ending.low,
            "ADDS_AHEAD": int(self.added is not None and self.added.is_ahead),
            "BITS": self.form.bits,
            "GROUP": self.form.group,
            "HAS_ZEROS": int(self.form.has_zeros),
            "LAG": self.lag,
            "TEAMS": self.teams,
            "ROUNDED": int(self.form.is_rounded),
        }


SMALLEST: Final = StreamTiles(16, 64, 1, 2)


@dataclass(frozen=True, slots=True)
class Weighted:
    """Rows times the weight of a norm, of which only the factor per row is missing, and the sums from which it is computed."""

    values: torch.Tensor  # [rows, columns]
    squares: torch.Tensor  # [parts, rows] float32: sums of squares of neighbouring columns, before the weight
    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Heads:
    """Destination of queries, keys and values, and the parameters of their norms and rotation."""

    query_width: int
    weights: tuple[torch.Tensor, torch.Tensor] | None  # of the norms of query heads and key heads
    eps: float
    cos: torch.Tensor  # [rows, 1, head_dim / 2] float32
    sin: torch.Tensor
    locations: torch.Tensor  # [rows] int64
    k_buffer: torch.Tensor  # [locations, kv heads, head_dim]
    v_buffer: torch.Tensor
    k_scale: float  # 1 unless keys and values are stored in fp8
    v_scale: float

    @property
    def head_dim(self) -> int:
        return self.k_buffer.shape[2]


class StreamGemm:
    """The kernel on one device. Multiplies plain or weighted rows for which `tiles` returns tiles."""

    def __init__(self, device: torch.device) -> None:
        self._num_processors = torch.cuda.get_device_properties(device).multi_processor_count

    def tiles(self, x: torch.Tensor, weight: torch.Tensor | PackedMatrix, ending: Ending) -> StreamTiles | None:
        """Return the tiles for x @ weight.T; None if other kernels are faster."""
        if x.dtype is not torch.bfloat16:
            return None
        n, k = weight.shape[0] // (2 if ending.is_gated else 1), weight.shape[1]
        device = self._num_processors, x.device.index
        if isinstance(weight, PackedMatrix) and weight.rounds_inputs and len(x) >= FEWEST_ROUNDED_ROWS:
            if len(x) > MOST_ROWS_OF_FEW_WEIGHTS:
                return None
            # Two e4m3 numbers take the place of one of bfloat16, in memory and in the tensor cores.
            tiles = _choose(len(x), n, k // 2, ending, *device)
            return None if tiles is None else replace(tiles, form=ROUNDED)
        if isinstance(weight, PackedMatrix):
            is_for_others = len(x) > MOST_PACKED_ROWS or (len(x) == 1 and weight.form == E4M3)
            return None if is_for_others else _choose_packed(len(x), n, k, ending, weight.form, *device)
        if weight.dtype is not torch.bfloat16 or not weight.is_contiguous():
            return None
        if not FEWEST_ROWS <= len(x) <= MOST_ROWS_OF_FEW_WEIGHTS:
            return None
        return _choose(len(x), n, k, ending, *device)

    def multiply(
        self,
        x: torch.Tensor | Weighted,
        weight: torch.Tensor | PackedMatrix,
        tiles: StreamTiles,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        added: Added | None = None,
    ) -> torch.Tensor:
        """Return x @ weight.T + residual, rounded once; with gated tiles silu(first half of the columns) * second half.

        The result is written to `out` if given.
        """
        assert not tiles.ending.is_weighted and not tiles.ending.head_dim
        ending = EndingArguments(residual=_checked(residual, tiles.ending.has_residual))
        return self._launch(x, weight, tiles, weight.shape[0], ending, out, added)

    def multiply_weighted(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | PackedMatrix,
        tiles: StreamTiles,
        residual: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        added: Added | None = None,
    ) -> tuple[torch.Tensor, Weighted]:
        """Return x @ weight.T + residual, and the same times the weight of the next norm."""
        assert tiles.ending.is_weighted
        num_rows, n = residual.shape
        squares = torch.empty((n // tiles.part, num_rows), dtype=torch.float32, device=x.device)
        weighted = Weighted(torch.empty_like(residual), squares, norm_weight, eps)
        ending = EndingArguments(
            residual=_checked(residual, True),
            next_weight=_checked(norm_weight, True),
            weighted=pointer(weighted.values),
            squares=pointer(squares),
        )
        return self._launch(x, weight, tiles, n, ending, added=added), weighted

    def multiply_heads(
        self,
        x: torch.Tensor | Weighted,
        weight: torch.Tensor | PackedMatrix,
        tiles: StreamTiles,
        heads: Heads,
        added: Added | None = None,
    ) -> torch.Tensor:
        """Return the queries, rotated (and normed first if heads are); store the keys, treated likewise, and the values."""
        assert tiles.ending.head_dim == heads.head_dim and tiles.ending.has_head_norm == (heads.weights is not None)
        assert tiles.ending.is_fp8 == (heads.k_buffer.dtype is torch.float8_e4m3fn)
        kv_width = heads.k_buffer.shape[1] * heads.head_dim
        assert weight.shape[0] == heads.query_width + 2 * kv_width
        q_weight, k_weight = heads.weights or (None, None)
        ending = EndingArguments(
            q_weight=pointer(q_weight),
            k_weight=pointer(k_weight),
            cosines=_checked(heads.cos, True),
            sines=_checked(heads.sin, True),
            locations=_checked(heads.locations, True),
            k_buffer=pointer(heads.k_buffer),
            v_buffer=pointer(heads.v_buffer),
            k_stride=heads.k_buffer.stride(0),
            v_stride=heads.v_buffer.stride(0),
            query_width=heads.query_width,
            kv_width=kv_width,
            head_eps=heads.eps,
            k_scale_inverse=1 / heads.k_scale,
            v_scale_inverse=1 / heads.v_scale,
        )
        return self._launch(x, weight, tiles, heads.query_width, ending, added=added)

    def _launch(
        self,
        x: torch.Tensor | Weighted,
        weight: torch.Tensor | PackedMatrix,
        tiles: StreamTiles,
        out_width: int,
        ending: EndingArguments,
        out: torch.Tensor | None = None,
        added: Added | None = None,
    ) -> torch.Tensor:
        assert tiles.ending.is_scaled == isinstance(x, Weighted)
        if isinstance(x, Weighted):
            ending.x_squares, ending.x_parts, ending.eps = pointer(x.squares), len(x.squares), x.eps
            x = x.values
        x = x.contiguous()
        num_rows, k = x.shape
        assert (added is not None) == (tiles.ending.rank > 0)
        if added is not None:
            ending.add(added, (num_rows, tiles.ending.low), (weight.shape[0], tiles.ending.rank))
        halves = 2 if tiles.ending.is_gated else 1
        n = weight.shape[0] // halves
        assert weight.shape[1] == k
        shape = num_rows, out_width // halves
        out = torch.empty(shape, dtype=x.dtype, device=x.device) if out is None else out
        assert out.shape == shape and out.dtype is x.dtype and out.is_contiguous(), (out.shape, out.dtype)
        rounded = x_scales = None  # what is rounded here lives until the launch
        if isinstance(weight, PackedMatrix):
            numbers, scale_maps = weight.numbers.view(torch.bfloat16), _scale_maps(weight, tiles)
            ending.w_scales = 0 if tiles.form.group else pointer(weight.scales)
            if tiles.form.is_rounded:
                rounded, x_scales = quantise_rows(x, pdl=int(LATE))
                x, ending.x_scales = rounded.view(torch.bfloat16), pointer(x_scales)
        else:
            numbers, scale_maps = weight, ()
        assert numbers.is_contiguous()
        maps = map_of(numbers, tiles.width), map_of(x, tiles.rows), *scale_maps
        grid = tiles.splits, -(-n // tiles.width), -(-num_rows // tiles.rows)
        with torch.cuda.device(x.device):
            launch(tiles, grid, maps, (ending, out, num_rows, n, k // tiles.form.stage_k), is_dependent=True)
        return out


def _checked(tensor: torch.Tensor | None, is_wanted: bool) -> int:
    """Check that the tensor is present exactly if wanted, and return its address."""
    assert (tensor is not None) == is_wanted and (tensor is None or tensor.is_contiguous())
    return pointer(tensor)


def _scale_maps(weight: PackedMatrix, tiles: StreamTiles) -> tuple[Any, ...]:
    """Return the tensor maps for scales and zero points, if groups of inputs have any."""
    form = tiles.form
    if not form.group:
        return ()
    groups = form.groups_of_stage
    scales = box_map(weight.scales, groups, tiles.width)
    return scales, scales if weight.zeros is None else box_map(weight.zeros, groups, tiles.width)


def _most_rows(n: int, k: int, ending: Ending) -> int:
    """Return the largest number of rows for which this kernel may be the fastest."""
    is_small = n * k <= _FEW_WEIGHTS
    if ending.is_gated:
        return MOST_PLAIN_ROWS if is_small else MOST_GATED_ROWS
    if not ending.has_residual and not ending.head_dim:
        return MOST_PLAIN_ROWS
    if is_small:
        return MOST_ROWS_OF_FEW_WEIGHTS
    return MOST_ROWS_OF_LONG if ending.has_residual and k > n else MOST_ROWS


@cache
def _choose(num_rows: int, n: int, k: int, ending: Ending, num_processors: int, device: int) -> StreamTiles | None:
    return StreamTiles.choose(num_rows, n, k, ending, num_processors, partial(_clusters_at_once, device))


@cache
def _choose_packed(
    num_rows: int, n: int, k: int, ending: Ending, form: Numbers, num_processors: int, device: int
) -> StreamTiles | None:
    clusters_at_once = partial(_clusters_at_once, device)
    return StreamTiles.choose_packed(num_rows, n, k, ending, form, num_processors, clusters_at_once)


def _clusters_at_once(device: int, size: int) -> int:
    widest = SMALLEST.with_stages(1 << 20)  # as with every variant, a multiprocessor has no room for two programs
    return most_clusters(widest, device, size)
