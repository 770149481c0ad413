"""Compile the code for steps on a CPU: `python -m scripts.compile_cpu_kernels`. Needs a C++ compiler (c++, or the one in CXX).

The result lies where `srt.kernels.build.cpu_library` looks for it, and what was built of earlier sources is deleted.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

TIMEOUT_S = 600.0


def compile_library(path: Path) -> None:
    """Leave the library at `path`. RuntimeError if it cannot be compiled."""
    from srt.kernels.build.cpu_library import OPTIONS, UNITS

    if platform.machine() != "x86_64":
        raise RuntimeError("the code for steps on a CPU serves x86-64 processors only")
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    if shutil.which(compiler[0]) is None:
        raise RuntimeError(f"there is no C++ compiler {compiler[0]!r}: install g++, or name another one with CXX")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        new = Path(scratch, path.name)
        objects = [Path(scratch, f"{unit.stem}.o") for unit in UNITS]
        for (unit, options), made in zip(UNITS.items(), objects, strict=True):
            _run([*compiler, *OPTIONS, *options, "-c", "-o", str(made), str(unit)])
        _run([*compiler, *OPTIONS, "-shared", "-o", str(new), *map(str, objects)])
        new.rename(path)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-2000:])


def main() -> None:
    from srt.kernels.build.cpu_library import built_library

    path = built_library()
    shutil.rmtree(path.parents[1], ignore_errors=True)
    compile_library(path)
    print(f"compiled into {path}")


if __name__ == "__main__":
    main()
