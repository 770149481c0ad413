"""Checkpoints that the library `compressed-tensors` writes stand for the weights that the library says.

Skipped where the library is not installed: `pip install --no-deps compressed-tensors loguru`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from srt.layers.linear import LinearLayer
from srt.layers.quantization.fp8_weight import Fp8Weight
from srt.layers.quantization.int8_weight import Int8Weight
from srt.layers.quantization.int_weight import IntWeight
from srt.model_loader.loader import LoadConfig, get_model_loader
from srt.utils.model_config import ModelConfig
from tests.support.checkpoints import CheckpointFactory
from tests.support.ranks import CPU, single_rank

library = pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")

SCHEMES = ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W8A16", "W4A16", "W4A16_ASYM")


def ranges_of(weight: Tensor, arguments: Any) -> tuple[Tensor, Tensor]:
    """The least and the largest weight of everything that shares a scale."""
    match str(getattr(arguments.strategy, "value", arguments.strategy)):
        case "tensor":
            return weight.min().view(1), weight.max().view(1)
        case "channel":
            return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        case "group":
            grouped = weight.unflatten(1, (-1, arguments.group_size))
            return grouped.amin(-1), grouped.amax(-1)
        case _:
            rows, columns = weight.shape
            padded = nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
            blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
            return blocks.amin((1, 3)), blocks.amax((1, 3))


def write(plain: Path, folder: Path, scheme: str) -> dict[str, Tensor]:
    """Write the checkpoint as the library does; return what it says that each quantised layer's weight is."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    apply_quantization_config(model, QuantizationConfig(config_groups={scheme: ["Linear"]}, ignore=["lm_head"]))
    meant = {}
    for name, layer in model.named_modules():
        if getattr(layer, "quantization_scheme", None) is None:
            continue
        arguments = layer.quantization_scheme.weights
        scale, zero = calculate_qparams(*ranges_of(layer.weight.data, arguments), arguments)
        layer.weight_scale.data = scale.to(layer.weight_scale.dtype).view_as(layer.weight_scale)
        if hasattr(layer, "weight_zero_point"):
            layer.weight_zero_point.data = zero.to(layer.weight_zero_point.dtype).view_as(layer.weight_zero_point)
        if hasattr(layer, "input_scale"):
            layer.input_scale.data.fill_(0.02)
        zeros = getattr(layer, "weight_zero_point", None)
        meant[name] = fake_quantize(layer.weight.data, layer.weight_scale, zeros, arguments)
        layer.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    shutil.copytree(plain, folder)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors")
    compressor.update_config(folder)
    return meant


@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_have_the_weights_that_the_library_means(
    scheme: str, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    meant = write(checkpoint("qwen3", hidden_size=128, intermediate_size=256), tmp_path / "stored", scheme)
    config = ModelConfig.from_folder(tmp_path / "stored")
    loader = get_model_loader(LoadConfig())
    model: Any = loader.load_model(config, tmp_path / "stored", single_rank(), torch.float32, CPU, lambda *_: None)
    compared = 0
    for path, layer in model.named_modules():
        if not isinstance(layer, LinearLayer):
            continue
        assert isinstance(layer.weight, Fp8Weight | Int8Weight | IntWeight)
        expected = torch.cat([meant[at.path] for at in layer.places(path)])
        torch.testing.assert_close(layer.weight.dequantised(torch.float32), expected, rtol=1e-6, atol=1e-7)
        compared += 1
    assert compared == 4 * config.num_layers
