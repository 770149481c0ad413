"""Run a CUDA kernel of ranks that wait for each other on the host: each of its threads as one of the host, under ThreadSanitizer."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

from srt.kernels.build.arrival import ARRIVAL
from tests.support.server_process import ROOT

COLLECTIVES: Final = ROOT / "srt/kernels/collectives"
_OF_ARRIVAL: Final = "nanoseconds", "give_up", "write_number", "read_number"  # functions in assembler
needs_compiler: Final = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


def host_source(kernel: str, assembler: Sequence[str], bugs: Sequence[tuple[str, str]] = ()) -> str:
    """Return the kernel's source without its functions in assembler, which cuda_on_host.h has, and with these changes."""
    files = ARRIVAL, *(COLLECTIVES / name for name in ("summands.cuh", "words.cuh", kernel))
    source = "".join(file.read_text("utf-8") for file in files)
    for name in (*_OF_ARRIVAL, *assembler):
        source, count = re.subn(
            rf"__device__ [^\n]*\b{name}\([^\n]*\n.*?^}}\n", "", source, flags=re.DOTALL | re.MULTILINE
        )
        assert count == 1, name
    assert "asm" not in source
    source = re.sub(r"__shared__ (\w+) (\w+)((\[[^\]]+\])+);", r"auto& \2 = *(\1(*)\3)shared_memory();", source)
    for right, wrong in bugs:
        assert right in source, right
        source = source.replace(right, wrong)
    return source


def run_ranks(program: str, source: str, constants: Mapping[str, float], folder: Path, timeout_s: float) -> str:
    """Compile the program of tests/unit/kernels around the kernel's source, run it, and return what it and ThreadSanitizer say."""
    kernel, ranks = folder / "kernel.cu", folder / "ranks"
    kernel.write_text(source)
    command = ["g++", "-std=c++20", "-O1", "-g", "-fsanitize=thread", "-pthread", "-w", "-o", str(ranks)]
    command += [f"-D{name}={value}" for name, value in constants.items()]
    command += [f'-DKERNEL="{kernel}"', f"-I{ROOT / 'tests/support'}"]
    subprocess.run([*command, str(ROOT / "tests/unit/kernels" / program)], check=True)
    environment = {"TSAN_OPTIONS": "halt_on_error=1:exitcode=9"}
    ran = subprocess.run([str(ranks)], capture_output=True, text=True, check=False, timeout=timeout_s, env=environment)
    if "unexpected memory mapping" in ran.stderr:
        pytest.skip("ThreadSanitizer does not know how this system maps memory")
    return ran.stdout + ran.stderr
