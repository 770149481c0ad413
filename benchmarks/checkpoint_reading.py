"""How fast a checkpoint's files become parameters: our reader, and the safetensors library.   python -m benchmarks.checkpoint_reading

Both fill the same parameters from the same file, in turns, and its pages are in memory before. The limit is a copy of as many bytes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from srt.layers.weights import WeightPiece
from srt.model_loader.weight_copy import copy_weights
from srt.utils.checkpoint import TensorHeader, read_headers

WIDTH = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the file")
    parser.add_argument("--rounds", type=int, default=7, help="how often each reads it")
    parser.add_argument("--device", default="cpu", help="where the parameters are")
    options = parser.parse_args()
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.safetensors")
        num_tensors = max(1, int(options.gigabytes * 1e9 / (2 * WIDTH * WIDTH)))
        save_file({f"w{number}": torch.randn(WIDTH, WIDTH).bfloat16() for number in range(num_tensors)}, file)
        _compare(file, read_headers(folder), device, options.rounds)


def _compare(file: Path, headers: dict[str, TensorHeader], device: torch.device, rounds: int) -> None:
    owner = nn.ParameterDict(
        {
            name: nn.Parameter(torch.zeros(header.shape, dtype=torch.bfloat16, device=device), False)
            for name, header in headers.items()
        }
    )
    pieces = [
        WeightPiece(name, header.shape, owner, name, 0, 0, header.shape[0], 0) for name, header in headers.items()
    ]
    other = torch.zeros(sum(header.num_bytes for header in headers.values()), dtype=torch.uint8, device=device)
    source = torch.ones_like(other)
    ways: dict[str, Callable[[], object]] = {
        "srt": lambda: copy_weights(headers, pieces, device, lambda done, total: None),
        "safetensors": lambda: _by_the_library(file, owner),
        "copy": lambda: other.copy_(source),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):  # the first round brings the file's pages to memory
        for name, read in ways.items():
            began = time.perf_counter()
            with torch.inference_mode():
                read()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[name].append(time.perf_counter() - began)
    for name, values in seconds.items():
        median = statistics.median(values[1:])
        print(f"{name:12} {median:7.3f} s {len(other) / median / 1e9:7.2f} GB/s")


def _by_the_library(file: Path, owner: nn.ParameterDict) -> None:
    with safe_open(file, framework="pt", device="cpu") as opened:
        for name in owner:
            owner[name].copy_(opened.get_tensor(name))


if __name__ == "__main__":
    main()
