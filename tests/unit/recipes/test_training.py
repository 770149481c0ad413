"""The model in plain PyTorch, and the recipe from end to end at few steps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.tiny import train as recipe
from recipes.tiny.evaluate import count_agreed, draw_cases, score
from recipes.tiny.model import TINY, TINY_DRAFT, Model, Shape, generate_greedily, load_checkpoint, save_checkpoint
from recipes.tiny.plot import loss_svg
from recipes.tiny.tokenizer import load_tokenizer
from srt.utils.checkpoint import SHIPPED_MODELS

CPU = torch.device("cpu")
SMALL = Shape(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48, head_dim=16)


def small_model() -> Model:
    model = Model(SMALL)
    model.draw_weights(0)
    return model.eval()


def test_transformers_loads_what_the_recipe_saves_and_computes_the_same(tmp_path: Path) -> None:
    save_checkpoint(small_model(), tmp_path, bos_id=0, end_id=2)
    loaded = load_checkpoint(tmp_path).eval()
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(0, SMALL.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.allclose(loaded(ids), reference(ids).logits, atol=1e-4)
    assert reference.generation_config.eos_token_id == [2, 0]


def test_greedy_answers_do_not_depend_on_what_else_is_asked() -> None:
    model = small_model()
    prompts = [[5, 6, 7], [9] * 20, [11, 12]]
    together = generate_greedily(model, prompts, most_tokens=6, stop_ids={2})
    assert together == [generate_greedily(model, [prompt], most_tokens=6, stop_ids={2})[0] for prompt in prompts]
    assert generate_greedily(model, prompts[:1], most_tokens=6, stop_ids={together[0][0]}) == [[]]


def test_a_model_agrees_with_itself_in_every_token() -> None:
    model = small_model()
    prompts = [[5, 6, 7], [9] * 20]
    answers = generate_greedily(model, prompts, most_tokens=6, stop_ids=set())
    assert count_agreed(model, prompts, answers) == [6, 6]
    wrong = [[(token + 1) % SMALL.vocab_size for token in answer] for answer in answers]
    assert count_agreed(model, prompts, wrong)[0] < 6


def test_an_answer_counts_only_when_it_is_exact() -> None:
    tokenizer = load_tokenizer(SHIPPED_MODELS / "tiny")
    cases = draw_cases("add", 4)
    wanted = [tokenizer.encode(case.exchange.answer).ids for case in cases]
    wanted[3] = wanted[3][:-1]
    judged = score(cases, tokenizer, lambda prompts: wanted, draft=None)
    assert (judged.right, judged.cases) == (3, 4)
    assert judged.wrong is not None and judged.wrong[0][2] == cases[3].exchange.answer


def test_the_models_have_the_sizes_that_they_are_shipped_for() -> None:
    assert 6e6 < Model(TINY).num_parameters < 8e6
    assert Model(TINY_DRAFT).num_parameters < 1e6
    assert TINY.head_dim == 64 and TINY.num_kv_heads >= 4


def test_the_learning_rate_rises_and_falls() -> None:
    settings = recipe.Settings(steps=100, long_steps=10, warmup_steps=10)
    rates = [settings.rate_at(step) for step in range(100)]
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert max(rates) == 1 and min(rates[10:]) < 0.02
    assert settings.shape_of(89) == (128, 1024) and settings.shape_of(90) == (64, 2048)


@pytest.mark.full
def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    shutil.copy(SHIPPED_MODELS / "tiny" / "tokenizer.json", tmp_path)
    settings = recipe.Settings(steps=4, long_steps=1, rows=2, row_tokens=512, warmup_steps=2)

    def run() -> recipe.Trainer:
        return recipe.train(settings, tmp_path, CPU, workers=0, compiled=False, save_every=2)

    whole = run()  # and leaves the state of step 2
    resumed = run()
    assert resumed.step == whole.step == 4
    assert [step for step, _ in resumed.history.tiny] == [1, 2, 3, 4]
    for one, other in ((whole.tiny, resumed.tiny), (whole.draft, resumed.draft)):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    with pytest.raises(ValueError, match="other settings"):
        recipe.train(recipe.Settings(steps=5), tmp_path, CPU, workers=0, compiled=False, save_every=2)


@pytest.mark.full
def test_the_recipe_runs_from_text_to_checkpoints_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = ["--out", str(tmp_path / "out"), "--results", str(tmp_path / "results"), "--work", str(tmp_path / "work")]
    sizes = ["--steps", "3", "--long-steps", "1", "--warmup-steps", "1", "--rows", "2", "--row-tokens", "512"]
    recipe.main([*folders, *sizes, "--workers", "0", "--device", "cpu", "--no-compile"])

    assert "3/3" in capsys.readouterr().err
    for name in ("tiny", "tiny-draft"):
        folder = tmp_path / "out" / name
        assert AutoModelForCausalLM.from_pretrained(folder).config.model_type == "qwen3"
        for file in ("tokenizer.json", "tokenizer_config.json"):  # which do not depend on the steps
            assert (folder / file).read_bytes() == (SHIPPED_MODELS / name / file).read_bytes()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
        )
        assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    report = json.loads((tmp_path / "results" / "training.json").read_text("utf-8"))
    assert report["settings"]["steps"] == 3
    assert len(report["loss"]["tiny"]) == 3
    assert (tmp_path / "results" / "loss.svg").read_text("utf-8").startswith("<svg")
    assert not (tmp_path / "work" / "state.pt").exists()


def test_a_plot_shows_every_curve() -> None:
    svg = loss_svg({"a": [(1, 5.0), (10, 0.02)], "b": [(1, 4.0), (10, 0.0)]}, "Loss")
    assert svg.count("<polyline") == 2 and svg.rstrip().endswith("</svg>")
