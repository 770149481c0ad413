"""The limit that the offline throughput is shown beside."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import models
from benchmarks.limits import Device, Shape
from benchmarks.offline_throughput import shape_limit_s

SHAPE = Shape(linear_weights=900, head_weights=100, kv_bytes_per_token=8, attention_flops_per_pair=0)
LENGTHS_IN, LENGTHS_OUT = np.array([10, 20]), np.array([3, 2])


def test_ranks_have_a_gpu_each_but_share_a_cpu() -> None:
    gpu, cpu = Device("H200", 2.0, 3.0), Device("CPU, 2 threads", 2.0, 3.0)
    assert gpu.of_ranks(1) == gpu
    assert gpu.of_ranks(4) == Device("4 × H200", 8.0, 12.0)
    assert cpu.of_ranks(4) == cpu


def test_a_memory_of_fp8_is_half_of_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((models.CONFIGS / "qwen3-8b.json").read_text())
    whole, half = (Shape.of(str(tmp_path), kv_cache_dtype) for kv_cache_dtype in ("auto", "fp8_e4m3"))
    assert whole.kv_bytes_per_token == 2 * half.kv_bytes_per_token == 36 * 2 * 8 * 128 * 2
    assert whole.linear_weights == half.linear_weights


def test_slow_memory_reads_weights_once_a_step_and_the_kv_of_every_decode() -> None:
    kv = (10 + 1) + (20 + 1) + (10 + 2)
    limit_s = shape_limit_s(SHAPE, Device("x", read_bytes_s=1.0, matmul_flops_s=1e9), LENGTHS_IN, LENGTHS_OUT)
    assert limit_s == pytest.approx(3 * 2 * 1000 + 8 * kv)


def test_slow_products_are_those_of_prompts_and_decodes_together() -> None:
    limit_s = shape_limit_s(SHAPE, Device("x", read_bytes_s=1e9, matmul_flops_s=1.0), LENGTHS_IN, LENGTHS_OUT)
    assert limit_s == pytest.approx(2 * (30 * 900 + 2 * 100) + 2 * 3 * 1000)
