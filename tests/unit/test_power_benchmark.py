"""The benchmark of what reading and multiplying take: that its kernels compile, and what it makes of their figures."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks import limits, power
from benchmarks.gpu_readings import Readings
from benchmarks.power import PRODUCTS, READS, Found, Multiply, Read
from srt.kernels.build.cuda_source import compile_source
from srt.kernels.build.hopper import ARCHITECTURE

SHARED_BYTES = 227 * 1024  # of an H200's processor


@pytest.mark.parametrize("variant", [*READS, *PRODUCTS])
def test_its_kernels_compile_for_hopper_and_have_room(variant: Read | Multiply) -> None:
    assert compile_source(variant.source, variant.constants, ARCHITECTURE).startswith(b"\x7fELF")
    programs = variant.programs if isinstance(variant, Read) else 1
    assert programs * (variant.shared_bytes + 1024) <= SHARED_BYTES + 1024


def test_blocks_are_whole_parts_of_the_memory_and_of_what_warps_take() -> None:
    assert all(power.MEMORY % read.block == 0 and read.block % 2048 == 0 for read in READS)


def test_a_step_takes_its_bytes_and_then_its_operations_at_the_most_watts_seen() -> None:
    found = [
        Found("slow", True, 1e12, 200.0, 1980),
        Found("read", True, 4e12, 400.0, 1980),
        Found("multiply", False, 8e14, 640.0, 1500),
    ]
    assert [one.picojoules for one in found] == pytest.approx([200, 100, 0.8])
    shape = limits.Shape(1_000_000, 500_000, kv_bytes_per_token=1000, attention_flops_per_pair=0)
    joules = (3_000_000 + 4 * 50 * 1000) * 100e-12 + 2 * 4 * 1_500_000 * 0.8e-12
    assert power.step_s(found, shape, 4, 50) == pytest.approx(joules / 640)
    assert "100.00 pJ a byte" in found[1].line and "0.80 pJ an operation" in found[2].line


def test_readings_of_the_first_while_are_left_out() -> None:
    readings = Readings([100, 100, 100, 300, 500], [1.0, 2.0, 3.0, 10.0, 20.0])
    assert (readings.mhz_from(0.6), readings.watts_from(0.6)) == (400, 15)
    assert readings.text() == "    250 MHz    9 W"
    assert Readings([], []).text() == ""


@pytest.mark.parametrize(("words", "said"), [(["--seconds", "0.1"], "--seconds"), ([], "compute capability 9.0")])
def test_what_cannot_be_measured_is_refused(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["power", *words])
    with pytest.raises(SystemExit) as refusal:
        power.main()
    assert refusal.value.code == 2
    assert said in capsys.readouterr().err
