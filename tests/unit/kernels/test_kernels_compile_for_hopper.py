"""Every kernel compiles for sm_90, down to machine code, on a machine without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[3] / "srt" / "kernels"


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What `python -m srt.kernels.builds` prints, with an empty cache and without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-m", "srt.kernels.builds"]
    done = subprocess.run(command, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kernel", ["write_kv", "decode_attention", "extend"])
def test_a_kernel_becomes_a_hopper_binary_that_fits_into_shared_memory(
    printed: str, kernel: str, head_dim: int
) -> None:
    line = re.search(rf"^{kernel}\[bf16, head_dim {head_dim}\]: cubin of (\d+) bytes, (\d+) bytes of", printed, re.M)
    assert line is not None, printed
    assert int(line[1]) > 0
    assert int(line[2]) <= 227 * 1024


def test_no_kernel_is_missing_from_the_list_of_builds(printed: str) -> None:
    defined = {
        name for file in KERNELS.glob("*.py") for name in re.findall(r"^def (\w+)_kernel\(", file.read_text(), re.M)
    }
    assert defined == set(re.findall(r"^(\w+)\[", printed, re.M))
