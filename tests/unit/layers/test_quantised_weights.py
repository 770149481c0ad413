"""Quantised checkpoints against the plain ones that they stand for, in float32, on one rank and on two."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from srt.distributed.parallel_state import TensorParallel
from srt.layers.linear import LinearLayer
from srt.layers.moe.expert_ops import Choice
from srt.layers.moe.experts import ExpertLayers
from srt.layers.quantization.cpu_products import from_e4m3
from srt.layers.quantization.fp8_weight import quantise_rows
from srt.layers.quantization.int8_weight import Int8Weight
from srt.layers.quantization.weight import LinearWeight, Place, PlainWeight
from srt.layers.weights import WeightPiece
from srt.model_loader.loader import LoadConfig, get_model_loader
from srt.utils.model_config import ModelConfig
from srt.utils.model_error import ModelError
from srt.utils.quantization import WeightFormat
from tests.support.checkpoints import CheckpointFactory
from tests.support.dense_attention import dense_batch
from tests.support.quantised_checkpoint import WEIGHT_ONLY, WITH_INPUTS, Quantisation, write_mxfp4, write_quantised
from tests.support.ranks import CPU, idle_rank, run_ranks, single_rank


def load(
    folder: Path,
    tp: TensorParallel,
    quantization: str | None = None,
    load_format: Any = "auto",
    dtype: torch.dtype = torch.float32,
) -> Any:
    config = ModelConfig.from_folder(folder, quantization=quantization)
    loader = get_model_loader(LoadConfig(load_format=load_format))
    return loader.load_model(config, folder, tp, dtype, CPU, lambda done, total: None)


@torch.inference_mode()
def logits_of(model: Any) -> Tensor:
    ids = torch.randint(model.lm_head.vocab_size, (24,), generator=torch.Generator().manual_seed(1))
    logits: Tensor = model.lm_head.logits(model(ids, torch.arange(24), dense_batch()))
    return logits


def check_two_ranks(folder: Path, rendezvous: Path, expected: Tensor, error: float) -> None:
    parts = run_ranks(2, rendezvous, lambda tp: logits_of(load(folder, tp)))
    torch.testing.assert_close(torch.cat(parts, dim=-1), expected, rtol=error, atol=error)


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_stored_weights_multiply_like_those_that_they_stand_for(
    name: str, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    stored, meant = write_quantised(checkpoint("qwen3"), tmp_path, WEIGHT_ONLY[name])
    model = load(stored, single_rank())
    dense = load(meant, single_rank())
    expected, ours = logits_of(dense), logits_of(model)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert sum(p.nbytes for p in model.model.layers.parameters()) < 0.5 * sum(
        p.nbytes for p in dense.model.layers.parameters()
    )
    check_two_ranks(stored, tmp_path, expected, 1e-4)


def experts_of(model: Any) -> Any:
    return next(module for module in model.modules() if isinstance(module, ExpertLayers))


@pytest.mark.parametrize("name", ["fp8 weights", "packed int4 ordered", "int8 weights", "awq", "mxfp4"])
def test_stored_experts_multiply_like_those_that_they_stand_for(
    name: str, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    if name == "mxfp4":
        stored, meant = write_mxfp4(checkpoint("gpt_oss"), tmp_path)
    else:
        plain = checkpoint("qwen3_moe", config={"moe_intermediate_size": 128, "decoder_sparse_step": 1})
        stored, meant = write_quantised(plain, tmp_path, WEIGHT_ONLY[name])
    expected, model = logits_of(load(meant, single_rank())), load(stored, single_rank())
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-4, atol=1e-4)
    experts = experts_of(model)
    assert sum(p.nbytes for p in experts.parameters()) < 0.32 * 4 * 3 * 128 * 64 * len(experts.gate_up.weights)
    check_two_ranks(stored, tmp_path, expected, 1e-4)


@pytest.mark.parametrize("tp", [single_rank(), idle_rank(1, 2)], ids=["one rank", "the second of two"])
@pytest.mark.parametrize("family", ["mixtral", "granitemoe"])
def test_experts_are_quantised_while_they_are_loaded(
    family: str, tp: TensorParallel, checkpoint: CheckpointFactory
) -> None:
    """A checkpoint of Mixtral has a tensor for each matrix, one of Granite has one for all experts."""
    ours, plain = (load(checkpoint(family), tp, how) for how in ("fp8", None))
    quantised, exact = (experts_of(model) for model in (ours, plain))
    for packed, matrices in ((quantised.gate_up, exact.gate_up), (quantised.down, exact.down)):
        for weight, matrix in zip(packed.weights, matrices, strict=True):
            numbers, scales = quantise_rows(matrix)
            assert torch.equal(weight.dequantised(torch.float32), numbers.float() * scales)
    assert torch.isfinite(quantised(torch.ones(2, 64), Choice(torch.tensor([[0, 1]] * 2), torch.ones(2, 2)))).all()


@pytest.mark.parametrize("name", ["packed int4", "gptq ordered with zeros", "awq"])
def test_weights_of_four_bits_are_near_in_bfloat16_and_take_their_bytes(
    name: str, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    """PyTorch has a product for them, which has a layout of its own."""
    stored, meant = write_quantised(checkpoint("qwen2"), tmp_path, WEIGHT_ONLY[name])
    exact = logits_of(load(meant, single_rank()))
    model = load(stored, single_rank(), dtype=torch.bfloat16)
    assert distance(logits_of(model), exact) < 0.03
    assert model.model.layers[0].mlp.down_proj.weight.packed.nbytes == 64 * 128 // 2


def test_every_e4m3_number_is_converted_exactly() -> None:
    numbers = torch.arange(256, dtype=torch.uint8)[torch.arange(256) % 128 != 127].view(torch.float8_e4m3fn)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(from_e4m3(numbers, dtype), numbers.to(dtype))


class RoundedInputs(LinearWeight):
    """A matrix whose inputs are rounded in the obvious way, to e4m3 or to integers of 8 bits."""

    def __init__(self, matrix: Tensor, block: int | None, scale: float | None, *, to_integers: bool) -> None:
        super().__init__()
        self._matrix, self._block, self._scale = matrix, block, scale
        self._round = _integers if to_integers else _e4m3
        self._largest = 127 if to_integers else 448

    def pieces(self, places: Sequence[Place]) -> Iterator[WeightPiece]:
        return iter(())

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rounded = torch.empty_like(x)
        for row in range(len(x)):
            for first in range(0, x.shape[1], self._block or x.shape[1]):
                part = slice(first, first + (self._block or x.shape[1]))
                scale = self._scale or float(x[row, part].abs().max()) / self._largest
                rounded[row, part] = self._round((x[row, part] / scale).clamp(-self._largest, self._largest)) * scale
        return torch.nn.functional.linear(rounded, self._matrix, bias)


def _e4m3(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).float()


def _integers(x: Tensor) -> Tensor:
    return x.round()


def round_inputs(model: Any, how: Quantisation, block: int | None) -> None:
    for layer in model.modules():
        if isinstance(layer, LinearLayer):
            assert isinstance(layer.weight, PlainWeight)
            to_integers = how.config.get("format") == "int-quantized"
            layer.weight = RoundedInputs(layer.weight.matrix, block, how.static_scale, to_integers=to_integers)


@pytest.mark.parametrize("name", WITH_INPUTS)
def test_quantised_inputs_are_those_of_the_obvious_rounding(
    name: str, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    """An input between two e4m3 numbers may be rounded either way, so logits are near on the whole rather than each by itself."""
    how = WITH_INPUTS[name]
    # Two ranks cut the blocks of keys and values, whose heads are of 64.
    folder = checkpoint("qwen3", hidden_size=256, head_dim=64, intermediate_size=512)
    stored, meant = write_quantised(folder, tmp_path, how)
    dense = load(meant, single_rank())
    plain = logits_of(dense)
    round_inputs(dense, how, 128 if name.endswith("blocks") else None)
    expected, ours = logits_of(dense), logits_of(load(stored, single_rank()))
    assert distance(ours, expected) < 0.2 * distance(plain, expected)
    parts = run_ranks(2, tmp_path, lambda tp: logits_of(load(stored, tp)))
    if name.endswith(("static", "blocks")):  # else each rank rounds its part of a row by its own largest input
        assert distance(torch.cat(parts, dim=-1), expected) < 0.2 * distance(plain, expected)
    else:
        assert distance(torch.cat(parts, dim=-1), expected) < 2 * distance(plain, expected)


@pytest.mark.parametrize(("asked", "same"), [("fp8", "fp8 channels and tokens"), ("int8", "int8 weights")])
def test_a_plain_checkpoint_is_quantised_while_it_is_loaded(
    asked: str, same: str, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    """The same as a checkpoint that was quantised by channel before."""
    plain = checkpoint("qwen2", tied=False)
    stored, _ = write_quantised(plain, tmp_path, {**WEIGHT_ONLY, **WITH_INPUTS}[same])
    ours, expected = load(plain, single_rank(), asked), load(stored, single_rank())
    assert ours.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(ours.state_dict()[name].float(), tensor.float()), name
    parts = run_ranks(2, tmp_path, lambda tp: logits_of(load(plain, tp, asked)))
    unquantised = logits_of(load(plain, single_rank()))
    assert distance(torch.cat(parts, dim=-1), unquantised) < 1.5 * distance(logits_of(expected), unquantised)


@pytest.mark.parametrize(
    "name", ["fp8 static", "fp8 blocks", "int8 weights", "gptq", "awq", "packed int4 with zeros", "packed int4 ordered"]
)
def test_dummy_weights_of_every_format_give_finite_logits(
    name: str, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    stored, _ = write_quantised(checkpoint("qwen3"), tmp_path, {**WEIGHT_ONLY, **WITH_INPUTS}[name])
    (stored / "model.safetensors").unlink()
    logits = logits_of(load(stored, single_rank(), load_format="dummy"))
    assert torch.isfinite(logits).all()
    assert 0.05 < logits.std() < 50


def refusal(folder: Path, tp: TensorParallel | None = None, quantization: str | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder, tp or single_rank(), quantization)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    return sentence


def changed_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_broken_quantised_checkpoints_are_refused_in_a_sentence(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    layer = "model.layers.0.mlp.down_proj"

    def stored(name: str) -> Path:
        folder = tmp_path / name.replace(" ", "-") / str(len(list(tmp_path.iterdir())))
        return write_quantised(checkpoint("qwen3"), folder, {**WEIGHT_ONLY, **WITH_INPUTS}[name])[0]

    no_zeros = changed_tensors(stored("awq"), lambda tensors: tensors.pop(f"{layer}.qzeros"))
    assert f"lacks {layer}.qzeros" in refusal(no_zeros)
    no_scale = changed_tensors(stored("fp8 dynamic"), lambda tensors: tensors.pop(f"{layer}.weight_scale"))
    assert f"lacks {layer}.weight_scale" in refusal(no_scale)
    negative = changed_tensors(
        stored("fp8 dynamic"), lambda tensors: tensors.update({f"{layer}.weight_scale": torch.tensor(-1.0)})
    )
    assert f"scale of {layer} that is negative" in refusal(negative)
    wrong = changed_tensors(stored("gptq"), lambda tensors: tensors.update({f"{layer}.scales": torch.ones(3, 64)}))
    assert f"wrong shape is {layer}.scales [3, 64] instead of [4, 64]" in refusal(wrong)
    infinite = changed_tensors(
        stored("gptq"), lambda tensors: tensors.update({f"{layer}.scales": torch.full((4, 64), float("inf"))})
    )
    assert f"scale of {layer} that is not finite" in refusal(infinite)
    plain_matrix = changed_tensors(
        stored("fp8 dynamic"), lambda tensors: tensors.update({f"{layer}.weight": torch.ones(64, 128)})
    )
    assert f"{layer}.weight (F32)" in refusal(plain_matrix)


def test_what_ranks_cannot_split_is_refused_in_a_sentence(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    narrow = checkpoint("qwen3", intermediate_size=96, num_kv_heads=4)
    stored, _ = write_quantised(narrow, tmp_path / "gptq", WEIGHT_ONLY["gptq"])
    assert "--tp cuts a group of 32 weights of model.layers.0.mlp.down_proj" in refusal(stored, idle_rank(0, 2))
    stored, _ = write_quantised(narrow, tmp_path / "fp8", WITH_INPUTS["fp8 blocks"])
    assert "--tp cuts a block of 128 inputs of model.layers.0.self_attn.o_proj" in refusal(stored, idle_rank(0, 4))
    wide = replace(WEIGHT_ONLY["gptq"], config={**WEIGHT_ONLY["gptq"].config, "group_size": 64})
    stored, _ = write_quantised(narrow, tmp_path / "wide", wide)
    assert "Groups of 64 weights do not divide the 96 inputs of model.layers.0.mlp.down_proj" in refusal(stored)


def test_experts_that_cannot_be_read_or_split_are_refused_in_a_sentence(
    checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    stored, _ = write_mxfp4(checkpoint("gpt_oss", intermediate_size=96), tmp_path / "mxfp4")
    down = "model.layers.0.mlp.experts.down_proj"
    assert f"--tp cuts a group of 32 weights of {down}" in refusal(stored, idle_rank(0, 2))
    scales = load_file(stored / "model.safetensors")[f"{down}_scales"]
    changed_tensors(stored, lambda tensors: tensors.update({f"{down}_scales": torch.full_like(scales, 255)}))
    assert f"a scale of {down} that is not a number" in refusal(stored)
    changed_tensors(stored, lambda tensors: tensors.pop(f"{down}_scales"))
    assert f"it lacks {down}_scales" in refusal(stored)
    plain = checkpoint("gpt_oss", intermediate_size=80)
    config = json.loads((plain / "config.json").read_text())
    uneven = shutil.copytree(plain, tmp_path / "uneven")
    (uneven / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    assert f"Groups of 32 weights do not divide the 80 inputs of {down}" in refusal(uneven)
    moe = checkpoint("qwen3_moe", num_heads=8, config={"moe_intermediate_size": 128, "decoder_sparse_step": 1})
    stored, _ = write_quantised(moe, tmp_path / "blocks", WITH_INPUTS["fp8 blocks"])
    assert "--tp cuts a block of 128 inputs of model.layers.0.mlp.experts.0.down_proj" in refusal(
        stored, idle_rank(0, 2)
    )
    scale = "model.layers.0.mlp.experts.5.up_proj.weight_scale_inv"
    changed_tensors(stored, lambda tensors: tensors.update({scale: -tensors[scale]}))
    assert "scale of model.layers.0.mlp.experts.5.gate_proj that is negative" in refusal(stored)


def test_stacked_experts_are_not_quantised_while_they_are_loaded(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    plain = checkpoint("qwen3_moe", config={"moe_intermediate_size": 128, "decoder_sparse_step": 1})
    experts = "model.layers.0.mlp.experts"
    folder = changed_tensors(
        shutil.copytree(plain, tmp_path / "stacked"),
        lambda tensors: tensors.update({f"{experts}.gate_up_proj": torch.zeros(8, 256, 64)}),
    )
    assert f"stacks the experts of {experts} in one tensor" in refusal(folder, quantization="fp8")


def test_merged_layers_in_different_formats_are_refused(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    how = WEIGHT_ONLY["gptq"]
    mixed = replace(how, config={**how.config, "dynamic": {"-:.*k_proj": {}}}, skip=("k_proj",))
    stored, _ = write_quantised(checkpoint("qwen3"), tmp_path, mixed)
    assert "q_proj and model.layers.0.self_attn.k_proj in different formats" in refusal(stored)


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def test_sums_of_8_bit_products_may_be_beyond_float16() -> None:
    places = [Place("layer", 8, 64, 0, 0, 8)]
    weight = Int8Weight(WeightFormat("int8", 8, "channel", activations="token"), 8, 64, places)
    weight.values.fill_(127)
    weight.scales.fill_(1 / 127)
    weight.finish()
    found = weight.multiply(torch.ones(2, 64, dtype=torch.float16), None)
    torch.testing.assert_close(found, torch.full((2, 8), 64.0, dtype=torch.float16))
