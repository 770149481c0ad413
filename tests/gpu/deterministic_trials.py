"""Thousands of trials of 16 probes on a GPU in the deterministic mode: of a model of real size with random weights, or of `tiny`.

    python -m tests.gpu.deterministic_trials [--model qwen3-8b] [--trials 2000] [--ordinary]

Each row of each batch is a trial of one probe. The number of different results of each probe is printed, and the exit code is 1 if a
probe has more than one. `--ordinary` leaves the mode out, so that there must be differences.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Final

import torch

from benchmarks import models
from srt.utils.model_config import ModelConfig
from tests.support.invariance import make_probes, run_trials
from tests.support.runners import make_runner

PAGE_SIZE: Final = 16
LENGTHS: Final = (3, 70, 505, 1100)
KINDS: Final = ((7, (1, 3), 0.01), (64, (1, 17, 33), 0.06), (512, (3, 64, 128), 0.33), (8192, (200, 255), 0.6))
"""Largest chunks of prompts, sizes of batches, and shares of the trials."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b", help="a shape in benchmarks/configs, or any model")
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--ordinary", action="store_true")
    options = parser.parse_args()
    folder = Path(models.folder_of(options.model))
    runner = make_runner(
        folder,
        PAGE_SIZE,
        device=torch.device("cuda", 0),
        load_format="auto" if list(folder.glob("*.safetensors")) else "dummy",
        dtype="bfloat16",
        max_total_tokens=1 << 18,
        max_running_requests=256,
        enable_deterministic_inference=not options.ordinary,
    )
    runner.graphs.capture_all()
    vocab_size = ModelConfig.from_folder(folder).vocab_size
    probes, done, begin_s = make_probes(16, vocab_size, lengths=LENGTHS), 0, time.perf_counter()
    for seed, (chunk, batches, share) in enumerate(KINDS):
        done += run_trials(runner, probes, int(share * options.trials), PAGE_SIZE, (chunk,), batches, seed)
        print(f"{done:5} trials after {time.perf_counter() - begin_s:5.1f} s", flush=True)
    distinct = [probe.num_distinct for probe in probes]
    print(f"{options.model}, {torch.cuda.get_device_name()}: different results of each probe: {distinct}")
    return int(max(distinct) > 1)


if __name__ == "__main__":
    raise SystemExit(main())
