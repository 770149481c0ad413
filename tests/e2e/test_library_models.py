"""Models that the library transformers runs, through the real server: its own greedy tokens, and a log that says whose layers run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.library_models import write_library_checkpoint
from tests.support.oracle import Oracle
from tests.support.plan_driver import greedy
from tests.support.random_checkpoint import CheckpointSpec, write_tokenizer
from tests.support.server_process import ServerProcess
from tests.unit.model_executor.test_model_runner_matches_transformers import prompts_with_shared_prefixes

pytestmark = pytest.mark.e2e
OPTIONS = [
    "--device",
    "cpu",
    "--port",
    "0",
    "--page-size",
    "4",
    "--chunked-prefill-size",
    "40",
    "--max-total-tokens",
    "4096",
]


@pytest.mark.parametrize("model_type", ["gpt_neox", "olmoe"])
def test_a_server_gives_the_librarys_tokens_and_says_whose_layers_run(tmp_path: Path, model_type: str) -> None:
    folder = tmp_path / "model"
    write_library_checkpoint(folder, model_type)
    write_tokenizer(folder, CheckpointSpec(vocab_size=512, context_length=256))
    oracle = Oracle(folder)
    expected = [(prompt, oracle.expect(prompt, greedy(12))) for prompt in prompts_with_shared_prefixes(3, 12)]
    safe = [(prompt, one) for prompt, one in expected if one.is_safe]
    assert len(safe) > 8
    words = ["--model-path", str(folder), "--model-impl", "transformers", *OPTIONS]
    with ServerProcess("srt.launch_server", words, tmp_path) as process, httpx.Client(timeout=60) as client:
        url = process.wait_ready()

        def generate(prompt: list[int]) -> Any:
            parameters = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
            answer = client.post(f"{url}/generate", json={"input_ids": prompt, "sampling_params": parameters})
            return answer.json()["output_ids"]

        with ThreadPoolExecutor(6) as threads:
            answers = list(threads.map(generate, [prompt for prompt, _ in safe]))
        assert process.lines_with("run by the layers of the library transformers")
    assert answers == [list(one.ids) for _, one in safe]
