"""Requests with random adapters, and the tokens of the models that the adapters merge into."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from srt.lora.adapter_files import content_hash
from srt.lora.resource import AdapterContent
from srt.model_executor.model_runner import ModelRunner
from tests.support.oracle import Oracle
from tests.support.plan_driver import Job, greedy, token_ids
from tests.support.random_adapter import AdapterSpec, merge, write_adapter

SPECS = {
    "all": AdapterSpec(seed=1),
    "some": AdapterSpec(seed=2, rank=3, modules=("q_proj", "v_proj", "qkv_proj", "down_proj"), by_root=True),
    "patterns": AdapterSpec(
        seed=3, ranks={"k_proj": 6, "o_proj": 1}, alphas={"k_proj": 3.0, "up_proj": 20.0}, layers=[1]
    ),
}
NUM_TOKENS = 6


@dataclass(frozen=True, slots=True)
class Case:
    prompt: list[int]
    adapter: str
    expected: list[int]

    def job(self) -> Job:
        return Job(self.prompt, greedy(len(self.expected)), adapter=self.adapter)


def cases_of(folder: Path, root: Path, count: int, num_tokens: int = NUM_TOKENS) -> list[Case]:
    """Prompts with shared prefixes, in turns of no adapter and of each adapter, and what `transformers` makes of them."""
    rng = np.random.default_rng(1)
    prefix, cases = token_ids(rng, 37, 512), []
    for name in ("", *SPECS):
        merged = (
            folder
            if not name
            else merge(root / f"merged-{name}", folder, write_adapter(root / name, folder, SPECS[name]))
        )
        oracle = Oracle(merged)
        for number in range(count):
            prompt = (prefix if number % 2 else []) + token_ids(rng, int(rng.integers(1, 30)), 512)
            expected = oracle.expect(prompt, greedy(num_tokens))
            if expected.is_safe:
                cases.append(Case(prompt, name, list(expected.ids)))
    rng.shuffle(cases)
    assert len(cases) >= 3 * count
    return cases


def load(runner: ModelRunner, root: Path, name: str) -> None:
    assert runner.loaded.adapters is not None
    runner.loaded.adapters.load(name, AdapterContent(str(root / name), content_hash(root / name)))
