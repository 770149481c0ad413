"""The benchmark of drafts whose acceptance is forced: the limit that it shows beside each figure, and what it measures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import limits, models, speculation
from benchmarks.limits import Device, Shape
from benchmarks.speculation import Timed, figure_of, measure, text_of
from benchmarks.speculation_limits import RoundShape, head_shape
from srt.layers.ops import TORCH_OPS
from srt.model_loader.head_loader import load_eagle3_head
from srt.model_loader.loader import LoadConfig
from srt.models.causal_lm import CausalLM
from srt.server_args import parse_args
from srt.utils.eagle3_config import Eagle3Config
from srt.utils.model_config import ModelConfig
from tests.support.checkpoints import CheckpointFactory
from tests.support.eagle3_heads import make_head
from tests.support.ranks import CPU, single_rank
from tests.support.runners import make_runner

SLOW_MEMORY, SLOW_PRODUCTS = Device("x", 1.0, 1e12), Device("x", 1e12, 1.0)
MODEL = Shape(linear_weights=900, head_weights=100, kv_bytes_per_token=8, attention_flops_per_pair=0)
SMALL = Shape(linear_weights=90, head_weights=10, kv_bytes_per_token=4, attention_flops_per_pair=0)
MATRICES = 2  # dimensions of a weight that is multiplied with


def test_a_round_reads_the_model_once_and_what_drafts_for_each_draft() -> None:
    drafting, copying = RoundShape(MODEL, SMALL, 3), RoundShape(MODEL, None, 3)
    model, small = 2 * 1000 + 5 * 20 * 8, 2 * 100 + 5 * 20 * 4
    assert copying.round_s(SLOW_MEMORY, 5, 20) == pytest.approx(model)
    assert drafting.round_s(SLOW_MEMORY, 5, 20) == pytest.approx(model + 3 * small)


def test_slow_products_are_those_of_all_tokens_that_are_verified() -> None:
    drafting = RoundShape(MODEL, SMALL, 3)
    assert drafting.round_s(SLOW_PRODUCTS, 5, 20) == pytest.approx(2 * 1000 * 5 * 4 + 3 * 2 * 100 * 5)


def test_tokens_that_are_verified_read_more_experts() -> None:
    routed = Shape(0, 0, 0, 0, expert_weights=10, num_experts=64, top_k=2)
    assert routed.verify_s(SLOW_MEMORY, 3, 0, 4) == pytest.approx(routed.read_s(SLOW_MEMORY, 12, 0))


def test_a_gain_is_shown_beside_that_of_the_limits() -> None:
    shapes = RoundShape(MODEL, None, 0), RoundShape(MODEL, SMALL, 3)
    figure = figure_of(1, Timed(10.0, 20), Timed(15.0, 40), 3, shapes, SLOW_MEMORY)
    assert figure["gain"] == pytest.approx(2.0)
    plain, drafted = 2000 + 20 * 8, 2000 + 40 * 8 + 3 * (200 + 40 * 4)
    assert figure["limit_gain"] == pytest.approx(3 * plain / drafted)
    assert figure["of_limit"] == pytest.approx(2.0 / figure["limit_gain"])
    assert f"limit {figure['limit_gain']:.2f} ×, ratio {figure['of_limit']:.2f}" in text_of(figure, 3)


def test_the_weights_of_a_head_are_those_that_it_loads(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    folder = checkpoint("qwen3")
    config = Eagle3Config.from_folder(make_head(folder, tmp_path / "head", draft_vocab=96))
    model = CausalLM(ModelConfig.from_folder(folder), single_rank(), TORCH_OPS)
    shared = model.model.embed_tokens, model.lm_head
    given = config, str(tmp_path / "head"), LoadConfig()
    head = load_eagle3_head(*given, *shared, TORCH_OPS, torch.float32, CPU)
    read = [weight for name, weight in head.named_parameters() if "embed_tokens" not in name]
    num_weights = sum(weight.numel() for weight in read if weight.dim() == MATRICES)
    args = parse_args(
        [
            "--model-path",
            str(folder),
            "--speculative-algorithm",
            "EAGLE3",
            "--speculative-draft-model-path",
            str(tmp_path / "head"),
        ]
    )
    shape, plain = RoundShape.of(args), Shape.of(str(folder))
    assert shape.drafter == head_shape(config)
    fused = shape.model.linear_weights - plain.linear_weights
    assert head.fc.affine.matrix is not None
    assert fused == head.fc.affine.matrix.numel()
    assert shape.drafter is not None
    assert fused + shape.drafter.linear_weights + shape.drafter.head_weights == num_weights


def test_a_smaller_model_is_read_with_its_own_shape() -> None:
    words = ["--model-path", models.folder_of("qwen3-8b"), "--speculative-algorithm", "STANDALONE"]
    args = parse_args([*words, "--speculative-draft-model-path", models.folder_of("qwen3-0.6b")])
    shape = RoundShape.of(args)
    assert shape.drafter == Shape.of(models.folder_of("qwen3-0.6b"))
    assert shape.num_drafts == args.num_drafts > 0


def test_rows_stand_behind_the_tokens_that_steps_kept(checkpoint: CheckpointFactory) -> None:
    runner = make_runner(checkpoint("qwen3"), 16, max_running_requests=3)
    options = SimpleNamespace(context=20, steps=2, rounds=1, kernels=False)
    found = measure(runner, [3, 1], options, 1, 1)
    assert [found[rows].context for rows in (3, 1)] == [20 + 4 + 1, 20 + 4 + 2 + 4 + 1]
    assert all(timed.ms > 0 for timed in found.values())


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line of a run on a CPU, which ends with the file of its result."""
    monkeypatch.setattr(limits, "measured", lambda: Device("a device", 1e9, 1e9))
    said = "speculation --model-path tiny --rows 1,2 --accept 1 --context 20 --steps 1 --rounds 1 --device cpu"
    said += " --max-total-tokens 512 --speculative-algorithm NGRAM --jsonl"
    monkeypatch.setattr("sys.argv", [*said.split(), str(tmp_path / "lines")])
    return sys.argv


def test_it_says_that_it_needs_a_gpu(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="there is none"):
        speculation.main()
    assert not Path(words[-1]).exists()


def test_each_figure_is_shown_beside_its_limit(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drafted = {rows: Timed(2.0, 30.0) for rows in (1, 2)}
    monkeypatch.setattr(speculation, "measure_drafts", lambda *given: drafted)
    assert speculation.main() == 0
    record = json.loads(Path(words[-1]).read_text())
    assert [figure["rows"] for figure in record["steps"]] == [2, 1]
    for figure in record["steps"]:
        assert figure["of_limit"] == pytest.approx(figure["gain"] / figure["limit_gain"])
        assert 0 < figure["limit_gain"] <= 2, "no more than the tokens that a step keeps"
    assert record["device"]["read_bytes_s"] == 1e9
    assert capsys.readouterr().out.count(" ratio ") == 2
