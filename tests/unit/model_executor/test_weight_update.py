"""Weights that are updated in place: afterwards a runner is like one that was started with them, and a failed update changes nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from srt.distributed.parallel_state import TensorParallel
from srt.model_executor.model_runner import ModelRunner
from srt.protocol.engine_work import LoadWeights, ReceiveWeights
from srt.utils.errors import UpdateError
from tests.support.checkpoints import CheckpointFactory
from tests.support.plan_driver import Job, PlanDriver, greedy
from tests.support.quantised_checkpoint import WEIGHT_ONLY, write_quantised
from tests.support.ranks import run_ranks
from tests.support.runners import make_runner

WAYS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"dtype": "float32"}),
    ("qwen3", {"dtype": "bfloat16", "quantization": "int8"}),
    ("qwen3", {"dtype": "bfloat16", "enable_lora": True, "max_lora_rank": 8}),
    ("qwen3_moe", {"dtype": "bfloat16", "quantization": "fp8"}),
    ("deepseek_v3", {"dtype": "bfloat16", "quantization": "fp8"}),
]


def drawn(runner: ModelRunner) -> list[list[int]]:
    """Greedy tokens of a few prompts: some begin alike, and all decode together."""
    runner.reset()
    jobs = [Job([7, 8, 9, n], greedy(6)) for n in range(3)]
    PlanDriver(runner, 16).run(jobs)
    return [job.outputs for job in jobs]


def update(runner: ModelRunner, folder: Path, *, is_partial: bool = False) -> None:
    runner.update_weights(LoadWeights(str(folder), is_partial), lambda: None)


def check_equal(runner: ModelRunner, fresh: ModelRunner) -> None:
    for ours, theirs in zip(runner.loaded.model.parameters(), fresh.loaded.model.parameters(), strict=True):
        assert torch.equal(ours.float(), theirs.float())
    assert drawn(runner) == drawn(fresh)


@pytest.mark.parametrize(("family", "options"), WAYS)
def test_an_updated_runner_is_like_one_that_was_started_with_the_new_weights(
    checkpoint: CheckpointFactory, family: str, options: dict[str, Any]
) -> None:
    old, new = checkpoint(family), checkpoint(family, seed=1)
    runner, fresh = make_runner(old, 16, **options), make_runner(new, 16, **options)
    before = drawn(runner)
    addresses = [one.data_ptr() for one in runner.loaded.model.parameters()]
    update(runner, new)
    check_equal(runner, fresh)
    assert drawn(runner) != before
    assert addresses == [one.data_ptr() for one in runner.loaded.model.parameters()]
    update(runner, old)
    assert drawn(runner) == before


def receive(runner: ModelRunner, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Update by the tensors of a checkpoint as if a trainer had sent them."""
    tensors = load_file(folder / "model.safetensors")
    monkeypatch.setattr(runner.update_groups, "receive", lambda work, report: tensors)
    runner.update_weights(ReceiveWeights("group", [], [], [], False), lambda: None)


@pytest.mark.parametrize(("family", "options"), WAYS)
def test_tensors_in_memory_are_loaded_like_files(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, family: str, options: dict[str, Any]
) -> None:
    new = checkpoint(family, seed=1)
    runner = make_runner(checkpoint(family), 16, **options)
    receive(runner, new, monkeypatch)
    check_equal(runner, make_runner(new, 16, **options))


def test_every_rank_cuts_its_part_of_tensors_in_memory(
    checkpoint: CheckpointFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = checkpoint("qwen3"), checkpoint("qwen3", seed=1)

    def work(tp: TensorParallel) -> bool:
        runner = make_runner(old, 16, tp, dtype="float32")
        receive(runner, new, monkeypatch)
        return drawn(runner) == drawn(make_runner(new, 16, tp, dtype="float32"))

    assert run_ranks(2, tmp_path, work) == [True, True]


@pytest.mark.parametrize("how", ["fp8 weights", "packed int4 with zeros", "gptq"])
def test_quantised_weights_are_updated_too(checkpoint: CheckpointFactory, tmp_path: Path, how: str) -> None:
    plain = [checkpoint("qwen3", seed=seed) for seed in (0, 1)]
    folders = [write_quantised(one, tmp_path / one.name, WEIGHT_ONLY[how])[0] for one in plain]
    runner, fresh = (make_runner(folder, 16, dtype="bfloat16") for folder in folders)
    update(runner, folders[1])
    check_equal(runner, fresh)


@pytest.mark.parametrize("how", ["fp8 weights", "packed int4 with zeros", "gptq"])
def test_quantised_tensors_may_come_from_memory(
    checkpoint: CheckpointFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    plain = [checkpoint("qwen3", seed=seed) for seed in (0, 1)]
    folders = [write_quantised(one, tmp_path / one.name, WEIGHT_ONLY[how])[0] for one in plain]
    runner, fresh = (make_runner(folder, 16, dtype="bfloat16") for folder in folders)
    receive(runner, folders[1], monkeypatch)
    check_equal(runner, fresh)


@pytest.mark.parametrize(("family", "expert_groups"), [("qwen3", 1), ("qwen3_moe", 2)])
def test_every_rank_gets_its_part(
    family: str, expert_groups: int, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    old, new = checkpoint(family), checkpoint(family, seed=1)

    def work(tp: TensorParallel) -> list[list[list[int]]]:
        runner = make_runner(old, 16, tp, dtype="float32")
        update(runner, new)
        updated = drawn(runner)
        return [updated, drawn(make_runner(new, 16, tp, dtype="float32"))]

    for updated, fresh in run_ranks(2, tmp_path, work, expert_groups):
        assert updated == fresh


def test_a_rank_that_cannot_load_keeps_the_others_from_it(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    old, new = checkpoint("qwen3"), checkpoint("qwen3", seed=1)

    def work(tp: TensorParallel) -> str:
        runner = make_runner(old, 16, tp, dtype="float32")
        before = drawn(runner)
        with pytest.raises(UpdateError) as refused:
            update(runner, new if tp.rank == 0 else tmp_path)
        assert drawn(runner) == before
        return str(refused.value)

    others, own = run_ranks(2, tmp_path, work)
    assert others == "Another rank could not load the weights." and "config.json" in own


def broken(folder: Path, target: Path, how: str) -> Path:
    """A copy of the checkpoint that no update may take."""
    shutil.copytree(folder, target)
    file = target / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    if how == "lacks":
        del weights[name]
    elif how == "wrong shape":
        weights[name] = weights[name][:-1].contiguous()
    elif how == "cut short":
        file.write_bytes(file.read_bytes()[:-8])
        return target
    else:
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
        return target
    save_file(weights, file, metadata={"format": "pt"})
    return target


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("lacks", "it lacks model.layers.1.mlp.up_proj.weight"),
        ("wrong shape", "of the wrong shape is model.layers.1.mlp.up_proj.weight"),
        ("cut short", "model.safetensors"),
        ("other model", "describes another model"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(
    checkpoint: CheckpointFactory, tmp_path: Path, how: str, sentence: str
) -> None:
    runner = make_runner(checkpoint("qwen3"), 16, dtype="float32")
    before = [one.clone() for one in runner.loaded.model.parameters()]
    with pytest.raises(UpdateError, match=sentence):
        update(runner, broken(checkpoint("qwen3", seed=1), tmp_path / "broken", how))
    for one, now in zip(before, runner.loaded.model.parameters(), strict=True):
        assert torch.equal(one, now)


def test_some_tensors_leave_the_others_as_they_are(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    old, new, mixed = checkpoint("qwen3"), checkpoint("qwen3", seed=1), tmp_path / "mixed"
    runner = make_runner(old, 16, dtype="float32")
    before, after = load_file(old / "model.safetensors"), load_file(new / "model.safetensors")
    some = {name: after[name] for name in ("model.layers.0.self_attn.k_proj.weight", "model.norm.weight")}
    (tmp_path / "some").mkdir()
    save_file(some, tmp_path / "some" / "model.safetensors")
    update(runner, tmp_path / "some", is_partial=True)
    shutil.copytree(old, mixed)
    save_file({**before, **some}, mixed / "model.safetensors", metadata={"format": "pt"})
    check_equal(runner, make_runner(mixed, 16, dtype="float32"))
