"""Stands in for CUDA graphs where there is no GPU: what is replayed is the work that a graph would hold."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from srt.model_executor.cuda_graph_runner import Work


class Recorder:
    """Counts captures and replays."""

    def __init__(self) -> None:
        self.num_captures = 0
        self.num_replays = 0

    def __call__(self, work: Work) -> Work:
        (replay,) = self.pieces(lambda cut: work())
        return replay

    def pieces(self, work: Callable[[Work], None]) -> list[Work]:
        cuts: list[None] = []
        work(lambda: cuts.append(None))
        self.num_captures += 1
        turns = _Turns(work)

        def replay() -> None:
            self.num_replays += 1
            turns.take()

        return [replay] * (len(cuts) + 1)


class _Turns:
    """The work, run to its next cut each time, in a thread that waits there; after its end it begins anew."""

    def __init__(self, work: Callable[[Work], None]) -> None:
        self._work = work
        self._go = threading.Semaphore(0)
        self._is_over = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def take(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._go.release()
        self._is_over.acquire()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        self._go.acquire()
        try:
            with torch.inference_mode():
                self._work(self._cut)
        except BaseException as error:
            self._error = error
        self._thread = None
        self._is_over.release()

    def _cut(self) -> None:
        self._is_over.release()
        self._go.acquire()
