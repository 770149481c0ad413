"""The recipe of tiny-moe: what it trains is what `transformers` computes from the checkpoint that it writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes.tiny import moe


@torch.no_grad()
def test_a_checkpoint_computes_what_was_trained(tmp_path: Path) -> None:
    model = moe.MixtureModel(moe.SHAPE)
    model.draw_weights(1)
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16().float())
    moe.save(model, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, 2048, (2, 40), generator=torch.Generator().manual_seed(2))
    logits, balance = model.logits_and_balance(ids)
    torch.testing.assert_close(logits, reference(ids).logits, atol=1e-4, rtol=1e-4)
    assert 0.9 < float(balance) < moe.SHAPE.num_experts / moe.SHAPE.top_k
    downs = model.mixtures[0].down_proj.weight
    downs.copy_(downs.roll(moe.SHAPE.intermediate_size, 1))
    shifted = model.logits_and_balance(ids)[0]
    assert float((shifted - logits).abs().max()) > 1e-2, "each expert with the downs of the one before"


def test_a_checkpoint_is_small() -> None:
    size = sum(2 * tensor.numel() for tensor in moe.MixtureModel(moe.SHAPE).tensors().values())
    assert 10_000_000 < size < 12_000_000


def test_a_short_run_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--steps 3 --long-steps 1 --rows 16 --row-tokens 64 --warmup-steps 1 --workers 0 --device cpu --no-compile"
    )
    moe.main([*options.split(), "--out", str(tmp_path / "moe"), "--results", str(tmp_path)])
    losses = [float(line.split()[2]) for line in capsys.readouterr().err.splitlines() if "loss" in line]
    assert len(losses) == 3 and losses[0] > losses[-1]
    assert (tmp_path / "moe.json").is_file() and (tmp_path / "moe/tokenizer.json").is_file()
