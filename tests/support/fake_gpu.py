"""Stands in for a Hopper GPU where there is none: Triton's driver, and the kernels that a worker on a GPU launches, on tensors of a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime._async_compile import active_mode
from triton.runtime.jit import JITFunction

from srt.kernels.build import triton_support
from srt.kernels.sampling.adjust_logits import AdjustmentKernels
from srt.kernels.sampling.filter import filter_thresholds
from srt.kernels.sampling.sample import draw
from srt.layers import kernel_ops
from srt.layers.attention import triton_backend, triton_latent
from srt.layers.moe import expert_kernels
from srt.layers.sampler import Sampler
from srt.model_executor import device_ngram, loaded_model
from srt.model_executor.graphs import decode_runner, verified_tokens, verify_runner
from srt.model_executor.startup import start_drafter
from srt.model_executor.step import draw_store, input_buffers

DEVICE = -90  # of no other driver, as kernels are kept by device


class FakeGpu:
    """Triton's driver of a Hopper GPU on which nothing runs: `launched` has the names of the kernels that would."""

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.num_launchers = 0
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 227 << 10, "warpSize": 32},
            load_binary=lambda name, *rest: (object(), name, 32, 0, 1024),
        )

    def get_current_device(self) -> int:
        return DEVICE

    def get_current_stream(self, device: int) -> int:
        del device
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        del source
        self.num_launchers += 1
        return lambda *args: self.launched.append(metadata.name)


class AskedKernels:
    """Notes the variants of Triton's kernels that are asked for, each as a text, instead of compiling or launching them."""

    def __init__(self) -> None:
        self._found: set[str] = set()

    def pop(self) -> set[str]:
        """Return those that were asked for since the last call."""
        found = set(self._found)
        self._found.clear()
        return found

    def ask(self, kernel: Any, *args: Any, grid: object, warmup: bool, **options: Any) -> None:
        del grid, warmup
        *_, binder = kernel.device_caches[DEVICE]
        _, variant, given = binder(*args, **options)
        name = f"{kernel.__name__} {variant} {given}"
        self._found.add(name)
        if (compilers := active_mode.get()) is not None:
            compilers.compile(name, lambda: name)


def launch_kernels_of_gpus(monkeypatch: pytest.MonkeyPatch) -> AskedKernels:
    """Make workers on a CPU do what those on a GPU do, but for the kernels of Hopper alone. What kernels would write is left out."""
    gpu, asked = torch.device("cuda"), AskedKernels()
    monkeypatch.setattr(driver, "_active", FakeGpu())
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **options: asked.ask(kernel, *args, **options))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for module in (triton_support, triton_backend, triton_latent):
        monkeypatch.setattr(module, "require_triton", lambda device_type: None, raising=False)
    for module in (kernel_ops, expert_kernels, triton_backend):
        monkeypatch.setattr(module, "has_pdl", lambda device: True)  # its variants depend on the number of rows
    monkeypatch.setattr(loaded_model, "layer_ops", kernel_ops.KernelOps)
    monkeypatch.setattr(decode_runner, "cpu_step_of", lambda *parts: None)
    for module, name in ((verify_runner, "table_operations"), (input_buffers, "_gather_operations")):
        of_gpu = getattr(verified_tokens if module is verify_runner else module, name)(gpu)
        monkeypatch.setattr(module, name, lambda device, of_gpu=of_gpu: of_gpu)
    draft_ngrams = device_ngram._draft_operation(True)
    monkeypatch.setattr(device_ngram, "_draft_operation", lambda is_cuda: draft_ngrams)

    def store(device: torch.device, max_rows: int, window: int) -> draw_store.DrawStore:
        words = torch.zeros((max(draw_store.RING, window + 1), max_rows), dtype=torch.int64)
        last = torch.zeros(1, dtype=torch.int64, device=device)
        return draw_store.DrawStore(words, last, draw_store.cuda_launch(), lambda: True)

    monkeypatch.setattr(draw_store.DrawStore, "allocate", store)
    begin = Sampler.__init__

    def begin_with_kernels(sampler: Sampler, *parts: Any, **others: Any) -> None:
        begin(sampler, *parts, **others)
        sampler._draw_from_shard = partial(draw, pdl=True)
        sampler._thresholds = partial(filter_thresholds, pdl=True)

    def adjuster(sampler: Sampler, logits: torch.Tensor) -> Callable[..., None]:
        if sampler._adjustment_kernels is None:
            num_slots = sampler._tables.num_slots
            sampler._adjustment_kernels = AdjustmentKernels.allocate(num_slots, logits.shape[1], logits.device)
        return sampler._adjustment_kernels

    monkeypatch.setattr(Sampler, "__init__", begin_with_kernels)
    monkeypatch.setattr(Sampler, "_adjuster", adjuster)
    init_attention = loaded_model.init_attention_backend
    monkeypatch.setattr(
        start_drafter,
        "init_attention_backend",
        lambda args, *others: init_attention(replace(args, attention_backend="triton"), *others),
    )
    return asked
