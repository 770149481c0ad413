"""How fast quantised weights are loaded onto a GPU: from fp8 on disk, and from bf16 with --quantization fp8.

    python -m benchmarks.quantised_loading [--shape qwen3-8b] [--layers 6] [--rounds 3]

Writes checkpoints of some layers of the shape, with random weights and a small vocabulary, and loads each of them in turns, as a
server's worker does. Their pages are in memory before. The limit is how fast as many threads read the files from there. Times are also
given for all layers of the shape.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks import limits, models
from srt.distributed.parallel_state import TensorParallel
from srt.layers.quantization.fp8_weight import quantise_rows
from srt.model_executor.loaded_model import load_model
from srt.model_loader.weight_copy import BLOCK_BYTES, MOST_THREADS
from srt.server_args import parse_args
from srt.utils.model_config import ModelConfig
from srt.utils.quantization import FP8_BLOCK

CUDA = torch.device("cuda", 0)
VOCABULARY = 8192
FORMATS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "fp8 by layer": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8 by block": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    },
}


def linear_shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the sizes of a layer's weights by name."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def write(folder: Path, config: dict[str, Any], form: dict[str, Any] | None) -> None:
    """Write a checkpoint with a file for each layer."""
    folder.mkdir()
    hidden, head = config["hidden_size"], config["head_dim"]
    for index in range(config["num_hidden_layers"]):
        tensors = {}
        path = f"model.layers.{index}"
        for name, (n, k) in linear_shapes(config).items():
            weight = torch.randn(n, k, device=CUDA, dtype=torch.bfloat16)
            if form is not None:
                weight, _ = quantise_rows(weight)
                is_block = "weight_block_size" in form
                shape = (-(-n // FP8_BLOCK), -(-k // FP8_BLOCK)) if is_block else (1,)
                tensors[f"{path}.{name}.weight_scale{'_inv' if is_block else ''}"] = torch.full(shape, 1e-4)
            tensors[f"{path}.{name}.weight"] = weight.cpu()
        for name, size in (("input_layernorm", hidden), ("post_attention_layernorm", hidden)):
            tensors[f"{path}.{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)
        for name in ("q_norm", "k_norm"):
            tensors[f"{path}.self_attn.{name}.weight"] = torch.ones(head, dtype=torch.bfloat16)
        save_file(tensors, folder / f"layer-{index}.safetensors")
    others = {name: torch.randn(VOCABULARY, hidden).bfloat16() for name in ("model.embed_tokens", "lm_head")}
    others["model.norm"] = torch.ones(hidden, dtype=torch.bfloat16)
    save_file({f"{name}.weight": tensor for name, tensor in others.items()}, folder / "others.safetensors")
    (folder / "config.json").write_text(json.dumps(config if form is None else {**config, "quantization_config": form}))


def load_s(folder: Path, options: list[str]) -> float:
    """Return the seconds that loading the checkpoint takes."""
    args = parse_args(["--model-path", str(folder), *options])
    config = ModelConfig.from_folder(
        str(folder), args.model_overrides(), quantization=args.quantization, model_impl=args.model_impl
    )
    torch.cuda.synchronize()
    began = time.perf_counter()
    loaded = load_model(args, config, str(folder), TensorParallel(0, 1, None, torch.device("cpu")), CUDA)
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    del loaded
    torch.cuda.empty_cache()
    return took


def read_s(folder: Path) -> float:
    """Return the seconds that reading the files takes, in blocks, by as many threads as load."""
    blocks = [
        (file, offset)
        for file in sorted(folder.glob("*.safetensors"))
        for offset in range(0, file.stat().st_size, BLOCK_BYTES)
    ]

    def read(mine: list[tuple[Path, int]]) -> None:
        buffer = bytearray(BLOCK_BYTES)
        for file, offset in mine:
            with file.open("rb", buffering=0) as opened:
                os.preadv(opened.fileno(), [buffer], offset)

    began = time.perf_counter()
    with ThreadPoolExecutor(MOST_THREADS) as pool:
        list(pool.map(read, [blocks[first::MOST_THREADS] for first in range(MOST_THREADS)]))
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b", help="one of benchmarks/configs that has the layers of Qwen3")
    parser.add_argument("--layers", type=int, default=6, help="that are written")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    whole = json.loads((models.CONFIGS / f"{options.shape}.json").read_text())
    config = {**whole, "num_hidden_layers": options.layers, "vocab_size": VOCABULARY, "tie_word_embeddings": False}
    share = whole["num_hidden_layers"] / options.layers
    print(f"{torch.cuda.get_device_name(CUDA)}; {limits.versions()}")
    with tempfile.TemporaryDirectory() as root:
        folders = {name: Path(root, name.replace(" ", "-")) for name in FORMATS}
        for name, form in FORMATS.items():
            write(folders[name], config, form)
        ways: list[tuple[str, Path, list[str]]] = [(name, folders[name], []) for name in FORMATS]
        ways.append(("bf16, --quantization fp8", folders["bf16"], ["--quantization", "fp8"]))
        seconds: dict[str, list[float]] = {}
        for _ in range(options.rounds + 1):  # the first round brings the files' pages to memory, and compiles
            for name, folder, more in ways:
                seconds.setdefault(name, []).append(load_s(folder, more))
                seconds.setdefault(f"{name}, read", []).append(read_s(folder))
        for name, folder, _ in ways:
            size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            loaded, read = (statistics.median(seconds[key][1:]) for key in (name, f"{name}, read"))
            print(
                f"{name:24} {loaded:6.3f} s {size / loaded / 1e9:6.2f} GB/s, read {size / read / 1e9:6.2f} GB/s,"
                f" share {read / loaded:.2f}, all layers {loaded * share:.2f} s"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
