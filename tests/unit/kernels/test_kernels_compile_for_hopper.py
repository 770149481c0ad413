"""Every kernel compiles for sm_90, down to machine code, on a machine without a GPU; and for sm_89 what takes much memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[3] / "srt" / "kernels"


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `python -m tests.kernel_builds.builds`, with an empty cache and without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.kernel_builds.builds", *words]
        done = subprocess.run(command, env=environment, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    return run


@pytest.fixture(scope="module")
def printed(build: Callable[..., subprocess.CompletedProcess[str]]) -> str:
    return build().stdout


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kernel", ["write_kv", "decode_attention", "extend"])
def test_a_kernel_becomes_a_hopper_binary_that_fits_into_shared_memory(
    printed: str, kernel: str, head_dim: int
) -> None:
    line = re.search(
        rf"^sm_90 {kernel}\[bf16, head_dim {head_dim}\]: cubin of (\d+) bytes, (\d+) bytes of", printed, re.M
    )
    assert line is not None, printed
    assert int(line[1]) > 0
    assert int(line[2]) <= 227 * 1024


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_no_kernel_is_missing_from_the_list_of_builds(printed: str) -> None:
    defined = {
        name for file in KERNELS.rglob("*.py") for name in re.findall(r"^def (\w+)_kernel\(", file.read_text(), re.M)
    }
    assert defined == set(re.findall(r"^sm_90 (\w+)\[", printed, re.M))


def test_kernels_with_much_shared_memory_are_cut_smaller_where_there_is_less(
    build: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """The L4 and the L40S have 99 KB for a program; with the tiles of Hopper this takes 120."""
    lines = build("--capability", "89", "--", "extend[bf16, head_dim 256]").stdout.splitlines()
    sizes = [
        int(size) for size in re.findall(r"^sm_89 .*, (\d+) bytes of shared memory$", "\n".join(lines), re.MULTILINE)
    ]
    assert sizes, lines
    assert len(sizes) == len(lines), lines
    assert all(30_000 < size <= 101_376 for size in sizes), lines
