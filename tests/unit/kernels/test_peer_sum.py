"""Which sums over ranks the kernel takes, and that it compiles, on a machine without a GPU. What it computes: tests/gpu."""

from __future__ import annotations

import contextlib
import ctypes

import pytest
import torch

from srt.kernels.build import hopper
from srt.kernels.build.cuda_source import compile_source
from srt.kernels.build.hopper import ARCHITECTURE
from srt.kernels.collectives.peer_sum import (
    LETTERS,
    MOST_BYTES,
    PROGRAMS,
    Mail,
    PeerKernel,
    add_parts,
    add_parts_and_norm,
    is_gatherable,
    is_normable,
    is_summable,
    memory_bytes,
    own_place,
)

PROCESSORS = 132  # of an H200
ROW_OF_8B = 4096 * 2


def test_steps_of_up_to_256_rows_of_8b_are_added_up_by_four_ranks_and_of_64_by_more() -> None:
    for ranks, most in ((2, 256), (4, 256), (5, 64), (8, 64)):
        assert all(is_summable(torch.bfloat16, rows * ROW_OF_8B, ranks) for rows in (1, 3, most))
        assert not is_summable(torch.bfloat16, (most + 1) * ROW_OF_8B, ranks)


def test_types_and_sizes_decide_alone() -> None:
    assert is_summable(torch.float16, 8, 2) and is_summable(torch.float32, MOST_BYTES, 2)
    assert not is_summable(torch.float64, 8, 2) and not is_summable(torch.int32, 8, 2)
    assert is_gatherable(8, 2) and is_gatherable(MOST_BYTES, 2)
    for num_bytes in (0, 4, 12, MOST_BYTES + 8):
        assert not is_gatherable(num_bytes, 2) and not is_summable(torch.float32, num_bytes, 2)


def test_rows_of_8b_are_normed_in_the_same_launch_but_one_alone() -> None:
    assert all(is_normable(torch.bfloat16, rows, ROW_OF_8B, 2) for rows in (2, 16, 128))
    assert not is_normable(torch.bfloat16, 1, ROW_OF_8B, 2)
    assert not is_normable(torch.bfloat16, 129, ROW_OF_8B, 2)
    assert is_normable(torch.bfloat16, 64, ROW_OF_8B, 8) and not is_normable(torch.bfloat16, 65, ROW_OF_8B, 8)


def test_a_program_has_room_for_a_row_of_so_many_boxes() -> None:
    assert is_normable(torch.bfloat16, 128, 1024 * 2, 2) and is_normable(torch.bfloat16, 128, 5120 * 2, 2)
    assert is_normable(torch.bfloat16, 128, 8192 * 2, 2) and not is_normable(torch.bfloat16, 2, 8193 * 2, 2)
    assert not is_normable(torch.bfloat16, 2, 4098, 2) and not is_normable(torch.float64, 2, 4096, 2)
    assert not is_normable(torch.bfloat16, 2, 0, 2) and not is_normable(torch.bfloat16, 0, 4096, 2)


def test_all_programs_run_at_once() -> None:
    # One that waited for another rank's program while that one waits for a place on its processor would wait for ever.
    assert PROGRAMS <= PROCESSORS and LETTERS <= 1024


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_rank_has_a_place_of_its_own_where_nobody_writes(ranks: int) -> None:
    places = [own_place(rank) for rank in range(ranks)]
    assert len(set(places)) == ranks
    assert max(places) + 16 <= memory_bytes(ranks)
    assert memory_bytes(ranks) % (2 << 20) == 0, "whole blocks of the driver's: nothing else lies in what others map"


def test_the_kernels_structure_has_no_holes_but_at_its_end() -> None:
    assert [getattr(Mail, name).offset for name, _ in Mail._fields_] == [0, 64, 72, 80, 88]
    assert ctypes.sizeof(Mail) == 96


KERNELS = [
    *(
        PeerKernel(ranks, dtype)
        for ranks in (2, 3, 8)
        for dtype in (torch.bfloat16, torch.float16, torch.float32, None)
    ),
    *(PeerKernel(2, dtype, parts=parts) for dtype in (torch.bfloat16, torch.float32, None) for parts in (2, 4)),
    *(PeerKernel(4, torch.bfloat16, parts=parts) for parts in (2, 4)),
    *(PeerKernel(ranks, torch.bfloat16, is_normed=True, parts=parts) for ranks in (2, 8) for parts in (1, 2, 4)),
    *(PeerKernel(2, dtype, is_normed=True, parts=2) for dtype in (torch.float16, torch.float32)),
]


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_it_compiles_for_hopper(kernel: PeerKernel) -> None:
    assert compile_source(kernel.source, kernel.constants, ARCHITECTURE).startswith(b"\x7fELF")


def test_precompiling_compiles_the_kernel_of_each_size_and_launches_none(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[PeerKernel] = []

    def is_precompiled(kernel: PeerKernel, compile_it: object) -> bool:
        compiled.append(kernel)
        return True

    monkeypatch.setattr(hopper, "is_precompiled", is_precompiled)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    mail = Mail()
    for rows in (1, 64, 65, 256):
        x = torch.zeros(rows, 4096, dtype=torch.bfloat16)
        assert add_parts(x, mail, 2).shape == x.shape
    add_parts_and_norm(
        torch.zeros(3, 5120).bfloat16(), torch.zeros(3, 5120).bfloat16(), torch.ones(5120).bfloat16(), 1e-6, mail, 2
    )
    sizes = [(kernel.parts, kernel.is_normed) for kernel in compiled]
    assert sizes == [(1, False), (1, False), (2, False), (4, False), (3, True)]
