"""Weights that ranks have saved as they hold them: loaded again they are the same, and nothing is transformed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from srt.distributed.parallel_state import TensorParallel
from srt.distributed.pipeline import Pipeline
from srt.entrypoints.weight_saving import complete_folder
from srt.layers.attention.latent_layer import LatentExpansion
from srt.layers.quantization.int_weight import IntWeight
from srt.layers.quantization.weight import LinearWeight
from srt.model_executor.memory.memory_loan import memory_loan
from srt.model_executor.model_runner import ModelRunner
from srt.model_loader.sharded_state import tensors_of
from srt.model_loader.weight_update import inner_values
from srt.protocol.engine_work import LoadWeights, SaveWeights, WeightsSource
from srt.utils.checkpoint import version_of
from srt.utils.errors import StartError, UpdateError
from srt.utils.model_error import ModelError
from srt.utils.sharded_state import ShardedIndex
from tests.support.checkpoints import CheckpointFactory
from tests.support.plan_driver import Job, PlanDriver, greedy
from tests.support.quantised_checkpoint import WEIGHT_ONLY, WITH_INPUTS, write_mxfp4, write_quantised
from tests.support.ranks import run_ranks, run_stages
from tests.support.runners import make_runner

SHARDED: dict[str, Any] = {"load_format": "sharded_state"}
FLOAT32: dict[str, Any] = {"dtype": "float32"}


def idle() -> None:
    """Report progress to nobody."""


def saved(runner: ModelRunner, source: Path, folder: Path, most_bytes: int = 0) -> Path:
    """Save the runner's weights as a server does: its ranks together, and then the rest."""
    folder.mkdir(exist_ok=True)
    packed_for = str(runner.save_weights(SaveWeights(str(folder), most_bytes), idle)["packed_for"])
    if runner.loaded.tp.rank == 0 and runner.loaded.stage.is_last:
        index = ShardedIndex.of(runner.loaded.args, runner.loaded.config)
        complete_folder(source, folder, replace(index, packed_for=packed_for))
    runner.loaded.on_all_ranks(True)
    return folder


def drawn(runner: ModelRunner) -> list[list[int]]:
    runner.reset()
    jobs = [Job([7, 8, 9, n], greedy(6)) for n in range(3)]
    PlanDriver(runner, 16).run(jobs)
    return [job.outputs for job in jobs]


def all_tensors(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Every tensor that a model's modules and products hold, by its path."""
    found = {path: value} if isinstance(value, torch.Tensor) else {}
    for key, inside in inner_values(value).items():
        found |= all_tensors(inside, f"{path}.{key}")
    return found


def check_equal(one: ModelRunner, other: ModelRunner) -> None:
    before, after = all_tensors(one.loaded.model), all_tensors(other.loaded.model)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert (tensor.dtype, tensor.shape) == (after[name].dtype, after[name].shape), name
        assert torch.equal(
            tensor.contiguous().view(-1).view(torch.uint8), after[name].contiguous().view(-1).view(torch.uint8)
        ), name


def check_saved(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> ModelRunner:
    first = make_runner(source, 16, **options)
    saved(first, source, folder)

    def transform(*_: Any) -> None:
        raise AssertionError("a weight was transformed again")

    with monkeypatch.context() as patch:
        for kind in (LinearWeight, LatentExpansion, *LinearWeight.__subclasses__()):
            patch.setattr(kind, "finish", transform)
            patch.setattr(kind, "arrange", transform, raising=False)
        second = make_runner(folder, 16, **options, **SHARDED)
    check_equal(first, second)
    assert drawn(second) == drawn(first)
    return second


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", FLOAT32),
        ("qwen2", FLOAT32),
        ("qwen3", {"dtype": "bfloat16", "quantization": "int8"}),
        ("qwen3", {"dtype": "bfloat16", "enable_lora": True, "max_lora_rank": 8}),
        ("qwen3_moe", {"dtype": "bfloat16", "quantization": "fp8"}),
        ("gpt_oss", FLOAT32),
        ("deepseek_v3", {"dtype": "float32", "quantization": "fp8"}),
    ],
)
def test_what_is_loaded_is_what_was_saved(
    family: str, options: dict[str, Any], checkpoint: CheckpointFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_saved(checkpoint(family), tmp_path / "saved", monkeypatch, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*WEIGHT_ONLY, *WITH_INPUTS])
def test_quantised_checkpoints_are_saved_as_they_are_held(
    name: str, dtype: str, checkpoint: CheckpointFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, _ = write_quantised(checkpoint("qwen3"), tmp_path, {**WEIGHT_ONLY, **WITH_INPUTS}[name])
    check_saved(stored, tmp_path / "saved", monkeypatch, dtype=dtype)


def test_experts_in_4_bits_are_saved(
    checkpoint: CheckpointFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, _ = write_mxfp4(checkpoint("gpt_oss"), tmp_path)
    check_saved(stored, tmp_path / "saved", monkeypatch, dtype="float32")


@pytest.mark.parametrize("options", [FLOAT32, {"dtype": "bfloat16", "quantization": "int8"}])
def test_every_rank_has_its_part(checkpoint: CheckpointFactory, tmp_path: Path, options: dict[str, Any]) -> None:
    source, folder = checkpoint("qwen3"), tmp_path / "saved"
    first = run_ranks(2, tmp_path, lambda tp: one_rank(tp, source, folder, options))
    again = run_ranks(2, tmp_path, lambda tp: drawn(make_runner(folder, 16, tp, tp_size=2, **options, **SHARDED)))
    assert again == first and first[0] == first[1]
    assert (folder / "model-rank-1-part-0.safetensors").is_file()


def one_rank(tp: TensorParallel, source: Path, folder: Path, options: dict[str, Any]) -> list[list[int]]:
    runner = make_runner(source, 16, tp, tp_size=2, **options)
    saved(runner, source, folder)
    return drawn(runner)


def test_every_stage_has_its_part(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    source, folder = checkpoint("qwen3"), tmp_path / "saved"

    def work(tp: TensorParallel, pipeline: Pipeline) -> bool:
        options: dict[str, Any] = {"pp_size": 2, **FLOAT32}
        first = make_runner(source, 16, tp, pipeline=pipeline, **options)
        saved(first, source, folder)
        check_equal(first, make_runner(folder, 16, tp, pipeline=pipeline, **options, **SHARDED))
        return True

    assert run_stages(2, 1, tmp_path, work) == [True, True]


def test_a_rank_may_have_several_files(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    source, folder = checkpoint("qwen3"), tmp_path / "saved"
    runner = make_runner(source, 16, **FLOAT32)
    saved(runner, source, folder, most_bytes=100_000)
    files = list(folder.glob("model-rank-0-part-*.safetensors"))
    largest = max(tensor.nbytes for tensor in tensors_of(runner.loaded.our_model).values())
    assert len(files) > 3 and all(file.stat().st_size < max(100_000, largest) + 10_000 for file in files)
    assert drawn(make_runner(folder, 16, **FLOAT32, **SHARDED)) == drawn(runner)


def test_adapters_change_nothing_of_what_is_saved(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    source, lora = checkpoint("qwen3"), dict[str, Any](enable_lora=True, max_lora_rank=8)
    bare, adapted = make_runner(source, 16, **FLOAT32), make_runner(source, 16, **FLOAT32, **lora)
    with_them, without = saved(adapted, source, tmp_path / "adapted"), saved(bare, source, tmp_path / "bare")
    names = "model-rank-0-part-0.safetensors"
    assert (with_them / names).read_bytes() == (without / names).read_bytes()
    assert drawn(make_runner(with_them, 16, **FLOAT32, **SHARDED)) == drawn(bare)
    assert drawn(make_runner(without, 16, **FLOAT32, **SHARDED, **lora)) == drawn(bare)


@pytest.mark.parametrize("options", [FLOAT32, {"dtype": "bfloat16", "quantization": "int8"}])
def test_weights_are_updated_afterwards(checkpoint: CheckpointFactory, tmp_path: Path, options: dict[str, Any]) -> None:
    """From a checkpoint, and from what an equal server has saved, whichever of them the server began with."""
    old, new = checkpoint("qwen3"), checkpoint("qwen3", seed=1)
    first = make_runner(old, 16, **options)
    before, folder = drawn(first), saved(first, old, tmp_path / "saved")
    runner = make_runner(folder, 16, **options, **SHARDED)
    addresses = {name: one.data_ptr() for name, one in tensors_of(runner.loaded.our_model).items()}
    runner.update_weights(LoadWeights(str(new)), idle)
    assert drawn(runner) == drawn(make_runner(new, 16, **options)) != before
    for one in (runner, make_runner(new, 16, **options)):
        assert one.update_weights(LoadWeights(str(folder)), idle) == version_of(folder)
        assert drawn(one) == before
    assert addresses == {name: one.data_ptr() for name, one in tensors_of(runner.loaded.our_model).items()}


def test_released_weights_come_back_from_the_ranks_files(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    source = checkpoint("qwen3")
    folder = saved(make_runner(source, 16, **FLOAT32), source, tmp_path / "saved")
    runner = make_runner(folder, 16, **FLOAT32, **SHARDED)
    loan, before = memory_loan(runner, WeightsSource(str(folder), version_of(folder))), drawn(runner)
    loan.release(["weights"], None, idle)
    loan.resume(["weights"], None, idle)
    assert drawn(runner) == before


def test_4_bit_weights_packed_for_another_cpu_are_refused(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    stored, _ = write_quantised(checkpoint("qwen3"), tmp_path, WEIGHT_ONLY["packed int4"])
    runner = make_runner(stored, 16, dtype="bfloat16")
    assert any(isinstance(one, IntWeight) and one.is_repacked for one in runner.loaded.model.modules())
    folder = saved(runner, stored, tmp_path / "saved")
    path = folder / "sharded_state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "packed_for": "another CPU"}))
    with pytest.raises(ModelError, match="were packed for another CPU, and this server has"):
        make_runner(folder, 16, dtype="bfloat16", **SHARDED)


def lack_a_tensor(folder: Path) -> None:
    shutil.copyfile(folder / "model-rank-0-part-1.safetensors", folder / "model-rank-0-part-0.safetensors")


def cut(folder: Path) -> None:
    file = folder / "model-rank-0-part-0.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("harm", "sentence"), [(lack_a_tensor, "lacks model.embed_tokens.weight"), (cut, "is cut short")]
)
def test_files_that_are_not_whole_are_refused(
    checkpoint: CheckpointFactory, tmp_path: Path, harm: Callable[[Path], None], sentence: str
) -> None:
    source = checkpoint("qwen3")
    runner = make_runner(source, 16, **FLOAT32)
    folder = saved(runner, source, tmp_path / "saved", most_bytes=100_000)
    before = drawn(runner)
    harm(folder)
    with pytest.raises(ModelError, match=sentence):
        make_runner(folder, 16, **FLOAT32, **SHARDED)
    with pytest.raises(UpdateError, match=sentence):
        runner.update_weights(LoadWeights(str(folder)), idle)
    assert drawn(runner) == before


def test_a_folder_that_cannot_be_written_is_named(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    runner = make_runner(checkpoint("qwen3"), 16, **FLOAT32)
    with pytest.raises(UpdateError, match=r"cannot be written to .*absent: No such file"):
        runner.save_weights(SaveWeights(str(tmp_path / "absent"), 0), idle)


def test_models_of_the_library_are_refused(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    runner = make_runner(checkpoint("qwen3"), 16, model_impl="transformers", **FLOAT32)
    with pytest.raises(StartError, match="for layers of ours only"):
        ShardedIndex.of(runner.loaded.args, runner.loaded.config)
