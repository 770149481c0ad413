"""What a checkpoint says about pooling, and what follows for the server's options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from srt.managers.supervisor.preflight import with_model_defaults
from srt.server_args import ServerArgs
from srt.utils.model_config import ModelConfig, ModelError
from srt.utils.pooling_config import PoolingSpec, read_pooling

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}
TRANSFORMER = {"path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}
MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}


def write(folder: Path, changes: dict[str, Any], modules: Any = None, pooling: Any = MEAN) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    if modules is not None:
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def pooling_in(folder: Path, **more: Any) -> PoolingSpec | None:
    return ModelConfig.from_folder(folder, **more).pooling


def test_a_model_that_generates_pools_only_if_it_is_asked_to(tmp_path: Path) -> None:
    write(tmp_path, {})
    assert pooling_in(tmp_path) is None
    assert pooling_in(tmp_path, is_embedding=True) == PoolingSpec("last", normalize=True)
    assert with_model_defaults(ServerArgs(), tmp_path) == ServerArgs()
    assert with_model_defaults(ServerArgs(is_embedding=True), tmp_path) == ServerArgs(is_embedding=True)


def test_a_model_without_a_head_embeds(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(write(tmp_path, {"architectures": ["LlamaModel"]}))
    assert config.pooling == PoolingSpec("last", normalize=True)
    assert config.architecture == "LlamaModel"
    assert config.tie_word_embeddings


@pytest.mark.parametrize(
    ("modules", "pooling", "expected"),
    [
        ([TRANSFORMER, POOLING], MEAN, PoolingSpec("mean")),
        ([TRANSFORMER, POOLING, NORMALIZE], MEAN, PoolingSpec("mean", normalize=True)),
        ([TRANSFORMER, POOLING], {"pooling_mode_cls_token": True}, PoolingSpec("cls")),
        ([TRANSFORMER, POOLING], {"pooling_mode_lasttoken": True}, PoolingSpec("last")),
        ([TRANSFORMER, POOLING], {"pooling_mode": "lasttoken"}, PoolingSpec("last")),
    ],
)
def test_sentence_transformers_files_are_read(
    tmp_path: Path, modules: Any, pooling: Any, expected: PoolingSpec
) -> None:
    assert pooling_in(write(tmp_path, {}, modules, pooling)) == expected


@pytest.mark.parametrize(
    ("modules", "pooling", "reason"),
    [
        ([TRANSFORMER, POOLING, DENSE], MEAN, "the step 'Dense' is not supported"),
        ([TRANSFORMER], MEAN, "the steps Transformer are not supported"),
        ([TRANSFORMER, NORMALIZE, POOLING], MEAN, "the steps Transformer, Normalize, Pooling are not supported"),
        ([{**TRANSFORMER, "path": "0_Transformer"}, POOLING], MEAN, "must lie in the folder itself"),
        ([TRANSFORMER, {**POOLING, "path": "../x"}], MEAN, "leads out of the checkpoint"),
        ([TRANSFORMER, {**POOLING, "path": "x"}], MEAN, "cannot be read"),
        ("x", MEAN, "must hold a list of objects"),
        ([TRANSFORMER, POOLING], [], "must hold a JSON object"),
        ([TRANSFORMER, POOLING], {"pooling_mode_max_tokens": True}, "pooling pooling_mode_max_tokens is not supported"),
        ([TRANSFORMER, POOLING], {**MEAN, "pooling_mode_cls_token": True}, "is not supported, only one of"),
        ([TRANSFORMER, POOLING], {}, "is not supported, only one of"),
    ],
)
def test_other_steps_are_refused_by_name(tmp_path: Path, modules: Any, pooling: Any, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        pooling_in(write(tmp_path, {}, modules, pooling))


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        ({}, ("LABEL_0", "LABEL_1")),
        ({"id2label": {"0": "LABEL_0"}}, ("LABEL_0",)),
        ({"id2label": {"0": "bad", "1": "good", "2": "none"}}, ("bad", "good", "none")),
        ({"num_labels": 1}, ("LABEL_0",)),
    ],
)
def test_a_classifier_has_its_labels(tmp_path: Path, changes: dict[str, Any], labels: tuple[str, ...]) -> None:
    folder = write(tmp_path, {"architectures": ["LlamaForSequenceClassification"], **changes})
    assert pooling_in(folder) == PoolingSpec("last", labels=labels)


def test_tokens_that_see_those_behind_them_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is_causal false is not supported"):
        pooling_in(write(tmp_path, {"is_causal": False}, [TRANSFORMER, POOLING]))


@pytest.mark.parametrize("architecture", ["DebertaV2Model", "XLNetForSequenceClassification", "Qwen2ForRewardModel"])
def test_an_unknown_architecture_is_refused_by_its_own_name(tmp_path: Path, architecture: str) -> None:
    with pytest.raises(ModelError, match=f"The model architecture {architecture} is not supported"):
        pooling_in(write(tmp_path, {"architectures": [architecture]}))


def test_prefixes_are_cached_only_where_the_last_token_counts(tmp_path: Path) -> None:
    write(tmp_path, {}, [TRANSFORMER, POOLING])
    assert with_model_defaults(ServerArgs(), tmp_path) == ServerArgs(is_embedding=True, disable_radix_cache=True)
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    assert with_model_defaults(ServerArgs(), tmp_path) == ServerArgs(is_embedding=True)


def test_an_old_name_of_a_model_that_generates_is_not_that_of_a_bare_one(tmp_path: Path) -> None:
    assert read_pooling(tmp_path, "GPT2LMHeadModel", {}, is_asked_for=False) is None
    assert read_pooling(tmp_path, "GPT2Model", {}, is_asked_for=False) is not None
