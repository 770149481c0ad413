"""Kernels that are compiled at the same time, before the first of them is launched. Importing this module imports Triton."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from triton import AsyncCompileMode, knobs
from triton.runtime import driver
from triton.runtime._async_compile import FutureKernel
from triton.runtime.jit import JITFunction

_UNWRITTEN: Final = (torch.empty, torch.empty_like, torch.Tensor.new_empty)


@contextmanager
def rehearsal(num_threads: int) -> Iterator[None]:
    """Inside, no kernel of ours is launched: threads compile it meanwhile. All of them are ready at the end, or one's error is raised.

    PyTorch and the libraries work as ever, on what ours would have written. Indices among that have to exist: memory from torch.empty
    is zeros inside, and there are a page 0, a location 0 and a token 0. What is made before may hold anything but indices.
    """
    jit_function: Any = JITFunction
    launch = jit_function.run
    kernels: set[Any] = set()

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        del warmup
        kernels.add(kernel)
        return launch(kernel, *args, grid=grid, warmup=True, **options)

    # Triton's compiler does not hold Python's lock for most of its time, nor does the assembler, a process of its own.
    with ThreadPoolExecutor(num_threads) as threads:
        compilers = _Compilers(threads)
        try:
            # Of an executor it uses `submit` alone. With an error it would not always end, so errors are left to `wait`.
            with AsyncCompileMode(compilers, ignore_errors=True), _Zeros():
                token = _compilers.set(compilers)
                jit_function.run = compile_only
                try:
                    yield
                finally:
                    jit_function.run = launch
                    _compilers.reset(token)
            compilers.wait()
        finally:
            _forget_futures(kernels)


def is_anything_cached() -> bool:
    """Whether Triton has kept a kernel here before."""
    folder = Path(knobs.cache.dir)
    return folder.is_dir() and any(folder.iterdir())


def is_rehearsing() -> bool:
    """Whether kernels are compiled at present, and not launched."""
    return _compilers.get() is not None


def is_rehearsed(kernel: Hashable, compile_it: Callable[[], object]) -> bool:
    """Whether this is a rehearsal, where kernels that are not Triton's are compiled and not launched either."""
    compilers = _compilers.get()
    if compilers is not None:
        compilers.submit_once(kernel, compile_it)
    return compilers is not None


def _forget_futures(kernels: set[Any]) -> None:
    """Some versions of Triton would raise at a launch what was raised here; kernels that were compiled lie among the caches."""
    for kernel in kernels:
        for compiled, *_ in kernel.device_caches.values():
            for key in [key for key, one in compiled.items() if isinstance(one, FutureKernel)]:
                del compiled[key]


class _Compilers:
    """Threads that compile, each kernel once."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._futures: dict[Hashable, Future[Any]] = {}

    def submit(self, compile_it: Callable[[], Any]) -> Future[Any]:
        """For Triton, which asks once for each kernel."""
        return self.submit_once(compile_it, partial(_compile_with_launcher, compile_it))

    def submit_once(self, kernel: Hashable, compile_it: Callable[[], object]) -> Future[Any]:
        if kernel not in self._futures:
            self._futures[kernel] = self._threads.submit(compile_it)
        return self._futures[kernel]

    def wait(self) -> None:
        for future in self._futures.values():
            future.result()


_compilers: ContextVar[_Compilers | None] = ContextVar("rehearsal", default=None)


def _compile_with_launcher(compile_it: Callable[[], Any]) -> Any:
    """Some versions of Triton have a C compiler make what launches a kernel, at its first launch; it stays among the caches."""
    kernel = compile_it()
    driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


class _Zeros(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in _UNWRITTEN else made
