"""The kernel of all layers with weights of 8 and 4 bits, against float32 on what they stand for; wrong kernels would be noticed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from srt.kernels.build import hopper
from srt.kernels.decoder import resident_layers
from srt.kernels.decoder.resident_layers import ResidentVariant
from srt.layers.linear import LinearLayer
from srt.layers.quantization.fp8_weight import Fp8Weight
from srt.layers.quantization.int_weight import IntWeight
from srt.layers.quantization.weight import PlainWeight
from srt.model_executor.model_runner import ModelRunner
from tests.gpu.test_models import CONFIGS, CUDA, LLAMA, assert_near, logits_of
from tests.support.plan_driver import token_ids
from tests.support.runners import decodes_of, make_runner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="a kernel for Hopper"
    ),
]

GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": True}
FORMS: dict[str, dict[str, Any]] = {
    "fp8": {},
    "blocks": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "gptq": {**GPTQ, "group_size": 128},
    "gptq by output": {**GPTQ, "group_size": -1},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
}
MODELS = ["qwen3-0.6b", "qwen3-8b", "qwen3-14b", "llama"]
WRONG = {
    "fp8": ("* ((const float*)scales)[at];", "* ((const float*)scales)[at ^ 1];"),
    "blocks": ("(at - output % SHARING)", "(output - output % SHARING)"),
    "gptq": ("(summed + t % 2)", "summed"),
    "awq": ("zero = ((const short*)zeros)[at];", "zero = 8;"),
}
"""What becomes of the source: scales of other outputs; of a line's first group; no zero points."""


def write_config(folder: Path, model: str, form: str) -> dict[str, Any]:
    """Write the configuration of two layers; return the options of runners."""
    config = LLAMA if model == "llama" else json.loads((CONFIGS / f"{model}.json").read_text())
    config = {**config, "num_hidden_layers": 2, "vocab_size": 512}
    if FORMS[form]:
        config["quantization_config"] = FORMS[form]
    (folder / "config.json").write_text(json.dumps(config))
    options: dict[str, Any] = {"device": CUDA, "load_format": "dummy", "cuda_graph_bs": (1,)}
    return options if FORMS[form] else {**options, "quantization": "fp8"}


@torch.inference_mode()
def vary(runner: ModelRunner) -> None:
    """Vary norms and scales, which are alike in dummy weights, so that another's would be noticed; the same way in any dtype."""
    generator = torch.Generator(CUDA).manual_seed(5)
    model = runner.loaded.model
    blocks = {
        id(module.scales) for module in model.modules() if isinstance(module, Fp8Weight) and len(module.scales) > 1
    }
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("scales"):
            factors = torch.rand(parameter.shape, device=CUDA, generator=generator) + 0.5
            if id(parameter) in blocks:  # which keep one scale each
                factors = factors[:, ::128].repeat_interleave(128, dim=1)
            parameter.copy_((parameter.bfloat16().float() * factors).bfloat16())
        elif parameter.dtype in (torch.float32, torch.bfloat16):
            parameter.copy_(parameter.bfloat16())


@torch.inference_mode()
def make_subnormal(runner: ModelRunner) -> None:
    """Keep the signs and last bits of e4m3 numbers, which are then subnormal, and multiply their scales."""
    for module in runner.loaded.model.modules():
        if isinstance(module, Fp8Weight):
            module.values.detach().view(torch.uint8).bitwise_and_(0x87)
            module.scales.detach().mul_(8192)


@torch.inference_mode()
def dequantise(runner: ModelRunner) -> None:
    for module in runner.loaded.model.modules():
        if isinstance(module, LinearLayer) and isinstance(module.weight, Fp8Weight | IntWeight):
            module.weight = PlainWeight.of(module.weight.dequantised(torch.float32))


def reference_of(folder: Path, options: dict[str, Any], decodes: int) -> torch.Tensor:
    exact = make_runner(
        folder, 16, dtype="float32", attention_backend="torch_native", disable_cuda_graph=True, **options
    )
    vary(exact)
    dequantise(exact)
    return logits_of(exact, [3], 16, 16, decodes=decodes)[1:]


def runner_of(folder: Path, options: dict[str, Any], decode: str = "triton") -> ModelRunner:
    runner = make_runner(folder, 16, dtype="bfloat16", decode_attention_backend=decode, **options)
    vary(runner)
    return runner


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", MODELS)
def test_layers_in_one_kernel_are_near_float32(tmp_path: Path, model: str, form: str) -> None:
    """A row behind its first positions: none of them was quantised."""
    options = write_config(tmp_path, model, form)
    reference = reference_of(tmp_path, options, decodes=40)
    runner = runner_of(tmp_path, options)
    assert set(decodes_of(runner)._parts.resident) == {1}
    assert_near(logits_of(runner, [3], 16, 16, decodes=40)[1:], reference, f"{model}, {form}")


def test_subnormal_numbers_are_multiplied_too(tmp_path: Path) -> None:
    options = write_config(tmp_path, "qwen3-0.6b", "fp8")

    def logits(runner: ModelRunner) -> torch.Tensor:
        make_subnormal(runner)
        if not decodes_of(runner)._parts.resident:
            dequantise(runner)
        return logits_of(runner, [3], 16, 16, decodes=4)[1:]

    torch_only: dict[str, Any] = {"attention_backend": "torch_native", "disable_cuda_graph": True}
    exact = make_runner(tmp_path, 16, dtype="float32", **torch_only, **options)
    vary(exact)
    assert_near(logits(runner_of(tmp_path, options)), logits(exact), "subnormal")


@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("form", [form for form in FORMS if form != "gptq by output"])
def test_layers_in_one_kernel_are_near_those_of_plain_attention(tmp_path: Path, form: str, captures: bool) -> None:
    """Not by output: the last hidden state of that random model almost vanishes in some steps, and rounding changes its sign."""
    options = write_config(tmp_path, "qwen3-8b", form)
    rng = np.random.default_rng(8)
    prompts = [token_ids(rng, length, 512) for length in (16, 31, 700, 3000)]

    def run(decode: str) -> torch.Tensor:
        runner = runner_of(tmp_path, options, decode)
        assert set(decodes_of(runner)._parts.resident) == (set() if decode == "torch_native" else {1})
        if captures:
            runner.graphs.capture_all()
        steps = []
        for prompt in prompts:
            steps.append(logits_of(runner, prompt, 4096, 16, decodes=20)[1:])
            runner.reset()
        return torch.cat(steps)

    assert_near(run("triton"), run("torch_native"), f"{form}, graphs: {captures}")


@pytest.fixture
def _nothing_kept() -> Iterator[None]:
    """Kernels are kept by their constants, which do not tell a wrong source."""
    hopper.function.cache_clear()
    yield
    hopper.function.cache_clear()


@pytest.mark.usefixtures("_nothing_kept")
@pytest.mark.parametrize("form", WRONG)
def test_a_wrong_kernel_would_be_noticed(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = write_config(tmp_path, "qwen3-0.6b", form)
    reference = reference_of(tmp_path, options, decodes=4)
    right, wrong = WRONG[form]
    source = hopper.source_of(resident_layers._SOURCE)
    assert source.count(right) == 1
    monkeypatch.setattr(ResidentVariant, "source", property(lambda self: source.replace(right, wrong)))
    ours = logits_of(runner_of(tmp_path, options), [3], 16, 16, decodes=4)[1:]
    with pytest.raises(AssertionError, match=form):
        assert_near(ours, reference, form)
