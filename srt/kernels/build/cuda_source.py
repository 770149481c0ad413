"""Kernels in CUDA's C++: compiled where they run, by the compiler that PyTorch for CUDA brings along, and kept among the caches."""

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
    """NVIDIA's bindings of the driver and of the run-time compiler. They are not there with PyTorch for CPUs."""
    from cuda.bindings import driver, nvrtc

    return driver, nvrtc


def checked(result: tuple[Any, ...]) -> Any:
    """What a function of these bindings returned, without the status that comes first."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA says {status.name}")
    return values[0] if len(values) == 1 else values


def machine_code(source: str, constants: Mapping[str, int], architecture: str) -> bytes:
    """As `compile_source`, or as it was compiled before. Who asks for what another thread compiles waits for that."""
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
    """Machine code for an architecture like sm_90a. No GPU is touched."""
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
