"""SGLang's `bench_serving`, from its wheel."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LAUNCHER = Path(__file__).parent.parent / "bench_serving.py"
NUM_REQUESTS, NUM_IN, NUM_OUT = 8, 32, 16


class Bench:
    """Runs the benchmark of 8 requests of 32 tokens in and 16 out."""

    def __init__(self, url: str, folder: Path, tmp: Path) -> None:
        self._url, self._folder, self._tmp = url, folder, tmp

    def __call__(self, backend: str, *words: str) -> dict[str, Any]:
        results = self._tmp / "results.jsonl"
        fixed = ["--backend", backend, "--base-url", self._url, "--model", "tiny", "--tokenizer", str(self._folder)]
        fixed += ["--dataset-name", "random-ids", "--random-range-ratio", "1", "--num-prompts", str(NUM_REQUESTS)]
        fixed += ["--random-input-len", str(NUM_IN), "--random-output-len", str(NUM_OUT), "--disable-tqdm"]
        command = [sys.executable, str(LAUNCHER), *fixed, "--output-file", str(results), "--output-details", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        self.output = done.stdout
        result: dict[str, Any] = json.loads(results.read_text("utf-8").splitlines()[-1])
        return result


@pytest.fixture
def bench(url: str, folder: Path, tmp_path: Path) -> Bench:
    return Bench(url, folder, tmp_path)


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat", "vllm", "vllm-chat"])
def test_bench_serving_counts_all_tokens(bench: Bench, backend: str) -> None:
    result = bench(backend)
    assert result["completed"] == NUM_REQUESTS
    assert result["output_lens"] == [NUM_OUT] * NUM_REQUESTS
    assert result["errors"] == [""] * NUM_REQUESTS
    assert all(0 < ttft < 60 for ttft in result["ttfts"])


def test_bench_serving_sends_token_ids_asks_for_logprobs_and_flushes(bench: Bench) -> None:
    result = bench("sglang", "--tokenize-prompt", "--return-logprob", "--top-logprobs-num", "2", "--flush-cache")
    assert result["completed"] == NUM_REQUESTS


def test_bench_serving_takes_whole_answers(bench: Bench) -> None:
    assert bench("sglang", "--disable-stream")["completed"] == NUM_REQUESTS


def test_bench_serving_reports_the_cache(bench: Bench) -> None:
    bench("sglang-oai-chat", "--cache-report")
    assert "cache" in bench.output.lower()


def test_bench_serving_records_a_profile(bench: Bench, tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    assert bench("sglang", "--profile", "--profile-output-dir", str(traces))["completed"] == NUM_REQUESTS
    assert "Profiler started" in bench.output
    (trace,) = [path for path in traces.rglob("*") if path.is_file()]
    text = gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes()
    assert json.loads(text)["traceEvents"]
