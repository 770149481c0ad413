"""Find and load the compiled code for steps on a CPU (`srt/kernels/cpu/`), if it was built from exactly these sources.

    python -m scripts.compile_cpu_kernels      builds it; an installation builds it too if there is a C++ compiler

It uses neither torch nor Python, so one build serves all their versions. Nothing is compiled while a server runs.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import platform
from ctypes import c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)
SOURCES: Final = Path(__file__).parents[1] / "cpu"
AVX512: Final = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
UNITS: Final = {
    SOURCES / "decode_step.cpp": (),
    SOURCES / "batch_invariant.cpp": (),
    SOURCES / "prompt_attention.cpp": (),
    SOURCES / "prompt_kernels_avx2.cpp": (),
    SOURCES / "prompt_kernels_avx512.cpp": AVX512,
    SOURCES / "prompt_kernels_bfloat16.cpp": (*AVX512, "-mavx512bf16"),
}
"""The units, each with its options beside those of all. What runs on newer processors only is called only there."""

NAME: Final = "decode_step.so"
OPTIONS: Final = (
    "-std=c++17", "-O3", "-mavx2", "-mfma", "-mf16c", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wno-psabi",
)  # fmt: skip
FEATURES: Final = {"avx2", "fma", "f16c"}
"""What a processor must support; every x86 processor since 2015 does. Others use PyTorch's operations."""


def built_library() -> Path:
    """Return the path of the library for these sources and options. The file exists only if it was built."""
    digest = hashlib.blake2b(" ".join([*OPTIONS, *map(" ".join, UNITS.values())]).encode(), digest_size=8)
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.read_bytes())
    return SOURCES / "compiled" / digest.hexdigest() / NAME


def is_supported() -> bool:
    """Return whether this processor can run the library."""
    return platform.machine() == "x86_64" and processor_features() >= FEATURES


def processor_features() -> set[str]:
    """Return the names of the instruction sets that Linux reports for the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return set(flags.partition(":")[2].split())


@cache
def load_library() -> ctypes.CDLL | None:
    """Return the library; None if it was not built, or if this processor or this system cannot load it."""
    path = built_library()
    if not is_supported() or not path.is_file():
        return None
    try:
        return open_library(path)
    except OSError as error:
        logger.warning("PyTorch's operations run the steps, because their compiled code cannot be loaded: %s", error)
        return None


def open_library(path: Path) -> ctypes.CDLL:
    """Load a library that was built of these sources, and declare its functions."""
    library = ctypes.CDLL(str(path))
    library.srt_new_runner.restype, library.srt_new_runner.argtypes = c_void_p, (c_void_p, c_int)
    library.srt_delete_runner.restype, library.srt_delete_runner.argtypes = None, (c_void_p,)
    library.srt_run.restype, library.srt_run.argtypes = None, (c_void_p, c_void_p)
    library.srt_draw.restype, library.srt_draw.argtypes = None, (c_void_p, c_int)
    library.srt_gather.restype, library.srt_gather.argtypes = None, (c_void_p, c_int64, c_void_p, c_void_p, c_void_p)
    library.srt_store_draws.restype, library.srt_store_draws.argtypes = None, (c_void_p,)
    library.srt_verify.restype = library.srt_draft.restype = None
    library.srt_verify.argtypes = library.srt_draft.argtypes = c_void_p, c_void_p, c_void_p
    library.srt_draft_with_head.restype = None
    library.srt_draft_with_head.argtypes = c_void_p, c_void_p, c_void_p, c_void_p
    library.srt_attend_prompts.restype, library.srt_attend_prompts.argtypes = None, (c_void_p, c_int, c_int, c_int64)
    return library
