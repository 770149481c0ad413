"""Checkpoints with latent attention: quantised, with layers for speculation, with an option that latents do not support."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from srt.model_loader.loader import LoadConfig, get_model_loader
from srt.utils.errors import StartError
from srt.utils.model_config import ModelConfig, ModelError
from tests.support.checkpoints import CheckpointFactory
from tests.support.dense_attention import dense_batch
from tests.support.plan_driver import token_ids
from tests.support.quantised_checkpoint import WEIGHT_ONLY, write_quantised
from tests.support.ranks import CPU, single_rank
from tests.support.runners import make_runner
from tests.support.whole_engine import WholeEngine

DENSE = {"first_k_dense_replace": 2}


@torch.inference_mode()
def logits_of(folder: Path) -> Tensor:
    config = ModelConfig.from_folder(folder)
    loader = get_model_loader(LoadConfig())
    model: Any = loader.load_model(config, folder, single_rank(), torch.float32, CPU, lambda done, total: None)
    ids = torch.randint(model.lm_head.vocab_size, (24,), generator=torch.Generator().manual_seed(1))
    logits: Tensor = model.lm_head.logits(model(ids, torch.arange(24), dense_batch()))
    return logits


@pytest.mark.parametrize("name", ["fp8 weights", "gptq ordered with zeros"])
def test_the_quantised_matrix_of_keys_and_values_is_unpacked(
    name: str, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    folder = checkpoint("deepseek_v3", config={**DENSE, "kv_lora_rank": 64, "q_lora_rank": 64, "v_head_dim": 32})
    stored, meant = write_quantised(folder, tmp_path, WEIGHT_ONLY[name])
    torch.testing.assert_close(logits_of(stored), logits_of(meant), rtol=1e-4, atol=1e-4)


def test_layers_for_the_prediction_of_several_tokens_are_left_out(
    checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    plain = checkpoint("deepseek_v3", config=DENSE)
    folder = tmp_path / "with-mtp"
    shutil.copytree(plain, folder)
    tensors = load_file(folder / "model.safetensors")
    extra = {"eh_proj.weight": torch.ones(64, 128), "self_attn.kv_b_proj.weight": torch.ones(176, 48)}
    tensors |= {f"model.layers.2.{name}": tensor for name, tensor in extra.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits_of(folder), logits_of(plain))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(ModelError, match=r"does not use: model\.layers\.2\.eh_proj\.weight"):
        logits_of(folder)


def test_latents_are_not_stored_in_eight_bits(checkpoint: CheckpointFactory) -> None:
    with pytest.raises(StartError, match="fp8_e4m3 is not supported for latents"):
        make_runner(checkpoint("deepseek_v3", config=DENSE), 16, kv_cache_dtype="fp8_e4m3")


@pytest.mark.parametrize("algorithm", ["NGRAM", "STANDALONE"])
def test_drafts_change_no_token(algorithm: str, checkpoint: CheckpointFactory) -> None:
    """Also those of a smaller model that has latents itself."""
    folder = checkpoint("deepseek_v3", num_layers=3, tied=False)
    rng = np.random.default_rng(4)
    prompts = [token_ids(rng, 11, 512) * 2, token_ids(rng, 7, 512)]
    draft = {"speculative_draft_model_path": str(checkpoint("deepseek_v3", config=DENSE))}
    options = draft if algorithm == "STANDALONE" else {}

    def outputs_with(**options: Any) -> list[list[int]]:
        runner = make_runner(folder, 4, chunked_prefill_size=9, **options)
        return WholeEngine(runner.loaded.args, runner).run(prompts, 12)

    drafted = outputs_with(speculative_algorithm=algorithm, speculative_num_draft_tokens=4, **options)
    assert drafted == outputs_with()
