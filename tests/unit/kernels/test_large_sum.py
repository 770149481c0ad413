"""That large sums over ranks compile, and what they compute, without a GPU: with a thread of the host for each of the kernel's."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from srt.kernels.build import hopper
from srt.kernels.build.cuda_source import compile_source
from srt.kernels.build.hopper import ARCHITECTURE
from srt.kernels.collectives import peer_sum
from srt.kernels.collectives.large_sum import (
    MOST_BYTES,
    PROGRAMS,
    PROGRAMS_AT_ONCE,
    SLOTS,
    THREADS,
    UNIT_BYTES,
    LargeKernel,
    LargeMail,
    LargeSums,
    box_bytes,
    boxed_bytes,
    is_normable,
    is_summable,
    memory_bytes,
    pieces,
)
from srt.kernels.collectives.large_sum import _Sum as Sum
from tests.support.ranks_on_host import host_source, needs_compiler, run_ranks

PROCESSORS = 132  # of an H200
CHUNK_OF_8B = 8192 * 4096 * 2
ASSEMBLER = "float_of_half", "pair_of_halves"


def run_on_host(
    kernel: LargeKernel, folder: Path, bugs: Sequence[tuple[str, str]] = (), row_words: int = 0, is_gone: bool = False
) -> str:
    """Run launches of this kernel on all ranks, and return what the program says, with what ThreadSanitizer does."""
    small = {"THREADS": 64, "PROGRAMS": 5, "PROGRAMS_AT_ONCE": 1, "SLOTS": 64}
    constants = {**kernel.constants, **small, "ROW_WORDS": row_words or 64 * kernel.parts, "GONE": int(is_gone)}
    source = host_source("large_sum.cu", ASSEMBLER, bugs)
    return run_ranks("large_sum_on_host.cpp", source, constants, folder, 240)


@needs_compiler
@pytest.mark.parametrize(
    ("ranks", "is_normed", "is_divided"),
    [
        (2, True, False),
        (3, False, True),
        *(
            pytest.param(*rest, marks=pytest.mark.full)
            for rest in ((2, False, False), (2, True, True), (4, True, True), (3, True, False))
        ),
    ],
)
def test_the_sums_are_those_of_rank_order_on_all_ranks_and_nothing_races(
    ranks: int, is_normed: bool, is_divided: bool, tmp_path: Path
) -> None:
    kernel = LargeKernel(ranks, torch.bfloat16, is_normed, 2, is_divided)
    assert run_on_host(kernel, tmp_path, row_words=100 if is_normed else 0) == "right\n"


@needs_compiler
@pytest.mark.parametrize(
    "bug",
    [
        [("(int)(run & 1) * BOXES", "0 * BOXES")],  # one side
        [
            (
                "  __syncthreads();\n  if (threadIdx.x == 0) {\n    __threadfence_system",
                "  if (threadIdx.x == 0) {\n    __threadfence_system",
            )
        ],
        [("await_unit(boxes, run, unit, from);\n  __syncthreads();", "await_unit(boxes, run, unit, from);")],
    ],
    ids=["one side", "numbers before units", "units before numbers"],
)
def test_a_protocol_that_is_wrong_is_noticed(bug: list[tuple[str, str]], tmp_path: Path) -> None:
    said = run_on_host(LargeKernel(2, torch.bfloat16, is_normed=True, parts=1), tmp_path, bug)
    assert "data race" in said or "launch" in said, said


@needs_compiler
@pytest.mark.parametrize(("ranks", "is_divided"), [(2, False), (3, True)])
def test_a_rank_that_is_gone_is_named_after_the_patience(ranks: int, is_divided: bool, tmp_path: Path) -> None:
    kernel = LargeKernel(ranks, torch.bfloat16, is_normed=True, parts=1, is_divided=is_divided)
    said = run_on_host(kernel, tmp_path, is_gone=True)
    # With three ranks one that waits for the owner of a unit may lose patience before the owner itself.
    assert re.match(r"gave up on rank [012]\n" if is_divided else r"gave up on rank 1\n", said), said


KERNELS = [
    *(
        LargeKernel(ranks, dtype, is_divided=ranks > 2)
        for ranks in (2, 3, 4)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ),
    *(LargeKernel(ranks, torch.bfloat16, True, parts, ranks > 2) for ranks in (2, 4) for parts in (1, 2, 3, 4)),
    *(LargeKernel(2, torch.bfloat16, is_normed, 2, True) for is_normed in (False, True)),
]


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_it_compiles_for_hopper(kernel: LargeKernel) -> None:
    assert compile_source(kernel.source, kernel.constants, ARCHITECTURE).startswith(b"\x7fELF")


def test_all_programs_run_at_once() -> None:
    assert PROGRAMS <= PROCESSORS * PROGRAMS_AT_ONCE and PROGRAMS == peer_sum.PROGRAMS * PROGRAMS_AT_ONCE
    assert PROGRAMS_AT_ONCE * THREADS <= 2048


def test_the_kernels_structures_have_no_holes_but_at_their_ends() -> None:
    assert [getattr(LargeMail, name).offset for name, _ in LargeMail._fields_] == [0, 32, 40, 48, 56, 64]
    assert [getattr(Sum, name).offset for name, *_ in Sum._fields_] == [0, 8, 16, 24, 32, 40, 44, 48, 52, 56, 60]
    assert (ctypes.sizeof(LargeMail), ctypes.sizeof(Sum)) == (72, 64)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("row_bytes", [16, 5120, 8192, 8208, 16384])
def test_what_is_sent_in_a_launch_has_room(ranks: int, row_bytes: int) -> None:
    """Slots of a divided launch: two for each of the complete or incomplete groups of units, one of each rank."""
    for most_bytes in (boxed_bytes(ranks, 3 << 20), CHUNK_OF_8B, MOST_BYTES):
        unit_bytes = max(1, UNIT_BYTES // row_bytes) * row_bytes
        units = most_bytes // unit_bytes
        slots = units if ranks == 2 else 2 * -(-units // ranks)
        divided_slots = 2 * -(-units // ranks)
        assert max(slots, divided_slots) <= SLOTS
        assert max(slots, divided_slots) * unit_bytes <= box_bytes(ranks, most_bytes)
        room = 2 * (ranks - 1) * (box_bytes(ranks, most_bytes) + 8 * SLOTS)
        assert 0 <= memory_bytes(ranks, most_bytes) - room < 2 << 20
        assert memory_bytes(ranks, most_bytes) % (2 << 20) == 0, "whole blocks of the driver's"


def test_steps_decide_whether_there_are_boxes() -> None:
    assert boxed_bytes(2, peer_sum.MOST_BYTES) == 0, "the small ones have room for all"
    assert boxed_bytes(5, CHUNK_OF_8B) == 0
    assert CHUNK_OF_8B <= boxed_bytes(2, CHUNK_OF_8B) <= CHUNK_OF_8B + UNIT_BYTES
    assert boxed_bytes(4, 4 * CHUNK_OF_8B) == MOST_BYTES
    assert memory_bytes(2, 0) == 0
    assert is_summable(torch.bfloat16, CHUNK_OF_8B) and not is_summable(torch.bfloat16, CHUNK_OF_8B + 2)
    assert not is_summable(torch.float64, CHUNK_OF_8B)
    assert is_normable(2 * 8192) and not is_normable(2 * 8200) and not is_normable(2 * 4097)


def test_three_ranks_cannot_send_whole_parts_for_which_their_boxes_have_no_room() -> None:
    whole = replace(LargeSums.of(LargeMail(), 3, CHUNK_OF_8B), is_divided=False)
    with pytest.raises(AssertionError, match="no room"):
        whole.add(torch.zeros(300, 4096).bfloat16())


def test_units_for_which_boxes_have_no_room_are_not_sent() -> None:
    """Boxes have room for incomplete groups of units of 32 KiB, not of larger ones."""
    most_bytes = boxed_bytes(3, 2487 * 2560 * 2)
    mail = LargeMail(box_bytes=box_bytes(3, most_bytes))
    large = replace(LargeSums.of(mail, 3, most_bytes), unit_bytes=64 << 10)
    x = torch.zeros(2487, 2560).bfloat16()
    with pytest.raises(AssertionError, match="no room for 140 units"):
        large.add_and_norm(x, x, x[0], 1e-6)


@pytest.mark.parametrize(("num_units", "most"), [(1, 1), (64, 64), (65, 64), (1000, 64), (7, 3)])
def test_what_has_no_room_at_once_takes_several_launches_of_the_same_size(num_units: int, most: int) -> None:
    found = pieces(num_units, most)
    assert [first for first, _ in found] == [sum(count for _, count in found[:n]) for n in range(len(found))]
    assert sum(count for _, count in found) == num_units
    counts = [count for _, count in found]
    assert min(counts) > 0 and max(counts) <= most and len(counts) == -(-num_units // most)


def test_precompiling_compiles_the_kernel_of_each_width_and_launches_none(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[LargeKernel] = []

    def is_precompiled(kernel: LargeKernel, compile_it: object) -> bool:
        compiled.append(kernel)
        return True

    monkeypatch.setattr(hopper, "is_precompiled", is_precompiled)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    for ranks, width in ((2, 4096), (3, 1024)):
        sums = LargeSums.of(LargeMail(box_bytes=box_bytes(ranks, 1 << 20)), ranks, 1 << 20)
        x = torch.zeros(300, width).bfloat16()
        assert sums.add(x).shape == x.shape
        sums.add_and_norm(x, x, torch.ones(width).bfloat16(), 1e-6)
    found = [(kernel.ranks, kernel.parts, kernel.is_normed, kernel.is_divided) for kernel in compiled]
    assert found[: len(found) - 2] == [(2, 4, False, False)] * 3 + [(2, 2, True, False)] * 3
    assert found[-2:] == [(3, 4, False, True), (3, 1, True, True)]
