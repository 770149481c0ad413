"""The recipe of the head of tiny: it trains on the chains that are drafted when it serves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from recipes.tiny import eagle3
from recipes.tiny.model import load_checkpoint
from srt.utils.eagle3_config import Eagle3Config
from tests.support.eagle3_heads import ReferenceHead


@torch.no_grad()
def test_chains_are_those_of_serving(tmp_path: Path) -> None:
    tiny, known = load_checkpoint(eagle3.MODELS / "tiny"), torch.arange(3, 1027)
    head = eagle3.Head(tiny, known, seed=1)
    eagle3.save_head(head, known, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    head.load_state_dict({name: saved[name].float() for name in head.state_dict()})
    ids = torch.randint(0, 2048, (1, 24), generator=torch.Generator().manual_seed(2))
    features, _ = eagle3.tapped(tiny, ids)
    chain = head.chain(tiny.embed_tokens(ids)[:, 1:-1], features[:, :-2], 3)
    reference, place = ReferenceHead(eagle3.MODELS / "tiny", tmp_path, list(eagle3.TAPS)), 15
    for num_own, logits in enumerate(chain):
        expected = reference.follow(ids[0, : place + 2].tolist(), num_own)
        assert torch.allclose(logits[0, place], expected, atol=1e-3), num_own
    assert Eagle3Config.from_folder(tmp_path).taps(8) == eagle3.TAPS


def test_a_short_run_learns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle3, "COUNTED_TOKENS", 1 << 12)
    options = "--steps 3 --rows 16 --row-tokens 64 --warmup-steps 1 --chain 2 --workers 0 --device cpu".split()
    eagle3.main([*options, "--out", str(tmp_path / "head"), "--results", str(tmp_path)])
    losses = [line for line in capsys.readouterr().err.splitlines() if "loss" in line]
    assert float(losses[0].split()[-1]) > float(losses[-1].split()[-1])
    assert (tmp_path / "eagle3.json").is_file()
