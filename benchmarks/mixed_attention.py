"""Attention of a step that has a chunk of a prompt beside rows that decode: one launch for all, or one for each kind.

    python -m benchmarks.mixed_attention [--chunk 512] [--rows 255] [--context 1024] [any option of the server]

Two launches are what serves: rows that decode go to the decode kernels. In one launch they would be chunks of one token. Prints the
microseconds of a layer for both ways, and how far their results are apart. The heads are Qwen3-8B's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks import limits
from srt.layers.attention.attention_spec import AttentionSpec
from srt.layers.attention.backend_choice import choose_backends, make_backend
from srt.layers.attention.base import AttentionBackend
from srt.layers.attention.radix_attention import RadixAttention
from srt.mem_cache.memory_pool import KVHeads, MHATokenToKVPool, ReqToTokenPool
from srt.model_executor.forward_batch_info import ForwardBatch, HostRows, RowArrays
from srt.model_executor.step.step_planner import row_arrays
from srt.server_args import parse_args

PAGE_SIZE = 16
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
RUNS = 20


@dataclass(frozen=True, slots=True)
class Step:
    """Row 0 is a chunk behind nothing or behind `prefix` tokens; each of the others is the last token of `context`."""

    chunk: int
    prefix: int
    rows: int
    context: int

    def lengths(self) -> np.ndarray:
        return np.array([self.prefix + self.chunk] + [self.context] * self.rows)

    def counts(self) -> np.ndarray:
        return np.array([self.chunk] + [1] * self.rows)


class World:
    """The tables and the memory of one layer, filled at random; each row's pages lie anywhere."""

    def __init__(self, step: Step, backend: AttentionBackend, spec: AttentionSpec, device: torch.device) -> None:
        self._step, self._backend, self._device = step, backend, device
        lengths = step.lengths()
        num_pages = -(-lengths // PAGE_SIZE)
        total = int(num_pages.sum())
        self._tables = ReqToTokenPool(len(lengths), int(lengths.max()), total, PAGE_SIZE, device)
        pages = torch.randperm(total, dtype=torch.int32, device=device).split(num_pages.tolist())
        for slot, own in enumerate(pages):
            self._tables.page_table[slot, : len(own)] = own
        self._memory = MHATokenToKVPool(total, PAGE_SIZE, [KVHeads(KV_HEADS, HEAD_DIM)], spec.dtype, device)
        for buffer in (*self._memory.k_buffer, *self._memory.v_buffer):
            buffer.normal_()
        self._layer = RadixAttention(HEADS, HEAD_DIM, KV_HEADS, 0, spec.scale)
        tokens = int(step.counts().sum())
        sizes = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
        self._q, self._k, self._v = (torch.randn(tokens, n, device=device).to(spec.dtype) for n in sizes)
        self._backend.write_kv(self._k, self._v, self._layer, self._batch(1))

    def attend(self, num_launches: int) -> torch.Tensor:
        return self._prepared(num_launches)()

    def microseconds(self, num_launches: int) -> float:
        """Of one layer, planned ahead: the best of some runs."""
        attend, times = self._prepared(num_launches), []
        for _ in range(RUNS):
            self._wait()
            begin_s = time.perf_counter()
            attend()
            self._wait()
            times.append(time.perf_counter() - begin_s)
        return min(times) * 1e6

    def _prepared(self, num_launches: int) -> Callable[[], torch.Tensor]:
        batch = self._batch(1 if num_launches == 2 else len(self._step.lengths()))
        self._backend.init_forward_metadata(batch)
        return lambda: self._backend.attend(self._q, self._k, self._v, self._layer, batch)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _batch(self, num_extends: int) -> ForwardBatch:
        lengths, counts = self._step.lengths(), self._step.counts()
        slots = np.arange(len(lengths))
        self._tables.seq_lens[: len(slots)] = torch.from_numpy(lengths - counts).to(self._device)
        extends = slice(0, num_extends)
        host = HostRows(slots, lengths, (lengths - counts)[extends], counts[extends], np.zeros(0, np.int64))
        arrays = row_arrays(host)
        on_device = (torch.from_numpy(getattr(arrays, name)).to(self._device) for name in RowArrays.__match_args__)
        return ForwardBatch.init_new(host, RowArrays(*on_device), self._tables, self._memory, self._backend)


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunk", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--prefix", type=int, default=0, help="tokens before the chunk")
    parser.add_argument("--rows", type=int, default=255, help="rows that decode")
    parser.add_argument("--context", type=int, default=1024, help="tokens that each of them sees")
    parser.add_argument("--jsonl", help="append the result to this file")
    options, server_options = parser.parse_known_args()
    args = parse_args(["--model-path", "none", *server_options])
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    step = Step(options.chunk, options.prefix, options.rows, options.context)
    longest = int(step.lengths().max())
    spec = AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, dtype, dtype, PAGE_SIZE, longest, (None,))
    choice = choose_backends(args, spec, device)
    world = World(step, make_backend(choice, spec, device), spec, device)
    one, two = world.attend(1).float(), world.attend(2).float()
    figures = {
        "one_launch_us": world.microseconds(1),
        "two_launches_us": world.microseconds(2),
        "difference": float((one - two).norm() / two.norm()),
    }
    print(
        f"{choice.name} on {device}: {options.chunk} tokens behind {options.prefix}, {options.rows} × {options.context}"
    )
    print("\n".join(f"{name:18} {value:12.4g}" for name, value in figures.items()))
    shape = {"chunk": step.chunk, "prefix": step.prefix, "rows": step.rows, "context": step.context}
    record = {"benchmark": "mixed_attention", "backend": choice.name, "device": str(device), **shape}
    limits.write_jsonl(options.jsonl, {**record, "versions": limits.versions(), **figures})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
