"""config.json of heads that draft from hidden states, in both formats, and heads that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from srt.utils.eagle3_config import Eagle3Config, served_head
from srt.utils.model_config import ModelConfig
from srt.utils.model_error import ModelError
from tests.support.checkpoints import CheckpointFactory
from tests.support.eagle3_heads import make_head


def changed(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


@pytest.mark.parametrize("is_speculators", [False, True])
def test_both_formats_say_the_same(checkpoint: CheckpointFactory, tmp_path: Path, is_speculators: bool) -> None:
    target = checkpoint("qwen3", num_layers=4)
    folder = make_head(
        target,
        tmp_path / "head",
        is_speculators=is_speculators,
        draft_vocab=300,
        taps=[1, 2, 3],
        norm_before_residual=True,
    )
    config = served_head(folder, ModelConfig.from_folder(target, context_length=100))
    assert config.taps(4) == (1, 2, 3)
    assert (config.layer.vocab_size, config.target_vocab_size, config.target_hidden_size) == (300, 512, 64)
    assert config.layer.context_length == 100
    assert (config.norm_before_residual, config.norm_before_fc, config.norm_output) == (True, False, False)
    assert config.layer.layers[0].self_attention.num_heads == 2


def test_a_head_that_names_no_layers_reads_the_usual_ones(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    folder = changed(make_head(checkpoint("qwen3"), tmp_path / "head"), eagle_config=None)
    assert Eagle3Config.from_folder(folder).taps(32) == (2, 16, 29)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "is no EAGLE-3 head"),
        ({"num_hidden_layers": 2}, "of 2 layers is not supported"),
        ({"fc_norm": True}, "fc_norm is not supported"),
        ({"target_hidden_size": 128}, "reads hidden states of 128 values, and the model's have 64"),
        ({"vocab_size": 1024, "draft_vocab_size": 512}, "a vocabulary of 1024 tokens, and the model's has 512"),
        ({"draft_vocab_size": 99999}, "draft_vocab_size 99999 is larger than vocab_size, 512"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 5]}}, "which a model of 2 layers lacks"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "all"}}, "must list layers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "reads no hidden states of three layers"),
        ({"quantization_config": {"quant_method": "fp8"}}, "unquantised weights"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    checkpoint: CheckpointFactory, tmp_path: Path, values: dict[str, Any], words: str
) -> None:
    target = checkpoint("qwen3")
    folder = changed(make_head(target, tmp_path / "head"), **values)
    with pytest.raises(ModelError, match=words):
        served_head(folder, ModelConfig.from_folder(target))
