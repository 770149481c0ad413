"""Quantised experts with random numbers, in every form that kernels read, and the plain matrices that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from srt.layers.moe.packed_experts import PackedExperts
from srt.layers.quantization.formats import new_weight
from srt.layers.quantization.fp8_weight import Fp8Weight
from srt.layers.quantization.int8_weight import Int8Weight
from srt.layers.quantization.int_weight import IntWeight
from srt.layers.quantization.mxfp4_weight import Mxfp4Weight
from srt.layers.quantization.weight import LinearWeight, Place
from srt.utils.quantization import WeightFormat

PACKED_FORMS: Mapping[str, WeightFormat] = {
    "e4m3 by output": WeightFormat("compressed", 8, "channel", is_float=True),
    "e4m3 by block": WeightFormat("compressed", 8, "block", is_float=True),
    "mxfp4": WeightFormat("mxfp4", 4, "group", 32),
    "int4 by 32 with zeros": WeightFormat("compressed", 4, "group", 32, has_zeros=True),
    "int4 by output": WeightFormat("compressed", 4, "group"),
    "int8 by 32 with zeros": WeightFormat("compressed", 8, "group", 32, has_zeros=True),
    "int8 by output": WeightFormat("compressed", 8, "group"),
    "signed int8": WeightFormat("int8", 8, "channel"),
}


def packed_experts(
    name: str,
    count: int,
    outputs: int,
    inputs: int,
    *,
    seed: int = 0,
    device: str = "cpu",
    rounds_inputs: bool = False,
) -> PackedExperts:
    """Return experts as they are on a GPU once they are loaded: stacked."""
    form = replace(PACKED_FORMS[name], activations="token" if rounds_inputs else "none")
    places = [[Place(f"experts.{index}", outputs, inputs, 0, 0, outputs)] for index in range(count)]
    with torch.device(device):
        experts = PackedExperts(places, partial(new_weight, form))
        generator = torch.Generator(device).manual_seed(seed)
        for weight in experts.weights:
            assert isinstance(weight, LinearWeight)
            for parameter_name, parameter in weight.named_parameters():
                parameter.data = _drawn(parameter_name, parameter.data, generator, inputs)
            weight.arrange()
    experts.stack()
    return experts


def meant_by(experts: PackedExperts) -> Tensor:
    """Return the matrices [experts, outputs, inputs] f32."""
    matrices = []
    for weight in experts.weights:
        assert isinstance(weight, Fp8Weight | Int8Weight | IntWeight | Mxfp4Weight)
        matrices.append(weight.dequantised(torch.float32))
    return torch.stack(matrices)


def _drawn(name: str, like: Tensor, generator: torch.Generator, inputs: int) -> Tensor:
    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, like.shape, generator=generator, dtype=torch.int64, device=like.device)

    match name, like.dtype:
        case "exponents", _:
            return integers(120, 126).to(like.dtype)
        case _, torch.float8_e4m3fn:
            return torch.randn(like.shape, generator=generator, device=like.device).to(like.dtype)
        case "scales", _:
            return (torch.rand(like.shape, generator=generator, device=like.device) + 0.5) * float(0.3 * inputs**-0.5)
        case _, torch.int8:
            return integers(-128, 128).to(torch.int8)
        case _, torch.uint8:
            return integers(0, 256).to(torch.uint8)
        case _:
            return integers(-(1 << 31), 1 << 31).int()
