"""What it brings that layers with a window keep only what it shows. No GPU:   python -m benchmarks.page_groups [--quick]

tokens  how many tokens of KV the same memory holds, in the first group and in the window group, against one group for all layers
hits    how many prompt tokens the prefix cache saves on the trace of chats of `scheduler_reuse.py`, against one group, in the same bytes
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

from benchmarks.scheduler_load import PAGE_SIZE
from benchmarks.scheduler_reuse import make_trace, run_trace, working_set
from srt.utils.page_groups import MemoryShares

NUM_CHATS, FEW_CHATS = 100, 8
LAYER_BYTES = 4096  # per token; the ratios do not depend on it
MEMORY = 60 << 30


@dataclass(frozen=True, slots=True)
class Shape:
    """Layers of a model that see everything, and layers with a window."""

    name: str
    num_full: int
    num_windowed: int
    window: int
    context_length: int

    @property
    def one_group_bytes(self) -> int:
        return (self.num_full + self.num_windowed) * LAYER_BYTES

    def shares(self, chunk: int = 8192) -> MemoryShares:
        sizes = self.num_full * LAYER_BYTES, self.num_windowed * LAYER_BYTES
        return MemoryShares(sizes, (self.window,), self.context_length, chunk, PAGE_SIZE)


SHAPES = (
    Shape("Gemma 3 4B", 5, 29, 1024, 131_072),
    Shape("Gemma 3 27B", 10, 52, 1024, 131_072),
    Shape("OLMo 3 7B", 8, 24, 4096, 65_536),
    Shape("Command R7B", 8, 24, 4096, 131_072),
    Shape("Gemma 2 9B", 21, 21, 4096, 8192),
)
WINDOWS = (64, 128, 256, 1024)


def report(benchmark: str, **figures: object) -> None:
    print(json.dumps({"benchmark": benchmark, **figures}))


def measure_tokens() -> None:
    print(f"{'tokens in the same memory':28} {'first group':>12} {'window group':>13}   times those of one group")
    for shape in SHAPES:
        shares, before = shape.shares(), MEMORY // shape.one_group_bytes
        first, window = (pages * PAGE_SIZE / before for pages in shares.pages(shares.tokens_in(MEMORY)))
        print(f"{shape.name:28} {first:12.2f} {window:13.2f}")
        report("page group tokens", shape=shape.name, first=round(first, 3), window=round(window, 3))


def measure_hits(num_chats: int) -> None:
    """In so many bytes as one group needs for the working set of the trace, and for a half."""
    trace = make_trace(num_chats)
    _, uses = run_trace(trace, 1 << 20)
    pages = working_set(trace, uses)
    print(f"\n{'hits of the chats':28} {'one group':>12} {'groups':>13} {'ratio':>8}   goal 0.9")
    for share in (1, 2):
        before, _ = run_trace(trace, pages // share)
        for window in WINDOWS:
            shape = Shape("Gemma 3 4B", 5, 29, window, 131_072)
            shares = shape.shares(chunk=256)
            first, of_window = shares.pages(shares.tokens_in(pages // share * PAGE_SIZE * shape.one_group_bytes))
            hits, _ = run_trace(trace, first, {window: of_window})
            name = f"1/{share} working set, window {window}"
            print(f"{name:28} {before:12} {hits:13} {hits / before:8.3f}", flush=True)
            report("page group hits", share=share, window=window, one_group=before, groups=hits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few chats: shows that it runs")
    options = parser.parse_args()
    measure_tokens()
    measure_hits(FEW_CHATS if options.quick else NUM_CHATS)


if __name__ == "__main__":
    main()
