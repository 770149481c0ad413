"""GuideLLM's benchmark, on both of the routes that it measures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

NUM_REQUESTS, NUM_IN, NUM_OUT = 6, 32, 16


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm_measures_every_request(url: str, folder: Path, tmp_path: Path, route: str) -> None:
    words = [sys.executable, "-m", "guidellm", "run", "--disable-console"]
    words += ["--backend", f"kind=openai_http,target={url},model=tiny,request_format={route}"]
    words += ["--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    words += ["--tokenizer", f"kind=huggingface_auto,model={folder}", "--output", "kind=json,path=report.json"]
    words += ["--data", f"kind=synthetic_text,prompt_tokens={NUM_IN},output_tokens={NUM_OUT}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (benchmark,) = json.loads((tmp_path / "report.json").read_text("utf-8"))["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (NUM_REQUESTS, 0, 0)
    lengths = [request["output_metrics"]["text_tokens"] for request in benchmark["requests"]["successful"]]
    assert lengths == [NUM_OUT] * NUM_REQUESTS
