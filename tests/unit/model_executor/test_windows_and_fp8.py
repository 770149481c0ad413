"""Sliding windows against transformers, and an fp8 KV memory beside one in the model's own type."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from srt.utils.kv_scales_file import read_scales_file
from srt.utils.model_error import ModelError
from tests.support.checkpoints import CheckpointFactory
from tests.support.plan_driver import Job, PlanDriver, greedy, token_ids
from tests.support.runners import make_runner

WINDOWS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 20}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "layer_types": None}),
    (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 33, "layer_types": ["sliding_attention", "full_attention"]},
    ),
]


def changed(folder: Path, target: Path, entries: dict[str, Any]) -> Path:
    shutil.copytree(folder, target)
    config = {**json.loads((target / "config.json").read_text()), **entries}
    (target / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
    return target


def greedy_tokens_of_transformers(folder: Path, prompt: list[int], count: int) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = list(prompt)
    for _ in range(count):
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_llama_has_no_windows_whatever_its_configuration_names(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    kinds = {"layer_types": ["sliding_attention", "sliding_attention"], "sliding_window": 20}
    folder = changed(checkpoint("llama"), tmp_path / "windowed", kinds)
    prompt = token_ids(np.random.default_rng(7), 90, 512)
    job = Job(prompt, greedy(12))
    PlanDriver(make_runner(folder, 16), 16).run([job])
    assert job.outputs == greedy_tokens_of_transformers(folder, prompt, 12)


@pytest.mark.parametrize(("family", "entries"), WINDOWS)
def test_greedy_tokens_in_a_window_are_those_of_transformers(
    family: str, entries: dict[str, Any], checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    folder = changed(checkpoint(family), tmp_path / "windowed", entries)
    rng = np.random.default_rng(7)
    prompts = [token_ids(rng, length, 512) for length in (3, 19, 50, 90)]
    expected = [greedy_tokens_of_transformers(folder, prompt, 12) for prompt in prompts]
    unlimited = [greedy_tokens_of_transformers(checkpoint(family), prompt, 12) for prompt in prompts]
    assert expected != unlimited, "the window hides nothing that matters"
    for page_size, chunk in ((16, 1 << 30), (1, 13)):
        jobs = [Job(prompt, greedy(12)) for prompt in prompts]
        PlanDriver(make_runner(folder, page_size), page_size, chunk=chunk).run(jobs)
        assert [job.outputs for job in jobs] == expected


def test_an_fp8_memory_is_half_as_large_and_its_logits_stay_near(
    checkpoint: CheckpointFactory, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint("qwen3")
    prompt = token_ids(np.random.default_rng(1), 80, 512)
    own = make_runner(folder, 16, dtype="bfloat16")
    with caplog.at_level(logging.WARNING):
        small = make_runner(folder, 16, dtype="bfloat16", kv_cache_dtype="fp8_e4m3")
    assert "no KV scales" in caplog.text
    assert small.state.kv_bytes * 2 == own.state.kv_bytes
    jobs = [Job(prompt, greedy(10)), Job(prompt, greedy(10))]
    PlanDriver(own, 16).run(jobs[:1])
    PlanDriver(small, 16, chunk=17).run(jobs[1:])
    assert len(jobs[1].outputs) == 10
    assert jobs[0].outputs[0] == jobs[1].outputs[0]


def test_a_checkpoint_that_quantizes_keys_and_values_alone_brings_their_scales(
    checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    scheme = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    folder = changed(checkpoint("qwen3"), tmp_path / "scaled", {"quantization_config": quantization})
    scales = {
        f"model.layers.{layer}.self_attn.{kind}_scale": torch.tensor([scale])
        for kind, of_layers in (("k", (0.25, 0.5)), ("v", (0.5, 2.0)))
        for layer, scale in enumerate(of_layers)
    }
    save_file({**load_file(folder / "model.safetensors"), **scales}, folder / "model.safetensors")
    small = make_runner(folder, 16, kv_cache_dtype="fp8_e4m3")
    memory = small.state.token_to_kv_pool
    assert (memory.k_scales, memory.v_scales) == ([0.25, 0.5], [0.5, 2.0])

    own, plain = make_runner(folder, 16), make_runner(checkpoint("qwen3"), 16)
    assert own.state.kv_bytes == plain.state.kv_bytes == 4 * small.state.kv_bytes  # in float32, the checkpoint's own
    prompt = token_ids(np.random.default_rng(1), 40, 512)
    jobs = [Job(prompt, greedy(5)) for _ in range(2)]
    for runner, job in zip((own, plain), jobs, strict=True):
        PlanDriver(runner, 16).run([job])
    assert jobs[0].outputs == jobs[1].outputs


def scales_file(folder: Path, scales: dict[str, dict[str, float]], **more: str) -> Path:
    content = {"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": scales}, **more}
    path = folder / "scales.json"
    path.write_text(json.dumps(content))
    return path


def test_a_file_of_scales_serves_keys_and_values_alike(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    path = scales_file(tmp_path, {"0": {"0": 0.25, "1": 2}}, model_type="qwen3")
    folder = checkpoint("qwen3")
    runner = make_runner(folder, 16, kv_cache_dtype="fp8_e4m3", quantization_param_path=str(path))
    memory = runner.state.token_to_kv_pool
    assert memory.k_scales == memory.v_scales == [0.25, 2.0]
    job = Job(token_ids(np.random.default_rng(1), 40, 512), greedy(3))
    PlanDriver(runner, 16).run([job])
    assert len(job.outputs) == 3


def test_a_file_of_scales_is_not_for_the_model_that_drafts(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    runner = make_runner(
        checkpoint("qwen3"), 16, kv_cache_dtype="fp8_e4m3",
        quantization_param_path=str(scales_file(tmp_path, {"0": {"0": 0.25, "1": 2}})),
        speculative_algorithm="STANDALONE", speculative_draft_model_path=str(checkpoint("qwen3", num_layers=1)),
    )  # fmt: skip
    assert runner.state.token_to_kv_pool.k_scales == [0.25, 2.0]


def test_each_rank_has_its_scales(tmp_path: Path) -> None:
    path = scales_file(tmp_path, {"0": {"0": 0.5, "1": 1.0}, "1": {"0": 0.25, "1": 4.0}})
    assert read_scales_file(path, "llama", 2, 2) == [[0.5, 1.0], [0.25, 4.0]]


@pytest.mark.parametrize(
    ("scales", "more", "words"),
    [
        ({"0": {"0": 1.0, "1": 1.0}}, {"model_type": "llama"}, "is for a model of type 'llama', not 'qwen3'"),
        ({"0": {"0": 1.0, "1": 1.0}, "1": {}}, {}, "has factors for 2 ranks, but --tp is 1"),
        ({"0": {"0": 1.0}}, {}, "has factors for 1 layers of rank 0, but the model has 2"),
        ({"0": {"0": 1.0, "2": 1.0}}, {}, "the factor of layer 1 of rank 0 must be positive, not None"),
        ({"0": {"0": 1.0, "1": -1.0}}, {}, "the factor of layer 1 of rank 0 must be positive, not -1.0"),
        ({"0": {"0": 1.0, "1": 1.0}}, {"kv_cache": "none"}, "it has no kv_cache with a scaling_factor"),
    ],
)
def test_a_wrong_file_of_scales_is_refused_in_a_sentence(
    scales: dict[str, dict[str, float]], more: dict[str, str], words: str, tmp_path: Path
) -> None:
    path = scales_file(tmp_path, scales, **more)
    with pytest.raises(ModelError) as caught:
        read_scales_file(path, "qwen3", 2, 1)
    assert str(caught.value).startswith(f"--quantization-param-path {path}: ")
    assert words in str(caught.value)


def test_a_file_of_scales_that_is_not_there_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"missing\.json: it cannot be read: No such file"):
        read_scales_file(tmp_path / "missing.json", "qwen3", 2, 1)
