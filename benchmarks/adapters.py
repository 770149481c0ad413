"""Decode steps with LoRA adapters beside the same steps without: ms a step by number of rows and of adapters.

    python -m benchmarks.adapters --model-path qwen3-8b --load-format dummy [--rows 256,1] [--adapters 8] [--rank 16] [--adapted 1]
                                  [--kernels] [any option of the server]

Rows have adapters in turns. One process runs both kinds of steps, one after the other in each round.
The adapters are random and change all projections. Rows' earlier positions are random and were never computed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks import limits, models
from benchmarks.decode_steps import WARM_UP, Steps, fill_kv_memory, print_kernels
from srt.distributed.parallel_state import TensorParallel
from srt.lora.adapter_files import adaptable_layers
from srt.model_executor.loaded_model import resolve_device
from srt.model_executor.model_runner import ModelRunner
from srt.model_executor.startup.start_runner import start_runner
from srt.server_args import parse_args
from srt.utils.model_config import ModelConfig


def write_adapters(model_folder: str, root: Path, count: int, rank: int) -> dict[str, str]:
    """Write random adapters for all projections of a model, as PEFT does, and return their folders by name."""
    folders, first, generator = {}, dict[str, torch.Tensor](), torch.Generator().manual_seed(0)
    for path, (num_outputs, num_inputs) in adaptable_layers(ModelConfig.from_folder(model_folder)).items():
        for side, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
            values = torch.randn(shape, generator=generator) / shape[1] ** 0.5
            first[f"base_model.model.{path}.lora_{side}.weight"] = values.to(torch.bfloat16)
    for number in range(count):
        folder = root / f"adapter-{number}"
        folder.mkdir(parents=True)
        # Rolled, because random numbers for many adapters take long.
        save_file({name: one.roll(number) for name, one in first.items()}, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        folders[folder.name] = str(folder.absolute())
    return folders


def hold_adapters(runner: ModelRunner, count: int, rank: int) -> list[str]:
    """Load random adapters of this rank for all projections, and return their keys."""
    loaded = runner.loaded
    assert loaded.adapters is not None
    matrices = {
        path: (torch.randn(rank, num_inputs) / num_inputs**0.5, torch.randn(num_outputs, rank) / 8)
        for path, (num_outputs, num_inputs) in adaptable_layers(loaded.config).items()
    }
    keys = [f"adapter {number}" for number in range(count)]
    for key in keys:
        loaded.adapters.step.hold(key, matrices)
    return keys


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="qwen3-0.6b", help="a shape in benchmarks/configs, or any model")
    parser.add_argument("--rows", type=limits.numbers, default="256,1", help="numbers of rows")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapted", type=int, default=1 << 30, help="rows with an adapter, at most (default: all)")
    parser.add_argument("--context", type=int, default=1024, help="positions of a row at first")
    parser.add_argument("--steps", type=int, default=30, help="of a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kernels", action="store_true", help="also the kernels that take the most time")
    parser.add_argument("--jsonl", help="append the result to this file")
    options, server_options = parser.parse_known_args()
    sizes = sorted(set(options.rows), reverse=True)
    if min(*sizes, options.adapters, options.rank, options.context, options.steps, options.rounds) < 1:
        parser.error("all numbers are taken from 1 on")
    folder = models.folder_of(options.model_path)
    given = ["--max-running-requests", str(sizes[0]), "--cuda-graph-bs", *map(str, sizes), "--enable-lora"]
    given += ["--max-loras-per-batch", str(options.adapters), "--max-lora-rank", str(options.rank)]
    args = parse_args(["--model-path", folder, *given, *server_options])
    device = resolve_device(args, 0)
    config = ModelConfig.from_folder(
        folder, args.model_overrides(), quantization=args.quantization, model_impl=args.model_impl
    )
    hardware = limits.measured()
    runner = start_runner(args, config, folder, TensorParallel(0, 1, None, torch.device("cpu")), device)
    runner.graphs.capture_all()
    fill_kv_memory(runner)
    keys = hold_adapters(runner, options.adapters, options.rank)
    print(f"{options.model_path} on {hardware.name}; {limits.versions()}")
    figures: list[dict[str, float]] = []
    most_steps = 2 * (options.rounds * (WARM_UP + options.steps) + WARM_UP)
    for num_rows in sizes:
        found: dict[bool, float] = {}
        for is_adapted in (False, True) * options.rounds:
            runner.reset()
            adapters = [
                keys[row % len(keys)] if is_adapted and row < options.adapted else "" for row in range(num_rows)
            ]
            steps = Steps(runner, [options.context] * num_rows, most_steps, adapters=adapters)
            steps.run(num_rows, WARM_UP)
            step_ms = steps.run(num_rows, options.steps) / options.steps * 1e3
            found[is_adapted] = min(step_ms, found.get(is_adapted, step_ms))
            print(f"{num_rows:4} rows {'with' if is_adapted else 'without'} adapters {step_ms:8.3f} ms", flush=True)
            if options.kernels and is_adapted and len(figures) < len(sizes):
                print_kernels(steps, num_rows)
        ratio = found[True] / found[False]
        print(f"{num_rows:4} rows: a step with adapters takes {ratio:.3f} of one without, throughput {1 / ratio:.3f}")
        figures.append({"rows": num_rows, "without_ms": found[False], "with_ms": found[True]})
    record = {"benchmark": "adapters", "model": options.model_path, "options": server_options, "steps": figures}
    record |= {"adapters": options.adapters, "rank": options.rank, "context": options.context}
    limits.write_jsonl(options.jsonl, {**record, "versions": limits.versions()})
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        raise SystemExit(main())
