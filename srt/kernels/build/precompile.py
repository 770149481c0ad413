"""Compile kernels in parallel, before the first of them is launched. Importing this module imports Triton."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from threading import Event, Lock
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from triton.runtime import driver
from triton.runtime._async_compile import active_mode
from triton.runtime.jit import JITFunction

logger = logging.getLogger(__name__)

LONG_S: Final = 120.0  # longest expected wait for the last kernels after all others are done; one takes seconds
_UNWRITTEN: Final = (torch.empty, torch.empty_like, torch.Tensor.new_empty)


class Compilers:
    """Threads that compile each kernel once into the caches on disk. They continue after the block `precompiling` has ended."""

    def __init__(self, num_threads: int, begin: Event | None = None) -> None:
        """Start compiling at once, or when `begin` is set."""
        # Triton's compiler releases the GIL for most of its time, and the assembler is a separate process.
        self._threads = ThreadPoolExecutor(num_threads, initializer=None if begin is None else begin.wait)
        self._futures: dict[Hashable, Future[Any]] = {}
        self._asked = set[Future[Any]]()
        self._pending: list[_Pending] = []

    def compile(self, kernel: Hashable, compile_it: Callable[[], object]) -> Future[Any]:
        future = self._futures.get(kernel) or self._threads.submit(compile_it)
        self._futures[kernel] = future
        self._asked.add(future)
        return future

    def pop_asked(self) -> frozenset[Future[Any]]:
        """Return the kernels requested since the last call."""
        asked = frozenset(self._asked)
        self._asked.clear()
        return asked

    def wait(self, kernels: Collection[Future[Any]]) -> None:
        """Wait until these kernels are compiled and launches find them; raise the error of one that failed."""
        wait(kernels)
        for pending in self._pending:
            if pending.future in kernels and pending.future.exception() is None:
                pending.finish(pending.future.result())
        for future in kernels:
            future.result()

    def __del__(self) -> None:
        """Cancel the compilations that have not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def no_more(self, are_all_there: Callable[[], None]) -> None:
        """Accept no more kernels. Call `are_all_there` once all are compiled; if one fails, log a warning instead."""
        self._threads.submit(_conclude, self._futures, self._pending, are_all_there)
        self._threads.shutdown(wait=False)

    # ---- Triton's interface

    def submit(self, key: str, compile_it: Callable[[], Any], finish: Callable[[Any], None], *rest: object) -> _Pending:
        """Compile a kernel for Triton. Its own asynchronous mode calls this method too, but would wait for all kernels at its end."""
        del rest
        pending = _Pending(self.compile(key, partial(_compile_with_launcher, compile_it)), finish)
        self._pending.append(pending)
        return pending

    def asks_for(self, kernel: object) -> None:
        """Note that a launch found this kernel among Triton's caches."""
        if isinstance(kernel, _Pending):
            self._asked.add(kernel.future)


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A placeholder in Triton's caches for a kernel that is still being compiled."""

    future: Future[Any]
    finish: Callable[[Any], None]  # puts the kernel into Triton's caches


@contextmanager
def precompiling(compilers: Compilers) -> Iterator[None]:
    """Compile our kernels instead of launching them inside this block.

    PyTorch and the libraries run as usual, on whatever our kernels would have written. Indices in it must be valid: memory from
    torch.empty is zeroed inside the block, and page 0, location 0 and token 0 must exist. Memory allocated before may hold any values
    that are not used as indices.
    """
    jit_function: Any = JITFunction
    launch = jit_function.run
    kernels: set[Any] = set()

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        del warmup
        kernels.add(kernel)
        compilers.asks_for(launch(kernel, *args, grid=grid, warmup=True, **options))

    with _Zeros():
        token, mode = _compilers.set(compilers), active_mode.set(compilers)
        jit_function.run = compile_only
        try:
            yield
        finally:
            jit_function.run = launch
            active_mode.reset(mode)
            _compilers.reset(token)
            _forget_pending(kernels)


def is_precompiling() -> bool:
    """Return whether kernels are being compiled instead of launched."""
    return _compilers.get() is not None


def is_precompiled(kernel: Hashable, compile_it: Callable[[], object]) -> bool:
    """Return whether kernels are being precompiled, and if so request this kernel, which is not Triton's, instead of a launch."""
    compilers = _compilers.get()
    if compilers is not None:
        compilers.compile(kernel, compile_it)
    return compilers is not None


def _forget_pending(kernels: set[Any]) -> None:
    """Remove the placeholders, so that a launch finds the kernel on disk or compiles it; a failed compilation is thus tried again."""
    for kernel in kernels:
        for compiled, *_ in kernel.device_caches.values():
            for key in [key for key, one in compiled.items() if isinstance(one, _Pending)]:
                del compiled[key]


def _conclude(futures: dict[Hashable, Future[Any]], pending: list[_Pending], are_all_there: Callable[[], None]) -> None:
    """Wait for all kernels as the last task, report failures and forget the kernels, which are on disk.

    All other tasks have begun by now, each in a thread of its own.
    """
    late = wait(futures.values(), LONG_S).not_done
    if late:
        logger.warning(
            "%d of %d kernels are still being compiled after %.0f s more than the others: graphs that need them are not captured.",
            *(len(late), len(futures), LONG_S),
        )
        wait(late)
    errors = [error for future in futures.values() if (error := future.exception()) is not None]
    if errors:
        logger.warning(
            "%d of %d kernels cannot be compiled ahead, the first because of %s: %s",
            *(len(errors), len(futures), type(errors[0]).__name__, errors[0]),
        )
    else:
        are_all_there()
    futures.clear()
    pending.clear()


_compilers: ContextVar[Compilers | None] = ContextVar("precompiling", default=None)


def _compile_with_launcher(compile_it: Callable[[], Any]) -> Any:
    """Compile a kernel and its launcher: some versions of Triton build that with a C compiler at the first launch, and cache it."""
    kernel = compile_it()
    driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


_parsing = Lock()


def _parse_one_at_a_time() -> None:
    """Serialise Triton's parsing: up to Python 3.11 threads share the parser's depth counter, and fail if it differs at the end."""
    owner: Any = next(kind for kind in JITFunction.__mro__ if "parse" in vars(kind))
    parse = owner.parse

    def parse_alone(kernel: Any) -> Any:
        with _parsing:
            return parse(kernel)

    owner.parse = parse_alone


_parse_one_at_a_time()


class _Zeros(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in _UNWRITTEN else made
