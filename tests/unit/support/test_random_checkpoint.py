"""Random checkpoints are what tests stand on: they must be real for `transformers`, and the same every time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.checkpoints import SMALL, CheckpointFactory
from tests.support.random_checkpoint import FAMILIES, CheckpointSpec, write_random_checkpoint


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_same_arguments_write_the_same_bytes(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "again", CheckpointSpec(family="qwen3", **SMALL))
    assert _contents(tmp_path / "again") == _contents(checkpoint("qwen3"))


def test_another_seed_writes_other_weights(checkpoint: CheckpointFactory) -> None:
    first, second = _contents(checkpoint("qwen3")), _contents(checkpoint("qwen3", seed=1))
    assert [name for name in first if first[name] != second[name]] == ["model.safetensors"]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_every_tensor_and_spreads_the_logits(
    checkpoint: CheckpointFactory, family: str, tied: bool
) -> None:
    folder = checkpoint(family, tied=tied)
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The capital of France is Paris, and the miller", return_tensors="pt").input_ids
    with torch.no_grad():
        best = model(ids).logits.topk(2, dim=-1).values
    assert (best[..., 0] - best[..., 1]).mean() > 0.3


def test_shards_hold_each_tensor_once_and_the_index_names_its_file(checkpoint: CheckpointFactory) -> None:
    from safetensors import safe_open

    folder = checkpoint("llama", tied=False, num_shards=3)
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found: list[tuple[str, str]] = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as tensors:
            found += [(name, path.name) for name in tensors.keys()]  # noqa: SIM118
    assert len({name for name, _ in found}) == len(found)
    assert dict(found) == weight_map


def test_the_chat_template_ends_messages_with_a_token_that_ends_answers(checkpoint: CheckpointFactory) -> None:
    for family in FAMILIES:
        folder = checkpoint(family)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
        last = tokenizer(text.rstrip(), add_special_tokens=False).input_ids[-1]
        assert last in json.loads((folder / "generation_config.json").read_text())["eos_token_id"]


def test_text_survives_the_tokenizer(checkpoint: CheckpointFactory) -> None:
    text = "Crème brûlée, 你好, and an emoji \N{GRINNING FACE} that the training text lacks."
    for family in FAMILIES:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint(family))
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 259 entries"):
        write_random_checkpoint(tmp_path / "broken", CheckpointSpec(vocab_size=10))
    with pytest.raises(ValueError, match="no head_dim of its own"):
        write_random_checkpoint(tmp_path / "broken", CheckpointSpec(family="qwen2", head_dim=48))
    assert list(tmp_path.iterdir()) == []
