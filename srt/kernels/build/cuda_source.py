"""Compile CUDA C++ kernels on the machine where they run, with the compiler that comes with PyTorch for CUDA, and cache the result."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from srt.utils.cache_folders import own_folder


@cache
def cuda() -> tuple[Any, Any]:
    """Return NVIDIA's bindings of the driver and of the run-time compiler. PyTorch for CPUs does not include them."""
    from cuda.bindings import driver, nvrtc

    return driver, nvrtc


def checked(result: tuple[Any, ...]) -> Any:
    """Return the results of a call of these bindings without the status that comes first; RuntimeError if the call failed."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA says {status.name}")
    return values[0] if len(values) == 1 else values


def machine_code(source: str, constants: Mapping[str, int], architecture: str) -> bytes:
    """Return the compiled source from the cache, or compile it. Waits if another thread is compiling the same source."""
    key = repr((source, sorted(constants.items()), architecture, torch.version.cuda))
    path = own_folder("kernels", os.environ) / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    with _under_way.setdefault(path, Lock()):
        return _kept_code(path, source, constants, architecture)


_under_way: dict[Path, Lock] = {}


def _kept_code(path: Path, source: str, constants: Mapping[str, int], architecture: str) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    code = compile_source(source, constants, architecture)
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        new = os.path.join(scratch, path.name)
        with open(new, "wb") as file:
            file.write(code)
        os.replace(new, path)
    return code


def compile_source(source: str, constants: Mapping[str, int], architecture: str) -> bytes:
    """Return machine code for an architecture such as sm_90a. Needs no GPU."""
    _, nvrtc = cuda()
    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    try:
        options = [f"--gpu-architecture={architecture}", "--std=c++17"]
        options += [f"--define-macro={name}={value}" for name, value in constants.items()]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if int(status) != 0:
            said = bytes(checked(nvrtc.nvrtcGetProgramLogSize(program)))
            checked(nvrtc.nvrtcGetProgramLog(program, said))
            raise RuntimeError(f"with {dict(constants)} the kernel cannot be compiled: {said.decode(errors='replace')}")
        code = bytes(checked(nvrtc.nvrtcGetCUBINSize(program)))
        checked(nvrtc.nvrtcGetCUBIN(program, code))
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)
