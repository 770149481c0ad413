"""The comparison of two servers: one model with itself, and with itself in fp8."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks import accuracy
from tests.e2e.conftest import Server
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.e2e


def test_a_model_agrees_with_itself_and_less_with_itself_in_fp8(
    tiny_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = accuracy.TEXTS[:4]
    same = accuracy.measure(tiny_server.url, tiny_server.url, texts)
    assert same.positions > 60
    assert same.agreement == 1.0
    assert abs(same.divergence) < 1e-6
    assert same.reference_perplexity == same.candidate_perplexity
    words = [
        "--model-path",
        "tiny",
        "--quantization",
        "fp8",
        "--port",
        "0",
        "--device",
        "cpu",
        "--max-total-tokens",
        "4096",
    ]
    with ServerProcess("srt.launch_server", words, tmp_path) as quantised:
        url = quantised.wait_ready()
        fp8 = accuracy.measure(tiny_server.url, url, texts)
        file = tmp_path / "texts"
        file.write_text("\n\n".join(texts))
        assert accuracy.main(["--reference", tiny_server.url, "--candidate", url, "--texts", str(file)]) == 0
    assert 0.8 < fp8.agreement <= 1.0
    assert 1e-6 < fp8.divergence < 0.05
    assert fp8.candidate_perplexity == pytest.approx(fp8.reference_perplexity, rel=0.05)
    assert f"{fp8.positions} positions of 4 texts" in capsys.readouterr().out


def test_the_divergence_is_that_of_the_distributions() -> None:
    """Over three tokens of which both list all, and over two of them and the rest."""
    p, q = {0: 0.5, 1: 0.3, 2: 0.2}, {0: 0.25, 1: 0.25, 2: 0.5}
    logs = [{token: math.log(value) for token, value in one.items()} for one in (p, q)]
    exact = sum(p[token] * math.log(p[token] / q[token]) for token in p)
    assert accuracy.divergence_of(*logs) == pytest.approx(exact, abs=1e-6)
    assert accuracy.divergence_of(logs[0], {token: logs[1][token] for token in (0, 1)}) == pytest.approx(exact)
