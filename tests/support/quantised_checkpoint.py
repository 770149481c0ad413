"""Quantised checkpoints made of random ones, as the public tools write them; and what their weights stand for, as a plain checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's order_map: bits 4 * i of a word hold column AWQ_COLUMNS[i]


@dataclass(frozen=True, slots=True)
class Quantisation:
    """One way of storing a checkpoint: its `quantization_config`, and what becomes of one matrix."""

    config: Mapping[str, Any]
    store: Callable[[Tensor], tuple[Tensors, Tensor]]
    """Returns the tensors by their last names, and the matrix that they stand for."""
    static_scale: float | None = None
    """The scale of inputs, if the checkpoint has one."""
    skip: tuple[str, ...] = field(default=())
    """Parts of names of layers that stay as they are."""


def write_quantised(plain: Path, folder: Path, how: Quantisation) -> tuple[Path, Path]:
    """Write the checkpoint stored as `how` says, and the one that it stands for. Returns both folders."""
    stored, meant = folder / "stored", folder / "meant"
    for copy in (stored, meant):
        shutil.copytree(plain, copy)
    tensors = load_file(plain / "model.safetensors")
    new: Tensors = {}
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        if not layer.endswith(("_proj", "_proj_with_mqa")) or any(part in layer for part in how.skip):
            new[name] = tensor
            continue
        parts, tensors[name] = how.store(tensor)
        new |= {f"{layer}.{key}": part.contiguous() for key, part in parts.items()}
        if how.static_scale is not None:
            new[f"{layer}.input_scale"] = torch.tensor(how.static_scale)
    save_file(new, stored / "model.safetensors")
    save_file(tensors, meant / "model.safetensors")
    path = stored / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": dict(how.config)}))
    return stored, meant


def write_mxfp4(plain: Path, folder: Path) -> tuple[Path, Path]:
    """Write a checkpoint of gpt-oss as it is published, and the one that it stands for. Returns both folders."""
    stored, meant = folder / "stored", folder / "meant"
    for copy in (stored, meant):
        shutil.copytree(plain, copy)
    tensors = load_file(plain / "model.safetensors")
    new: Tensors = {}
    for name, tensor in tensors.items():
        if not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            new[name] = tensor
            continue
        parts, matrix = store_mxfp4(tensor.transpose(1, 2))
        tensors[name] = matrix.transpose(1, 2).contiguous()
        new |= {f"{name}_{key}": part for key, part in parts.items()}
    save_file(new, stored / "model.safetensors")
    save_file(tensors, meant / "model.safetensors")
    path = stored / "config.json"
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    return stored, meant


def store_mxfp4(matrices: Tensor) -> tuple[Tensors, Tensor]:
    """Matrices [experts, outputs, inputs] as the OCP's specification of microscaling formats says."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat((values, -values))
    groups = matrices.unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor() - 2
    factors = torch.exp2(exponents).unsqueeze(-1)
    numbers = ((groups / factors).unsqueeze(-1) - values).abs().argmin(-1)
    blocks = (numbers[..., 0::2] | numbers[..., 1::2] << 4).to(torch.uint8)
    return {"blocks": blocks, "scales": (exponents + 127).to(torch.uint8)}, (values[numbers] * factors).flatten(-2)


def fp8_numbers(matrix: Tensor, scale: Tensor) -> Tensor:
    return (matrix / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def store_fp8_tensor(matrix: Tensor) -> tuple[Tensors, Tensor]:
    scale = matrix.abs().max() / 448
    numbers = fp8_numbers(matrix, scale)
    return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale


def store_fp8_channel(matrix: Tensor) -> tuple[Tensors, Tensor]:
    scale = matrix.abs().amax(1, keepdim=True) / 448
    numbers = fp8_numbers(matrix, scale)
    return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale


def store_fp8_block(matrix: Tensor, scale_name: str = "weight_scale_inv") -> tuple[Tensors, Tensor]:
    rows, columns = matrix.shape
    scales = torch.zeros(-(-rows // 128), -(-columns // 128))
    numbers, meant = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scales[i, j] = matrix[block].abs().max() / 448
            numbers[block] = fp8_numbers(matrix[block], scales[i, j])
            meant[block] = numbers[block].float() * scales[i, j]
    return {"weight": numbers, scale_name: scales}, meant


def store_int8(matrix: Tensor) -> tuple[Tensors, Tensor]:
    scale = matrix.abs().amax(1, keepdim=True) / 127
    numbers = (matrix / scale).round().to(torch.int8)
    return {"weight": numbers, "weight_scale": scale}, numbers * scale


@dataclass(frozen=True, slots=True)
class IntStore:
    """Stores matrices as integers; `layout` is "pack", "gptq" or "awq"."""

    layout: str
    num_bits: int = 4
    group_size: int = 32
    is_symmetric: bool = True
    shuffles: bool = False
    """Whether groups are of inputs in another order (act-order)."""
    zero_offset: int = 0
    """What the tool subtracts from zero points before it stores them."""
    writes_order: bool = True

    def __call__(self, matrix: Tensor) -> tuple[Tensors, Tensor]:
        rows, columns = matrix.shape
        size = columns if self.group_size == -1 else self.group_size
        group_of = torch.arange(columns) // size
        if self.shuffles:
            generator = torch.Generator().manual_seed(columns)
            group_of = group_of[torch.randperm(columns, generator=generator)]
        top = (1 << self.num_bits) - 1
        num_groups = columns // size
        scales, zeros = torch.empty(rows, num_groups), torch.empty(rows, num_groups, dtype=torch.int64)
        for group in range(num_groups):
            part = matrix[:, group_of == group]
            if self.is_symmetric:
                scales[:, group], zeros[:, group] = part.abs().amax(1) * 2 / top, (top + 1) // 2
            else:
                low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
                scales[:, group] = (high - low) / top
                zeros[:, group] = (-low / scales[:, group]).round().clamp(1, top)
        scales = scales.half().float()
        spread_scales, spread_zeros = scales[:, group_of], zeros[:, group_of]
        numbers = ((matrix / spread_scales).round() + spread_zeros).clamp(0, top).long()
        meant = (numbers - spread_zeros) * spread_scales
        return self._tensors(numbers, scales, zeros, group_of), meant

    def _tensors(self, numbers: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor) -> Tensors:
        bits, half = self.num_bits, scales.half()
        if self.layout == "awq":
            return {
                "qweight": _words(_by_awq(numbers.t()), bits),
                "scales": half.t(),
                "qzeros": _words(_by_awq(zeros.t()), bits),
            }
        order = {"g_idx" if self.layout == "gptq" else "weight_g_idx": group_of.int()}
        if self.layout == "gptq":
            stored_zeros = _words((zeros - self.zero_offset).t(), bits)
            tensors = {"qweight": _words(numbers, bits).t(), "scales": half.t(), "qzeros": stored_zeros}
            return tensors | order if self.writes_order else tensors
        tensors = {"weight_packed": _words(numbers, bits), "weight_scale": half}
        tensors["weight_shape"] = torch.tensor(numbers.shape)
        if not self.is_symmetric:
            tensors["weight_zero_point"] = _words(zeros.t(), bits).t()
        return tensors | order if self.shuffles else tensors


def _by_awq(numbers: Tensor) -> Tensor:
    """Columns in the order in which AWQ fills its words."""
    return numbers.view(len(numbers), -1, 8)[:, :, list(AWQ_COLUMNS)].flatten(1)


def _words(numbers: Tensor, bits: int) -> Tensor:
    """[rows, columns] in words of 32 bits along the columns, the first number in the lowest bits."""
    per_word = 32 // bits
    grouped = numbers.reshape(len(numbers), -1, per_word)
    words = sum(grouped[:, :, i] << (bits * i) for i in range(per_word))
    assert isinstance(words, Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def compressed(weights: Mapping[str, Any], layout: str, inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
_TOKEN = {**_FP8, "strategy": "token", "dynamic": True}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "group_size": None, "symmetric": True, "dynamic": False}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "lm_head": False}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}

WEIGHT_ONLY: Mapping[str, Quantisation] = {
    "fp8 weights": Quantisation(compressed({**_FP8, "strategy": "channel"}, "float-quantized"), store_fp8_channel),
    "packed int4": Quantisation(compressed(_INT4, "pack-quantized"), IntStore("pack")),
    "packed int4 with zeros": Quantisation(
        compressed({**_INT4, "symmetric": False}, "pack-quantized"), IntStore("pack", is_symmetric=False)
    ),
    "packed int4 ordered": Quantisation(
        compressed({**_INT4, "actorder": "group"}, "pack-quantized"), IntStore("pack", shuffles=True)
    ),
    "packed int8 by channel": Quantisation(
        compressed({**_INT4, "num_bits": 8, "strategy": "channel", "group_size": None}, "pack-quantized"),
        IntStore("pack", num_bits=8, group_size=-1),
    ),
    "int8 weights": Quantisation(compressed(_INT8, "int-quantized"), store_int8),
    "gptq": Quantisation(_GPTQ, IntStore("gptq", zero_offset=1)),
    "gptq without order": Quantisation(_GPTQ, IntStore("gptq", zero_offset=1, writes_order=False)),
    "gptq by channel": Quantisation({**_GPTQ, "group_size": -1}, IntStore("gptq", group_size=-1, zero_offset=1)),
    "gptq ordered with zeros": Quantisation(
        {**_GPTQ, "desc_act": True, "sym": False},
        IntStore("gptq", is_symmetric=False, shuffles=True, zero_offset=1),
    ),
    "gptq v2 of 8 bits": Quantisation(
        {**_GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"}, IntStore("gptq", num_bits=8, is_symmetric=False)
    ),
    "awq": Quantisation(
        {**_AWQ, "modules_to_not_convert": ["o_proj"]}, IntStore("awq", is_symmetric=False), skip=("o_proj",)
    ),
}
"""Formats whose products equal those of the weights that they stand for."""

WITH_INPUTS: Mapping[str, Quantisation] = {
    "fp8 dynamic": Quantisation({"quant_method": "fp8", "activation_scheme": "dynamic"}, store_fp8_tensor),
    "fp8 static": Quantisation({"quant_method": "fp8", "activation_scheme": "static"}, store_fp8_tensor, 0.02),
    "fp8 blocks": Quantisation(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, store_fp8_block
    ),
    "compressed fp8 blocks": Quantisation(
        compressed(
            {**_FP8, "strategy": "block", "block_structure": [128, 128]},
            "float-quantized",
            {**_FP8, "strategy": "group", "group_size": 128, "dynamic": True},
        ),
        partial(store_fp8_block, scale_name="weight_scale"),
    ),
    "compressed fp8 static": Quantisation(
        compressed({**_FP8, "strategy": "tensor"}, "float-quantized", {**_FP8, "strategy": "tensor"}),
        store_fp8_tensor,
        0.02,
    ),
    "int8 channels and tokens": Quantisation(
        compressed(_INT8, "int-quantized", {**_INT8, "strategy": "token", "dynamic": True}), store_int8
    ),
    "fp8 channels and tokens": Quantisation(
        compressed({**_FP8, "strategy": "channel"}, "float-quantized", _TOKEN), store_fp8_channel
    ),
}
"""Formats that quantise the inputs of layers as well."""
