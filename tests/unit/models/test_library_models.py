"""Models that the library transformers runs over our attention: their tokens, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from srt.distributed.parallel_state import TensorParallel
from srt.layers.ops import TORCH_OPS, LayerOps, Norm
from srt.models.library import library_model
from srt.models.library.kernels import use_ops
from srt.models.library.library_model import LibraryCausalLM
from srt.utils.model_config import ModelConfig
from srt.utils.model_error import ModelError
from tests.support.library_models import SERVED, USUAL, write_library_checkpoint
from tests.support.oracle import Oracle
from tests.support.plan_driver import Job, PlanDriver, greedy
from tests.support.ranks import run_ranks, single_rank
from tests.support.runners import make_runner
from tests.unit.model_executor.test_model_runner_matches_transformers import prompts_with_shared_prefixes

QUICK = ("gpt2", "starcoder2", "qwen2_moe")
"""Learned positions and transposed products; windows; experts."""


def check_tokens(folder: Path, model_type: str) -> None:
    """In steps of chunks, decodes and both, behind shared prefixes, with windows that are shorter than the prompts."""
    write_library_checkpoint(folder, model_type)
    oracle = Oracle(folder)
    expected = [(p, oracle.expect(p, greedy(8))) for p in prompts_with_shared_prefixes(1, 9)]
    safe = [(p, e) for p, e in expected if e.is_safe]
    assert len(safe) > 6
    assert len({e.ids for _, e in safe}) > 3
    driver = PlanDriver(make_runner(folder, 4, model_impl="transformers"), 4, chunk=13, share=True)
    jobs = [Job(prompt, greedy(8)) for prompt, _ in safe]
    driver.run(jobs[: len(jobs) // 2])
    driver.run(jobs[len(jobs) // 2 :])
    assert [job.outputs for job in jobs] == [list(e.ids) for _, e in safe]
    assert max(job.cached for job in jobs) >= 30
    assert any(extends and decodes for extends, decodes in driver.steps), "no mixed step"


@pytest.mark.parametrize("model_type", QUICK)
def test_the_librarys_models_give_its_own_tokens(tmp_path: Path, model_type: str) -> None:
    check_tokens(tmp_path / model_type, model_type)


class CountedOps(LayerOps):
    def __init__(self) -> None:
        self.norms: list[bool] = []
        self.num_products = 0

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        self.norms.append(norm.is_plus_one)
        return super().norm(x, norm)

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        assert x.dim() == 2
        self.num_products += 1
        return super().project(x, weight)


@pytest.mark.parametrize(
    ("model_type", "num_norms", "is_plus_one", "num_products"),
    [
        ("llama", 7, False, 21),
        ("gemma2", 13, True, 21),
        ("qwen3", 13, False, 21),
        ("stablelm", 0, False, 21),
        ("gpt2", 0, False, 0),
    ],
)
def test_what_our_operations_compute_as_well_is_left_to_them(
    tmp_path: Path, model_type: str, num_norms: int, is_plus_one: bool, num_products: int
) -> None:
    """LayerNorms, products with a bias and transposed ones stay the library's."""
    write_library_checkpoint(tmp_path, model_type)
    prompts = prompts_with_shared_prefixes(1, 4)
    runner, ops, outputs = make_runner(tmp_path, 4, model_impl="transformers"), CountedOps(), []
    model = runner.loaded.model
    assert isinstance(model, LibraryCausalLM)
    for uses_ours in (False, True):
        if uses_ours:
            use_ops(model, ops)
        jobs = [Job(prompt, greedy(8)) for prompt in prompts]
        driver = PlanDriver(runner, 4, chunk=13)
        driver.run(jobs)
        outputs.append([job.outputs for job in jobs])
    assert outputs[0] == outputs[1]
    assert len(ops.norms) == num_norms * len(driver.steps)
    assert set(ops.norms) <= {is_plus_one}
    of_heads = ops.num_products - num_products * len(driver.steps)
    assert 0 < of_heads <= len(driver.steps)


@pytest.mark.full
@pytest.mark.parametrize("model_type", sorted(set(SERVED) - set(QUICK)))
def test_all_other_models_of_the_table_give_the_librarys_tokens(tmp_path: Path, model_type: str) -> None:
    check_tokens(tmp_path / model_type, model_type)


@pytest.mark.parametrize("model_type", ["starcoder2", "qwen3_moe", "glm"])
def test_two_ranks_give_the_tokens_of_one(tmp_path: Path, model_type: str) -> None:
    """Biases, experts, and products whose inputs are gathered; with a vocabulary that the ranks share unevenly."""
    folder = tmp_path / "model"
    write_library_checkpoint(folder, model_type, {"vocab_size": 515})
    check_ranks(folder, tmp_path)


def check_ranks(folder: Path, tmp_path: Path) -> None:
    prompts = prompts_with_shared_prefixes(6, 5, 515)

    def work(tp: TensorParallel) -> list[list[int]]:
        jobs = [Job(p, greedy(6)) for p in prompts]
        PlanDriver(make_runner(folder, 16, tp, model_impl="transformers"), 16, chunk=50).run(jobs)
        return [job.outputs for job in jobs]

    alone = work(single_rank())
    assert len({token for ids in alone for token in ids}) > 5
    assert run_ranks(2, tmp_path, work) == [alone, alone]


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gpt2", "no plan for splitting it over ranks"),
        ("olmo2", r"attend with 4 heads, not 2 \(use --tp 1\)"),
        ("ctrl", "no plan for splitting it over ranks"),
    ],
)
def test_models_that_cannot_be_split_are_refused(tmp_path: Path, model_type: str, reason: str) -> None:
    folder = tmp_path / "model"
    write_library_checkpoint(folder, model_type)
    with pytest.raises(ModelError, match=reason):
        run_ranks(2, tmp_path, lambda tp: make_runner(folder, 16, tp, model_impl="transformers"))


def build(folder: Path, model_type: str, device: str = "cpu", **fields: Any) -> LibraryCausalLM:
    """Build a model on the meta device, from a configuration without weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**USUAL, **fields})
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)
    read = ModelConfig.from_folder(folder, model_impl="transformers")
    return LibraryCausalLM.build(read, folder, {}, single_rank(), torch.float32, torch.device(device))


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("deepseek_v3", {}, "heads have 192 elements of queries and 128 of values"),
        ("diffllama", {}, "several of its layers share one attention module"),
        ("falcon", {"num_kv_heads": 2}, "cannot be built with attention from outside"),
        ("gpt_oss", {"num_local_experts": 4}, "its attention needs s_aux"),
        ("llama4_text", {}, "neither all earlier ones nor a window"),
        ("mamba", {}, "keeps a state instead of keys and values"),
        ("mpt", {"d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 256}, "computes with the mask by itself"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
    ],
)
def test_what_our_attention_cannot_do_is_refused_by_name(
    tmp_path: Path, model_type: str, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        build(tmp_path, model_type, **fields)


def test_experts_on_a_gpu_are_refused_in_other_types_than_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_model, "layer_ops", lambda device: TORCH_OPS)  # a GPU's cannot be built here
    with pytest.raises(ModelError, match="choose --dtype bfloat16"):
        build(tmp_path, "qwen2_moe", "cuda", **SERVED["qwen2_moe"])
    build(tmp_path, "qwen2", "cuda")


def test_layers_are_described_as_the_library_computes_them(tmp_path: Path) -> None:
    model = build(tmp_path, "exaone4", sliding_window=24, sliding_window_pattern=3, num_hidden_layers=4)
    attentions = [layer.attention for layer in model.config.layers]
    assert [one.window for one in attentions] == [24, 24, None, 24]
    assert {(one.num_heads, one.num_kv_heads, one.head_dim, one.scale) for one in attentions} == {(4, 2, 16, 0.25)}


def test_a_model_that_mixes_tokens_outside_its_attention_is_refused(tmp_path: Path) -> None:
    write_library_checkpoint(tmp_path, "llama")
    model = make_runner(tmp_path, 16, model_impl="transformers").loaded.model
    assert isinstance(model, LibraryCausalLM)
    model.check()
    layer = model.base.layers[1].mlp
    plain = layer.forward
    layer.forward = lambda x: plain(x).roll(1, dims=1)
    with pytest.raises(ModelError, match="from token to token outside their attention"):
        model.check()


def test_what_the_library_keeps_in_float32_stays_so(tmp_path: Path) -> None:
    write_library_checkpoint(tmp_path, "glm4_moe")
    model = make_runner(tmp_path, 16, model_impl="transformers", dtype="bfloat16").loaded.model
    types = {name: weight.dtype for name, weight in model.named_parameters()}
    routers = [name for name in types if ".mlp.gate." in name]
    assert {name.rpartition(".")[2] for name in routers} == {"weight", "e_score_correction_bias"}
    assert {types.pop(name) for name in routers} == {torch.float32}
    assert set(types.values()) == {torch.bfloat16}


@pytest.mark.parametrize("model_type", ["apertus", "qwen2_moe"])
def test_pieces_count_the_elements_that_they_fill(tmp_path: Path, model_type: str) -> None:
    """Numbers without dimensions, and matrices of a stack among them."""
    pieces = build(tmp_path / model_type, model_type).weight_pieces(None)
    assert any(not piece.parameter.ndim or piece.index is not None for piece in pieces)
    for piece in pieces:
        assert piece.num_elements == piece.target().numel(), piece.name


def test_a_head_that_differs_from_its_tied_embedding_is_refused(tmp_path: Path) -> None:
    write_library_checkpoint(tmp_path, "helium")
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    with pytest.raises(ModelError, match=r"has lm_head\.weight and model\.embed_tokens\.weight, which differ"):
        make_runner(tmp_path, 16, model_impl="transformers")


def test_unknown_keys_and_architectures_are_refused(tmp_path: Path) -> None:
    write_library_checkpoint(tmp_path, "helium")
    with pytest.raises(ModelError, match="--json-model-override-args: no_such_key has no effect"):
        make_runner(tmp_path, 16, json_model_override_args='{"no_such_key": 1}')
    with pytest.raises(ModelError, match="HeliumForCausalLM is not supported; supported are Llama"):
        make_runner(tmp_path, 16, model_impl="srt")
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace("HeliumForCausalLM", "NobodysForCausalLM"))
    with pytest.raises(ModelError, match=r"nor transformers .* has the architecture NobodysForCausalLM"):
        make_runner(tmp_path, 16)
