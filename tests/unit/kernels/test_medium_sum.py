"""That medium sums over ranks compile, and what they compute, without a GPU: with a thread of the host for each of the kernel's."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from srt.kernels.build import hopper
from srt.kernels.build.cuda_source import compile_source
from srt.kernels.build.hopper import ARCHITECTURE
from srt.kernels.collectives.medium_sum import (
    BOX_BYTES,
    THREADS,
    MediumKernel,
    MediumSums,
    is_normable,
    is_summable,
    memory_bytes,
    most_bytes,
    num_boxes,
)
from srt.kernels.collectives.medium_sum import _Sum as Sum
from srt.kernels.collectives.peer_sum import PROGRAMS, Mail
from tests.support.ranks_on_host import host_source, needs_compiler, run_ranks

ROW_OF_8B = 4096 * 2
ASSEMBLER = "float_of_half pair_of_halves wait_for_earlier_kernels let_later_kernels_start write_place look_at".split()


def run_on_host(
    kernel: MediumKernel,
    folder: Path,
    bugs: Sequence[tuple[str, str]] = (),
    row_words: int = 0,
    is_gone: bool = False,
    patience_s: float = 60,
) -> str:
    """Run launches of this kernel on all ranks, and return what the program says, with what ThreadSanitizer does."""
    threads, programs = 64, 3
    constants: dict[str, float] = {**kernel.constants, "THREADS": threads, "PROGRAMS": programs}
    constants |= {"BOXES": programs * kernel.rows * kernel.parts, "ROW_WORDS": row_words or threads * kernel.parts}
    constants |= {"GONE": int(is_gone), "PATIENCE_S": patience_s}
    source = host_source("medium_sum.cu", ASSEMBLER, bugs)
    return run_ranks("medium_sum_on_host.cpp", source, constants, folder, 120)


@needs_compiler
@pytest.mark.parametrize(
    ("ranks", "is_normed", "rows", "parts"),
    [
        (2, True, 4, 1),
        *(
            pytest.param(*rest, marks=pytest.mark.full)
            for rest in ((3, True, 1, 2), (2, False, 4, 1), (2, True, 2, 2), (4, False, 1, 1))
        ),
    ],
)
def test_the_sums_are_those_of_rank_order_on_all_ranks_and_nothing_races(
    ranks: int, is_normed: bool, rows: int, parts: int, tmp_path: Path
) -> None:
    kernel = MediumKernel(ranks, torch.bfloat16, is_normed, rows, parts)
    row_words = (parts - 1) * 64 + 50 if is_normed else 0
    assert run_on_host(kernel, tmp_path, row_words=row_words) == "right\n"


@needs_compiler
@pytest.mark.parametrize(
    "bug",
    [
        [("(run & 1) * (RANKS - 1)", "0 * (RANKS - 1)")],
        [("make_uint4(EMPTY, EMPTY, EMPTY, EMPTY)", "parts[from]")],
        [("word == EMPTY ? OTHER_NAN : word", "word")],
        [("word.x == EMPTY || word.y == EMPTY || word.z == EMPTY || word.w == EMPTY", "word.x == EMPTY")],
        [("= own_run + 1;", "= own_run + (mail.rank == 0);")],
    ],
    ids=["one side", "never emptied", "a NaN that looks empty", "one word of four", "runs of one rank"],
)
def test_a_protocol_that_is_wrong_is_noticed(bug: list[tuple[str, str]], tmp_path: Path) -> None:
    kernel = MediumKernel(2, torch.bfloat16, is_normed=True, rows=2)
    said = run_on_host(kernel, tmp_path, bug, patience_s=2)
    assert "data race" in said or "launch" in said or "gave up" in said, said


@needs_compiler
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_rank_that_is_gone_is_named_after_the_patience(ranks: int, tmp_path: Path) -> None:
    kernel = MediumKernel(ranks, torch.bfloat16, is_normed=True)
    # The limit must be longer than a thread of the host may have to wait for a processor.
    assert run_on_host(kernel, tmp_path, is_gone=True, patience_s=4) == f"gave up on rank {ranks - 1}\n"


KERNELS = [
    *(MediumKernel(ranks, dtype) for ranks in (2, 3, 4, 8) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
    *(MediumKernel(ranks, torch.bfloat16, rows=rows) for ranks in (2, 4) for rows in (2, 4)),
    *(
        MediumKernel(2, torch.bfloat16, True, rows, parts)
        for rows, parts in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 3), (1, 4))
    ),
    *(MediumKernel(8, torch.bfloat16, True, 1, parts) for parts in (1, 2, 4)),
]


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_it_compiles_for_hopper(kernel: MediumKernel) -> None:
    assert compile_source(kernel.source, kernel.constants, ARCHITECTURE).startswith(b"\x7fELF")


def test_the_kernels_structure_has_no_holes_but_at_its_end() -> None:
    assert [getattr(Sum, name).offset for name, *_ in Sum._fields_] == [0, 8, 16, 24, 32, 40, 44, 48]
    assert ctypes.sizeof(Sum) == 56


def test_sizes_decide_which_sums_are_medium() -> None:
    for ranks, most in ((2, 512), (3, 256), (4, 256), (5, 64), (8, 64)):
        assert all(is_summable(torch.bfloat16, rows * ROW_OF_8B, ranks) for rows in (1, 3, most))
        assert not is_summable(torch.bfloat16, (most + 1) * ROW_OF_8B, ranks)
        assert most_bytes(ranks) == most * ROW_OF_8B
        assert memory_bytes(ranks) >= 2 * (ranks - 1) * num_boxes(ranks) * BOX_BYTES
        assert memory_bytes(ranks) % (2 << 20) == 0, "whole blocks of the driver's"
    assert not is_summable(torch.bfloat16, 8, 2) and not is_summable(torch.bfloat16, 0, 2)
    assert not is_summable(torch.float64, ROW_OF_8B, 2)
    assert memory_bytes(2) == 8 << 20


def test_rows_are_normed_in_the_same_launch_where_programs_have_room_but_one_alone() -> None:
    assert all(is_normable(torch.bfloat16, rows, ROW_OF_8B, 2) for rows in (2, 128, 129, 256, 512))
    assert not is_normable(torch.bfloat16, 1, ROW_OF_8B, 2) and not is_normable(torch.bfloat16, 513, ROW_OF_8B, 2)
    assert is_normable(torch.bfloat16, 512, 1024 * 2, 2) and not is_normable(torch.bfloat16, 513, 1024 * 2, 2)
    assert is_normable(torch.bfloat16, 256, 8192 * 2, 2) and not is_normable(torch.bfloat16, 257, 8192 * 2, 2)
    assert is_normable(torch.bfloat16, 128, 12288 * 2, 2) and not is_normable(torch.bfloat16, 129, 12288 * 2, 2)
    assert not is_normable(torch.bfloat16, 2, 4100, 2) and not is_normable(torch.bfloat16, 2, 4 * BOX_BYTES + 16, 2)
    assert is_normable(torch.bfloat16, 256, ROW_OF_8B, 4) and not is_normable(torch.bfloat16, 257, ROW_OF_8B, 4)


def test_all_programs_run_at_once_and_have_boxes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[MediumKernel] = []

    def is_precompiled(kernel: MediumKernel, compile_it: object) -> bool:
        compiled.append(kernel)
        return True

    monkeypatch.setattr(hopper, "is_precompiled", is_precompiled)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    assert PROGRAMS <= 132 and THREADS <= 1024
    for ranks in (2, 4, 8):
        sums = MediumSums(Mail(), ranks)
        for rows in (1, 2, 64, 128, 129, 256, 257, 512):
            for width in (64, 1024, 4096, 5120, 8192, 12288):
                x = torch.zeros(rows, width, dtype=torch.bfloat16)
                if is_summable(x.dtype, x.nbytes, ranks):
                    assert sums.add(x).shape == x.shape
                if is_normable(x.dtype, rows, width * 2, ranks):
                    sums.add_and_norm(x, x, torch.ones(width).bfloat16(), 1e-6)
    normed = {(kernel.rows, kernel.parts) for kernel in compiled if kernel.is_normed}
    assert normed == {(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 3)}
    assert {kernel.rows for kernel in compiled if not kernel.is_normed} == {1, 2, 4}
