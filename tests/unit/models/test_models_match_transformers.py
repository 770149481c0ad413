"""Every architecture against transformers, in float32, on random checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from srt.distributed.parallel_state import TensorParallel
from srt.model_loader.loader import LoadConfig, get_model_loader
from srt.utils.model_config import ModelConfig
from tests.support import random_checkpoint
from tests.support.checkpoints import CheckpointFactory
from tests.support.dense_attention import dense_batch
from tests.support.ranks import CPU, idle_rank, run_ranks, single_rank

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn-tuned": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 2048,
        "attention_factor": 0.8,
    },
}

FAMILIES = ("llama", "qwen2", "qwen3")


def test_families_match_with_every_rope_tied_and_untied(checkpoint: CheckpointFactory) -> None:
    for number, (rope, parameters) in enumerate(ROPES.items()):
        for family in FAMILIES:
            folder = checkpoint(family, tied=number % 2 == 0, seed=number, config={"rope_parameters": parameters})
            assert_same_logits(folder, f"{family} with {rope}")


@pytest.mark.parametrize("family", sorted(set(random_checkpoint.FAMILIES) - set(FAMILIES)))
def test_families_without_resident_layers_match_tied_and_untied(checkpoint: CheckpointFactory, family: str) -> None:
    """Four layers: among so many are all kinds. The tokens fill the windows twice."""
    for tied in (True, False):
        assert_same_logits(checkpoint(family, num_layers=4, tied=tied), f"{family}, tied: {tied}")


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3"])
def test_stacked_experts_are_those_that_are_stored_one_by_one(
    checkpoint: CheckpointFactory, tmp_path: Path, family: str
) -> None:
    """transformers 5 stacks them when it saves a model without converting it back."""
    from transformers import AutoModelForCausalLM

    single, stacked = checkpoint(family, num_layers=3, tied=False), tmp_path / family
    AutoModelForCausalLM.from_pretrained(single).save_pretrained(stacked, save_original_format=False)
    names = load_file(stacked / "model.safetensors")
    assert "model.layers.2.mlp.experts.gate_up_proj" in names
    assert not any(".experts.0." in name for name in names)
    for rank in range(2):
        assert_same_parameters(load(stacked, idle_rank(rank, 2)), load(single, idle_rank(rank, 2)))


def assert_same_parameters(ours: Any, others: Any) -> None:
    expected = dict(others.named_parameters())
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_biases_of_families_without_fast_paths_match(checkpoint: CheckpointFactory) -> None:
    biases: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}
    for family in ("smollm3", "granite"):
        assert_same_logits(checkpoint(family, config=biases), family)
    for family in ("olmo2", "cohere2", "gemma2"):
        assert_same_logits(checkpoint(family, config={"attention_bias": True}), family)
    assert_same_logits(checkpoint("glm4", config={"attention_bias": False}), "glm4")


def test_rotations_by_kind_of_layer_match_in_new_and_old_files(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 1024}
    plain = {"rope_type": "default", "rope_theta": 5e5}
    kinds = {"full_attention": yarn, "sliding_attention": plain}
    olmo = checkpoint("olmo3", num_layers=4, config={"rope_parameters": kinds})
    assert_same_logits(olmo, "olmo3")
    gemma = checkpoint("gemma3_text", num_layers=4)
    old: dict[str, dict[str, Any]] = {
        "olmo3": {"rope_theta": 5e5, "rope_scaling": {key: yarn[key] for key in yarn if key != "rope_theta"}},
        "gemma3": {
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    }
    for new, name in ((olmo, "olmo3"), (gemma, "gemma3")):
        folder = tmp_path / name
        shutil.copytree(new, folder)
        config = json.loads((folder / "config.json").read_text())
        del config["rope_parameters"]
        (folder / "config.json").write_text(json.dumps({**config, **old[name]}))
        assert ModelConfig.from_folder(folder) == ModelConfig.from_folder(new)
        assert_same_logits(folder, name)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_in_the_old_style_means_the_same(family: str, checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    for rope, parameters in ROPES.items():
        new = checkpoint(family, config={"rope_parameters": parameters})
        old = tmp_path / rope
        shutil.copytree(new, old)
        rewrite_in_old_style(old / "config.json")
        assert ModelConfig.from_folder(old) == ModelConfig.from_folder(new)
        assert_same_logits(old, f"{family} with {rope}")


@pytest.mark.parametrize(
    ("within", "beside", "theta"),
    [
        ({"rope_theta": 300.0}, {"rope_theta": 7e5}, 300.0),
        ({}, {"rope_theta": 7e5}, 7e5),
        ({}, {}, 10000.0),
    ],
)
def test_an_old_scaling_replaces_the_new_parameters_and_their_theta(
    within: dict[str, Any], beside: dict[str, Any], theta: float, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    folder = tmp_path / "both"
    shutil.copytree(checkpoint("llama", config={"rope_parameters": ROPES["default"]}), folder)
    edit_config(folder, rope_scaling={"rope_type": "linear", "factor": 2.0, **within}, **beside)
    rope = ModelConfig.from_folder(folder).layers[0].attention.rope
    assert rope is not None
    assert (rope.kind, rope.theta, rope.factor) == ("linear", theta, 2.0)
    assert_same_logits(folder, "llama with both")


def test_biases_that_the_config_asks_for_are_used(checkpoint: CheckpointFactory) -> None:
    assert_same_logits(checkpoint("llama", config={"attention_bias": True, "mlp_bias": True}), "llama")
    assert_same_logits(checkpoint("qwen3", config={"attention_bias": True}), "qwen3")


def test_mistral_without_a_window_matches(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    folder = tmp_path / "mistral"
    shutil.copytree(checkpoint("llama"), folder)
    edit_config(
        folder,
        architectures=["MistralForCausalLM"],
        model_type="mistral",
        sliding_window=None,
    )
    assert_same_logits(folder, "mistral")


def test_heads_that_do_not_fill_the_hidden_size_match(checkpoint: CheckpointFactory) -> None:
    assert_same_logits(checkpoint("llama", hidden_size=96, num_heads=6, num_kv_heads=3, head_dim=32), "llama")
    assert_same_logits(checkpoint("qwen3", hidden_size=96, num_heads=2, num_kv_heads=1, head_dim=64), "qwen3")


def test_two_ranks_give_the_logits_of_one(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    shapes: list[dict[str, Any]] = [
        {"vocab_size": 509, "tied": True},
        {"vocab_size": 509, "tied": False},
        {"num_kv_heads": 1},
        {"num_kv_heads": 4, "num_shards": 3},
    ]
    for family in FAMILIES:
        for shape in shapes:
            folder = checkpoint(family, **shape)
            torch.testing.assert_close(
                tensor_parallel_logits(folder, 2, tmp_path), logits_of(folder, single_rank()), rtol=1e-4, atol=1e-4
            )


def test_four_ranks_share_two_kv_heads_and_an_odd_vocabulary(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    biases = {"attention_bias": True, "mlp_bias": True}
    for folder in (checkpoint("llama", vocab_size=511, config=biases), checkpoint("qwen2", vocab_size=511)):
        torch.testing.assert_close(
            tensor_parallel_logits(folder, 4, tmp_path), logits_of(folder, single_rank()), rtol=1e-4, atol=1e-4
        )


def test_every_rank_has_the_same_hidden_states_to_the_bit(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    first, second = run_ranks(2, tmp_path, lambda tp: hidden_states(qwen3_checkpoint, tp)[1])
    assert torch.equal(first, second)


def test_no_tokens_give_no_hidden_states(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    def idle(tp: TensorParallel) -> torch.Size:
        model = load(qwen3_checkpoint, tp)
        nothing = torch.empty(0, dtype=torch.int64)
        hidden = model(nothing, nothing, dense_batch())
        assert model.lm_head.logits(hidden).shape == (0, model.lm_head.shard_size)
        return torch.Size(hidden.shape)

    assert run_ranks(2, tmp_path, idle) == [(0, 64), (0, 64)]
    with torch.inference_mode():
        assert idle(single_rank()) == (0, 64)


def test_low_precision_stays_in_its_type_and_near_float32(qwen3_checkpoint: Path) -> None:
    with torch.inference_mode():
        model = load(qwen3_checkpoint, single_rank(), torch.bfloat16)
        ids, positions = tokens(model.lm_head.vocab_size)
        hidden = model(ids, positions, dense_batch())
    assert hidden.dtype == torch.bfloat16
    exact = hidden_states(qwen3_checkpoint, single_rank())[1]
    assert torch.nn.functional.cosine_similarity(hidden.float(), exact, dim=-1).min() > 0.99


def assert_same_logits(folder: Path, what: str) -> None:
    ours, reference = logits_of(folder, single_rank()), transformers_logits(folder)
    error = (ours - reference).abs().max().item()
    assert error < 1e-4, f"{what}: logits differ by {error}"
    assert torch.equal(ours.argmax(-1), reference.argmax(-1)), f"{what}: greedy tokens differ"


def tokens(vocab_size: int) -> tuple[Tensor, Tensor]:
    """Ids, and positions far from the start: that is where angles differ if they do."""
    ids = torch.randint(vocab_size, (48,), generator=torch.Generator().manual_seed(1))
    return ids, torch.arange(3000, 3048)


def load(folder: Path, tp: TensorParallel, dtype: torch.dtype = torch.float32) -> Any:
    config = ModelConfig.from_folder(folder)
    return get_model_loader(LoadConfig()).load_model(config, folder, tp, dtype, CPU, lambda done, total: None)


def hidden_states(folder: Path, tp: TensorParallel) -> tuple[Any, Tensor]:
    with torch.inference_mode():
        model = load(folder, tp)
        ids, positions = tokens(model.lm_head.vocab_size)
        return model, model(ids, positions, dense_batch())


def logits_of(folder: Path, tp: TensorParallel) -> Tensor:
    """This rank's logits, without the padding."""
    model, hidden = hidden_states(folder, tp)
    with torch.inference_mode():
        logits: Tensor = model.lm_head.logits(hidden)
    assert logits.dtype == torch.float32
    assert logits.shape[1] == model.lm_head.shard_size
    assert torch.isfinite(logits).all()
    return logits[:, : model.lm_head.shard_size_valid]


def tensor_parallel_logits(folder: Path, size: int, rendezvous: Path) -> Tensor:
    return torch.cat(run_ranks(size, rendezvous, lambda tp: logits_of(folder, tp)), dim=-1)


def transformers_logits(folder: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids, positions = tokens(model.config.vocab_size)
    with torch.inference_mode():
        logits: Tensor = model(ids[None], position_ids=positions[None]).logits
    return logits[0]


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rewrite_in_old_style(path: Path) -> None:
    """As transformers 4 would have written it."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))
