"""What `srt doctor` says of the links between GPUs, by a stand-in for `nvidia-smi`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from srt.cli import doctor
from srt.cli.gpu_links import describe_links, read_ways, ways_of

UUIDS = ["aaaa", "bbbb", "cccc", "dddd"]
LISTED = "0, GPU-aaaa\n1, GPU-bbbb\n2, GPU-cccc\n3, GPU-dddd\n"
MATRIX = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tSYS\tPIX\t0-51\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tSYS\tSYS\t0-51\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tPHB\tSYS\t52-103\t1\t\tN/A
GPU3\tSYS\tSYS\tPHB\t X \tSYS\t52-103\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
"""
NVLINK = "over NVLink (18 links)"
MAY = ": ranks (--tp) and stages (--pp-size) on them may exchange data through it"


def test_the_ways_between_gpus_are_read_from_the_matrix() -> None:
    ways = ways_of(UUIDS, LISTED, MATRIX)
    assert ways[0, 1] == NVLINK
    assert ways[2, 3] == "over PCIe, through the processor"
    assert {ways[pair] for pair in ((0, 2), (0, 3), (1, 2), (1, 3))} == {
        "over PCIe and the connection between processors"
    }


def test_gpus_that_pytorch_numbers_otherwise_are_found_by_their_identity() -> None:
    assert ways_of(["dddd", "bbbb", "aaaa"], LISTED, MATRIX)[1, 2] == NVLINK


@pytest.mark.parametrize(("listed", "matrix"), [("", MATRIX), (LISTED, ""), (LISTED, "GPU0\n"), ("No devices\n", "x")])
def test_an_output_of_another_form_says_nothing(listed: str, matrix: str) -> None:
    assert ways_of(UUIDS, listed, matrix) == {}


def test_gpus_without_an_identity_or_of_another_kind_are_left_out() -> None:
    assert ways_of(["MIG-1", "aaaa", ""], LISTED, MATRIX) == {}


def test_alike_pairs_share_a_sentence() -> None:
    every = [(0, 1), (0, 2), (1, 2)]
    assert list(describe_links(UUIDS[:3], every, dict.fromkeys(every, NVLINK))) == [
        f"all 3 GPUs can access each other's memory, {NVLINK}{MAY}"
    ]
    assert list(describe_links(UUIDS[:2], [[0, 1]], {})) == [f"GPUs 0 and 1 can access each other's memory{MAY}"]


def test_unlike_pairs_are_named() -> None:
    said = list(describe_links(UUIDS, [(0, 1), (2, 3)], ways_of(UUIDS, LISTED, MATRIX)))
    assert said == [
        f"GPUs 0 and 1 can access each other's memory, {NVLINK}{MAY}",
        "the GPUs of each pair 0-2, 0-3, 1-2, 1-3 cannot access each other's memory (they are connected over PCIe and the"
        " connection between processors): sums of --tp go through NCCL, and --pp-size is refused",
        f"GPUs 2 and 3 can access each other's memory, over PCIe, through the processor{MAY}",
    ]


def test_a_host_without_two_gpus_says_so() -> None:
    assert list(describe_links([], [], {})) == ["there are no two GPUs"]
    assert list(describe_links(["aaaa"], [], {})) == ["there are no two GPUs"]
    assert list(describe_links(UUIDS[:2], None, {})) == ["unknown: PyTorch did not say"]


def test_nothing_is_asked_where_there_are_no_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it was asked"))
    assert read_ways([]) == read_ways(UUIDS[:1]) == {}


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    command = tmp_path / "nvidia-smi"
    (tmp_path / "listed").write_text(LISTED)
    (tmp_path / "matrix").write_text(MATRIX)
    command.write_text(f"#!/bin/sh\ncase $1 in topo) cat {tmp_path}/matrix;; *) cat {tmp_path}/listed;; esac\n")
    command.chmod(0o755)
    return command


def test_the_page_shows_the_links(
    smi: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {
        "version": "2.13.0",
        "cuda": "13",
        "threads": 2,
        "gpus": ["one", "two"],
        "uuids": UUIDS[:2],
        "peers": [[0, 1]],
    }
    monkeypatch.setattr(doctor, "_torch_facts", lambda: facts)
    doctor.main(["--port", "0", "--device", "cpu"])
    page = capsys.readouterr().out
    assert f"  links between GPUs           GPUs 0 and 1 can access each other's memory, {NVLINK}{MAY}\n" in page


def test_a_command_that_fails_or_hangs_or_is_missing_says_nothing(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_ways(UUIDS)[0, 1] == NVLINK
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert read_ways(UUIDS) == {}
    monkeypatch.setattr("srt.cli.gpu_links.SMI_TIMEOUT_S", 0.2)
    smi.write_text("#!/bin/sh\nexec sleep 60\n")
    assert read_ways(UUIDS) == {}
    monkeypatch.setattr(subprocess, "run", _missing)
    assert read_ways(UUIDS) == {}


def _missing(*_: object, **__: object) -> None:
    raise FileNotFoundError("nvidia-smi")
