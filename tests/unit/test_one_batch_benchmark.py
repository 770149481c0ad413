"""The shapes that the benchmark of batches is asked for."""

from __future__ import annotations

import sys

import pytest

from benchmarks import one_batch


def test_shapes_are_written_with_either_sign() -> None:
    assert one_batch.shapes("1x128x512,64×1024×256") == [(1, 128, 512), (64, 1024, 256)]


@pytest.mark.parametrize("batch", ["", "3", "2x8", "1xax4", "0x8x4", "1x8x1", "1x8x4,"])
def test_others_are_refused_before_a_model_is_loaded(
    batch: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["one_batch", "--model-path", "no-such-model", "--batch", batch])
    with pytest.raises(SystemExit):
        one_batch.main()
    assert "argument --batch" in capsys.readouterr().err
