"""Kernels that are compiled at the same time, before the first of them is launched. Importing this module imports Triton."""

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

LONG_S: Final = 120.0  # for what is still compiled when all else is: a kernel takes seconds
_UNWRITTEN: Final = (torch.empty, torch.empty_like, torch.Tensor.new_empty)


class Compilers:
    """Threads that compile, each kernel once, into the caches on the disk. They go on when a precompiling has ended."""

    def __init__(self, num_threads: int, begin: Event | None = None) -> None:
        """Which they begin with at once, or when they are told so."""
        # Triton's compiler does not hold Python's lock for most of its time, nor does the assembler, a process of its own.
        self._threads = ThreadPoolExecutor(num_threads, initializer=None if begin is None else begin.wait)
        self._futures: dict[Hashable, Future[Any]] = {}
        self._asked = set[Future[Any]]()
        self._pending: list[_Pending] = []

    def compile(self, kernel: Hashable, compile_it: Callable[[], object]) -> Future[Any]:
        future = self._futures.get(kernel) or self._threads.submit(compile_it)
        self._futures[kernel] = future
        self._asked.add(future)
        return future

    def take_asked(self) -> frozenset[Future[Any]]:
        """The kernels that were asked for since this was last asked."""
        asked = frozenset(self._asked)
        self._asked.clear()
        return asked

    def wait(self, kernels: Collection[Future[Any]]) -> None:
        """Until these are there, and found by launches. If one cannot be, its error is raised then."""
        wait(kernels)
        for pending in self._pending:
            if pending.future in kernels and pending.future.exception() is None:
                pending.finish(pending.future.result())
        for future in kernels:
            future.result()

    def __del__(self) -> None:
        """What is not begun is not compiled any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def no_more(self, are_all_there: Callable[[], None]) -> None:
        """Nothing is asked for any more. What is called once all kernels are there; one that cannot be compiled is a warning instead."""
        self._threads.submit(_conclude, self._futures, self._pending, are_all_there)
        self._threads.shutdown(wait=False)

    # ---- For Triton

    def submit(self, key: str, compile_it: Callable[[], Any], finish: Callable[[Any], None], *rest: object) -> _Pending:
        """As its own mode for compiling at the same time has it. Of that only this is used: it would wait for all kernels at its end."""
        del rest
        pending = _Pending(self.compile(key, partial(_compile_with_launcher, compile_it)), finish)
        self._pending.append(pending)
        return pending

    def asks_for(self, kernel: object) -> None:
        """A kernel that was found among Triton's caches."""
        if isinstance(kernel, _Pending):
            self._asked.add(kernel.future)


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """Stands among Triton's caches for a kernel while precompiling go on."""

    future: Future[Any]
    finish: Callable[[Any], None]  # puts the kernel there


@contextmanager
def precompiling(compilers: Compilers) -> Iterator[None]:
    """Inside, no kernel of ours is launched: it is compiled meanwhile.

    PyTorch and the libraries work as ever, on what ours would have written. Indices among that have to exist: memory from torch.empty
    is zeros inside, and there are a page 0, a location 0 and a token 0. What is made before may hold anything but indices.
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
    """Whether kernels are compiled at present, and not launched."""
    return _compilers.get() is not None


def is_precompiled(kernel: Hashable, compile_it: Callable[[], object]) -> bool:
    """Whether this is a precompiling, where kernels that are not Triton's are compiled and not launched either."""
    compilers = _compilers.get()
    if compilers is not None:
        compilers.compile(kernel, compile_it)
    return compilers is not None


def _forget_pending(kernels: set[Any]) -> None:
    """Who launches one of them finds it on the disk, or compiles it: what failed once may be tried again."""
    for kernel in kernels:
        for compiled, *_ in kernel.device_caches.values():
            for key in [key for key, one in compiled.items() if isinstance(one, _Pending)]:
                del compiled[key]


def _conclude(futures: dict[Hashable, Future[Any]], pending: list[_Pending], are_all_there: Callable[[], None]) -> None:
    """The last that is done: all others have begun, each in a thread of its own. Keeps nothing of them, as they are on the disk."""
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
    """Some versions of Triton have a C compiler make what launches a kernel, at its first launch; it stays among the caches."""
    kernel = compile_it()
    driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


_parsing = Lock()


def _parse_one_at_a_time() -> None:
    """Up to Python 3.11 all threads share one count of how deep the tree is that the parser makes, and fail where it differs at the end."""
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
