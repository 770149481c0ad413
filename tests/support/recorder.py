"""Stands in for CUDA graphs where there is no GPU: what is replayed is the work that a graph would hold. With attention for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from srt.layers.attention.attention_spec import AttentionLayer
from srt.layers.attention.base import AnyRows, DecodeGraphs, HostPlans, PromptGraphs
from srt.layers.attention.torch_native import TorchNativeBackend, group_rows
from srt.model_executor.forward_batch_info import ForwardBatch
from srt.model_executor.graphs.cuda_graph_runner import NUM_WARM_UPS, Work
from srt.model_executor.step.draw_store import RING, DrawStore, store_draws_reference


class Recorder:
    """Counts captures and replays."""

    def __init__(self) -> None:
        self.num_captures = 0
        self.num_replays = 0

    def __call__(self, work: Work, warm_up: Work | None = None) -> Work:
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


class UnseenGraphs(Recorder):
    """Like CUDA's: work runs to warm up, is then recorded, and nobody sees a replay store draws.

    So of stores of draws: a recorded one does not run, and one in a replay runs without being launched. What they tell the host
    arrives when it asks whether the device is idle.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_recording = False
        self.is_replaying = False

    def pieces(self, work: Callable[[Work], None]) -> list[Work]:
        for _ in range(NUM_WARM_UPS):
            work(lambda: None)
        self.is_recording = True
        replays = super().pieces(work)
        self.is_recording = False
        return [partial(self._replay, replay) for replay in replays]

    def _replay(self, replay: Work) -> None:
        self.is_replaying = True
        replay()
        self.is_replaying = False

    def allocate_store(self, device: torch.device, max_rows: int, window: int) -> DrawStore:
        del window
        words, here = (torch.zeros((RING, max_rows), dtype=torch.int64, device=device) for _ in range(2))
        last = torch.zeros(1, dtype=torch.int64, device=device)

        def launch(*tensors: torch.Tensor) -> bool:
            if self.is_recording:
                return False
            ids, values, row_slots, positions, token_table, *_ = tensors
            store_draws_reference(ids, values, row_slots, positions, token_table, here, last)
            return not self.is_replaying

        def is_idle() -> bool:
            words.copy_(here)
            return True

        return DrawStore(words, last, launch, is_idle)


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


class PlansAtOnce(TorchNativeBackend):
    """Reads the page table when a decode is planned, and lengths from the host, as flashinfer does."""

    @property
    def decode_graphs(self) -> DecodeGraphs:
        return self

    @property
    def host_plans(self) -> HostPlans:
        return self

    def plan_decode(self, batch: ForwardBatch) -> None:
        rows = np.arange(batch.num_extend_rows, batch.batch_size)
        told = replace(batch, seq_lens=torch.from_numpy(batch.seq_lens_cpu))
        self._decodes = {None: group_rows(told, rows, rows - batch.num_extend_rows, None)}

    def init_cuda_graph_state(self, max_bs: int) -> None:
        del max_bs

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> None:
        self.plan_decode(batch)

    def init_forward_metadata_replay_cuda_graph(self, batch: ForwardBatch) -> None:
        self.plan_decode(batch)


class NamesPromptGraphs(TorchNativeBackend):
    """Says that graphs can hold its prompts, for tests in which none does."""

    @property
    def prompt_graphs(self) -> PromptGraphs | None:
        return self

    def begin_any(self, rows: AnyRows, batch: ForwardBatch) -> None:
        del rows, batch

    def attend_any(
        self, q: torch.Tensor, rows: AnyRows, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor
    ) -> None:
        del q, rows, layer, batch, out
