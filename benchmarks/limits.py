"""What the hardware allows: bytes over measured bandwidth, operations over the measured matrix rate.

python -m benchmarks.limits        measures both and prints them as JSON
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from srt.utils.layer_spec import AttentionKind, Experts, SelfAttention
from srt.utils.model_config import ModelConfig

RUN = "BENCHMARK_RUN"  # of the environment: marks the lines of all commands of one run
BYTES = 2  # of a weight, and of an element of keys and values unless they are fp8: bfloat16


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU, or the CPU, as measured; or several."""

    name: str
    read_bytes_s: float
    matmul_flops_s: float

    def of_ranks(self, count: int) -> Device:
        """A GPU each, with its part of the model; ranks on a CPU share it."""
        if count == 1 or self.name.startswith("CPU"):
            return self
        return Device(f"{count} × {self.name}", self.read_bytes_s * count, self.matmul_flops_s * count)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model's steps must read and compute, over all ranks."""

    linear_weights: int  # of the layers: each takes part in every token
    head_weights: int  # of the output layer: once for every row that samples
    kv_bytes_per_token: int
    attention_flops_per_pair: int  # for each (query token, key token)
    expert_weights: int = 0  # of one expert in each layer that has experts, over all of these layers
    num_experts: int = 0
    top_k: int = 0  # experts that a token takes
    linear_bytes: float = BYTES  # of one of the linear weights, without scales
    expert_bytes: float = BYTES  # of a weight of an expert, likewise

    @classmethod
    def of(
        cls,
        folder: str,
        kv_cache_dtype: str = "auto",
        overrides: Mapping[str, Any] | None = None,
        quantization: str | None = None,
    ) -> Shape:
        return cls.of_config(ModelConfig.from_folder(folder, overrides, None, quantization), kv_cache_dtype)

    @classmethod
    def of_config(cls, config: ModelConfig, kv_cache_dtype: str = "auto") -> Shape:
        linear = kv = pairs = experts = 0
        routing = None
        for layer in config.layers:
            weights, elements, flops = _of_attention(layer.attention, config.hidden_size)
            linear, kv, pairs = linear + weights, kv + elements, pairs + flops
            mlp = layer.feed_forward
            if isinstance(mlp, Experts):
                routing = mlp.routing
                experts += 3 * config.hidden_size * mlp.size
                shared_size = 0 if mlp.shared is None else mlp.shared.size
                linear += config.hidden_size * (routing.num_experts + 3 * shared_size)
            else:
                linear += 3 * config.hidden_size * mlp.size
        kv_bytes = 1 if kv_cache_dtype.startswith("fp8") else BYTES
        return cls(
            linear_weights=linear,
            head_weights=config.vocab_size * config.hidden_size,
            kv_bytes_per_token=kv * kv_bytes,
            attention_flops_per_pair=pairs,
            expert_weights=experts,
            num_experts=0 if routing is None else routing.num_experts,
            top_k=0 if routing is None else routing.top_k,
            linear_bytes=_bytes_of(config, "self_attn.o_proj"),
            expert_bytes=_bytes_of(config, "mlp.experts.0.up_proj"),
        )

    def in_groups(self, count: int) -> Shape:
        """Return the shape of `count` attention groups together: each reads all weights but those of the experts, which they share."""
        return replace(self, linear_weights=count * self.linear_weights, head_weights=count * self.head_weights)

    def distinct_experts(self, rows: int) -> float:
        """Expected number of a layer's experts that some token of the step takes, if all are equally likely."""
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** rows) if self.num_experts else 0.0

    def decode_s(self, device: Device, rows: int, context: float, distinct_experts: float = 0.0) -> float:
        """A step of `rows` tokens, each behind `context` others: all weights and all KV read once, or the products.

        `distinct_experts` are those that a layer read; by default as many as even routing gives.
        """
        return max(self.read_s(device, rows, context, distinct_experts), self.products_s(device, rows))

    def verify_s(self, device: Device, rows: int, context: float, row_tokens: int) -> float:
        """A step of `row_tokens` tokens of each row. They share their row's keys, which are read once."""
        experts = self.distinct_experts(rows * row_tokens)
        return max(self.read_s(device, rows, context, experts), self.products_s(device, rows * row_tokens))

    def read_s(self, device: Device, rows: int, context: float, distinct_experts: float = 0.0) -> float:
        experts = self.expert_weights * (distinct_experts or self.distinct_experts(rows))
        weights = self.linear_weights * self.linear_bytes + self.head_weights * BYTES + experts * self.expert_bytes
        return (weights + rows * context * self.kv_bytes_per_token) / device.read_bytes_s

    def products_s(self, device: Device, rows: int) -> float:
        return 2 * rows * (self._weights_of_a_token + self.head_weights) / device.matmul_flops_s

    @property
    def _weights_of_a_token(self) -> int:
        return self.linear_weights + self.top_k * self.expert_weights

    def prefill_s(self, device: Device, rows: int, length: int) -> float:
        """Prompts of `length` tokens, causal."""
        linear = 2 * (rows * length * self._weights_of_a_token + rows * self.head_weights)
        return (linear + rows * length * length / 2 * self.attention_flops_per_pair) / device.matmul_flops_s


def _bytes_of(config: ModelConfig, layer: str) -> float:
    form = config.weight_formats.format_of(f"model.layers.{config.num_layers - 1}.{layer}")
    return BYTES if form is None else form.num_bits / 8


def measured() -> Device:
    """Measured by a process of its own, which leaves nothing on the device."""
    answer = subprocess.run([sys.executable, "-m", "benchmarks.limits"], check=True, stdout=subprocess.PIPE, text=True)
    return Device(**json.loads(answer.stdout.splitlines()[-1]))


def measure() -> Device:
    import torch

    if not torch.cuda.is_available():
        return _measure(torch.device("cpu"), f"CPU, {torch.get_num_threads()} threads", 1 << 28, 1024, torch.float32)
    return _measure(torch.device("cuda"), torch.cuda.get_device_name(), 1 << 33, 8192, torch.bfloat16)


def _measure(device: object, name: str, num_bytes: int, side: int, dtype: object) -> Device:
    import torch

    assert isinstance(device, torch.device) and isinstance(dtype, torch.dtype)
    memory = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    read_s = _best_s(lambda: torch.amax(memory), device)
    product_s = _best_s(lambda: a @ b, device)
    return Device(name, num_bytes / read_s, 2 * side**3 / product_s)


def _best_s(work: object, device: object, runs: int = 12) -> float:
    import time

    import torch

    assert callable(work) and isinstance(device, torch.device)
    times = []
    for _ in range(runs):
        begin_s = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin_s)
    return min(times)


def numbers(text: str) -> list[int]:
    """Of an option that takes several."""
    return [int(number) for number in text.split(",")]


def versions() -> dict[str, str]:
    """Of what a figure depends on, as far as installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": sys.version.split()[0]}
    for name in ("torch", "triton", "flashinfer-python", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """What is checked out here, with a plus if it was changed since; empty where that is not known."""
    folder = Path(__file__).parent
    words = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(words, cwd=folder, text=True, capture_output=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def write_jsonl(path: str | None, record: dict[str, object]) -> None:
    """Append one line to the file, if one was asked for: of which run it is, if of one, and of which commit."""
    if path is not None:
        record = {**record, "run": os.environ.get(RUN, ""), "commit": commit()}
        with Path(path).open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    print(json.dumps(asdict(measure())))


def _of_attention(one: AttentionKind, hidden_size: int) -> tuple[int, int, int]:
    """Return an attention's linear weights, elements of the KV memory per token, and operations per pair of query and key."""
    if isinstance(one, SelfAttention):
        weights = hidden_size * one.head_dim * (2 * one.num_heads + 2 * one.num_kv_heads)
        return weights, 2 * one.num_kv_heads * one.head_dim, 4 * one.query_width
    query_width = one.num_heads * one.head_dim
    made_of = one.query_rank or hidden_size
    weights = made_of * query_width + hidden_size * (one.latent_dim + (one.query_rank or 0))
    weights += one.latent_rank * one.num_heads * (one.nope_dim + one.value_dim)
    weights += one.num_heads * one.value_dim * hidden_size
    return weights, one.latent_dim, 2 * one.num_heads * (one.latent_dim + one.latent_rank)
