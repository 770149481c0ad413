"""Groups of ranks that divide the experts (--ep-size): together they give every request the tokens of the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest

from srt.distributed.parallel_state import TensorParallel
from srt.layers.moe.expert_ops import ExpertOps, ExpertWeights
from srt.layers.moe.experts import ExpertLayers
from srt.utils.model_config import ModelConfig
from srt.utils.model_error import ModelError
from tests.support.checkpoints import CheckpointFactory
from tests.support.ranks import run_ranks
from tests.support.runners import make_runner
from tests.unit.model_executor.test_stages import PAGE, outputs_of

SLOW_FAMILIES = ("mixtral", "qwen2_moe", "deepseek_v3", "granitemoe")


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "gpt_oss", *(pytest.param(one, marks=pytest.mark.full) for one in SLOW_FAMILIES)]
)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_two_groups_draw_what_the_whole_model_draws(
    family: str, size: int, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    folder = checkpoint(family)
    expected = outputs_of(folder, None, None)
    for found in run_ranks(size, tmp_path, lambda tp: outputs_of(folder, tp, None), expert_groups=2):
        assert found == expected


@pytest.mark.parametrize("family", ["deepseek_v2", "glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize(("size", "groups"), [(1, 1), (2, 1), (2, 2)])
def test_a_shared_expert_beside_the_chosen_ones_changes_no_token(
    family: str, size: int, groups: int, checkpoint: CheckpointFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank; on two that divide each expert; on two that divide the experts, each with a part of the shared one."""
    folder = checkpoint(family, num_layers=3)
    expected = outputs_of(folder, None, None)
    answers: list[bool] = []

    def computes_shared(ops: ExpertOps, num_tokens: int, top_k: int, weights: ExpertWeights) -> bool:
        assert weights.shared is not None
        answers.append(num_tokens > 0)
        return answers[-1]

    monkeypatch.setattr(ExpertOps, "computes_shared", computes_shared)
    for found in run_ranks(size, tmp_path, lambda tp: outputs_of(folder, tp, None), groups):
        assert found == expected
    assert any(answers)


def test_a_rank_holds_the_experts_of_its_group_alone(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    folder = checkpoint("qwen3_moe")

    def first_and_shape(tp: TensorParallel) -> tuple[int, list[int]]:
        model = make_runner(folder, PAGE, tp).loaded.our_model
        matrices = next(one for one in model.modules() if isinstance(one, ExpertLayers)).matrices
        return matrices.first, list(matrices.down.shape)

    ((_, (num_experts, hidden_size, size)),) = run_ranks(1, tmp_path, first_and_shape)
    half = [num_experts // 2, hidden_size, size]
    assert run_ranks(2, tmp_path, first_and_shape, expert_groups=2) == [(0, half), (num_experts // 2, half)]
    half_of_each = [num_experts // 2, hidden_size, size // 2]
    firsts = [
        first for first, shape in run_ranks(4, tmp_path, first_and_shape, expert_groups=2) if shape == half_of_each
    ]
    assert firsts == [0, 0, num_experts // 2, num_experts // 2]


def test_groups_that_do_not_fit_are_refused(checkpoint: CheckpointFactory) -> None:
    config = ModelConfig.from_folder(checkpoint("qwen3_moe"))
    config.check_tp(4, 2)
    with pytest.raises(ModelError, match="--ep-size 16 does not divide the model's 8 experts"):
        ModelConfig.from_folder(checkpoint("qwen3_moe", num_heads=16)).check_tp(16, 16)
