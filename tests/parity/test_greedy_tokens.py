"""Greedy tokens equal those of `transformers`, through the real processes, whatever the tensor parallelism, page size, chunk and cache."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

import srt
from tests.parity.product import PRODUCT, UNLIMITED, Setting, pairs, pairwise
from tests.parity.worlds import Answer, Case, greedy_cases, send_at_random
from tests.support.checkpoints import CheckpointFactory

FAMILIES = ("llama", "qwen2", "qwen3")
ORDINARY = {"talkers": 24, "readers": 40, "longest": 120, "most_new": 42}
SHORT = {"talkers": 4, "readers": 8, "longest": 44, "most_new": 20}
MOST_TRIES = 5
COVERING = pairwise()
ONE_FAMILY_EACH = list(zip(COVERING, itertools.cycle(FAMILIES)))
REST = [
    *(pair for pair in itertools.product(COVERING, FAMILIES) if pair not in ONE_FAMILY_EACH),
    *zip((setting for setting in PRODUCT if setting not in COVERING), itertools.cycle(FAMILIES)),
]
Cases = Callable[[str, bool], tuple[Path, list[Case]]]


@pytest.fixture(scope="session")
def greedy(checkpoint: CheckpointFactory) -> Cases:
    """`greedy(family, short)`: the checkpoint and its cases, made once. Short ones are for chunks of a single token."""
    made: dict[tuple[str, bool], tuple[Path, list[Case]]] = {}

    def cases(family: str, short: bool) -> tuple[Path, list[Case]]:
        if (family, short) not in made:
            # 509 rows of vocabulary do not divide by two ranks.
            folder = checkpoint(family, vocab_size=509, tied=family == "qwen3")
            eos = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
            shape = SHORT if short else ORDINARY
            made[family, short] = folder, greedy_cases(folder, eos, seed=1, **shape)
        return made[family, short]

    return cases


@pytest.mark.e2e
@pytest.mark.parametrize(("setting", "family"), ONE_FAMILY_EACH, ids=str)
def test_tokens_equal_the_reference(setting: Setting, family: str, greedy: Cases) -> None:
    check_setting(setting, *greedy(family, setting.chunk == 1))


@pytest.mark.e2e
@pytest.mark.full
@pytest.mark.parametrize(("setting", "family"), REST, ids=str)
def test_tokens_equal_the_reference_in_the_rest_of_the_product(setting: Setting, family: str, greedy: Cases) -> None:
    check_setting(setting, *greedy(family, setting.chunk == 1))


@pytest.mark.e2e
def test_tokens_equal_the_reference_when_memory_is_so_short_that_requests_are_preempted(greedy: Cases) -> None:
    folder, cases = greedy("qwen3", False)
    setting = Setting(tp=1, page_size=16, chunk=64, cache=True)
    with _runtime(setting, folder, max_total_tokens=30 * 16, schedule_conservativeness=0.01) as runtime:
        answers = asyncio.run(send_at_random(cases, _stream(runtime), np.random.default_rng(0)))
        _compare(cases, answers)
        assert runtime.get_server_info()["internal_states"][0]["num_preempted"] > 0


def test_the_covering_set_covers_every_pair_of_values() -> None:
    assert set().union(*map(pairs, COVERING)) == set().union(*map(pairs, PRODUCT))
    assert len(COVERING) < len(PRODUCT) / 3


def check_setting(setting: Setting, folder: Path, cases: list[Case]) -> None:
    rounds = [cases, cases[::-1]] if setting.cache else [cases]  # the second round meets a warm cache
    with _runtime(setting, folder, max_total_tokens=20_000) as runtime:
        for number, these in enumerate(rounds * MOST_TRIES, 1):
            answers = asyncio.run(send_at_random(these, _stream(runtime), np.random.default_rng(number)))
            _compare(these, answers)
            report = runtime.get_server_info()["internal_states"][0]
            if number >= len(rounds) and _has_shared_steps(report, setting):
                break
    _check_report(report, setting, cases)


def _has_shared_steps(report: Answer, setting: Setting) -> bool:
    """On a busy machine requests may come so slowly that each is answered before the next one."""
    return report["num_mixed_steps"] > 0 and (setting.chunk == 1 or report["max_rows_in_step"] >= 16)


def _runtime(setting: Setting, folder: Path, **more: float) -> srt.Runtime:
    return srt.Runtime(
        model_path=str(folder),
        device="cpu",
        dtype="float32",
        tp_size=setting.tp,
        page_size=setting.page_size,
        chunked_prefill_size=setting.chunk,
        disable_radix_cache=not setting.cache,
        max_running_requests=64,
        **more,
    )


def _stream(runtime: srt.Runtime) -> Callable[[Case], AsyncIterator[Answer]]:
    async def stream(case: Case) -> AsyncIterator[Answer]:
        parameters = {"temperature": 0, "max_new_tokens": case.max_new_tokens}
        chunks = await runtime.async_generate(input_ids=list(case.prompt_ids), sampling_params=parameters, stream=True)
        async for chunk in chunks:
            yield chunk

    return stream


def _compare(cases: list[Case], answers: list[Answer]) -> None:
    for case, answer in zip(cases, answers, strict=True):
        assert tuple(answer["output_ids"]) == case.expected.ids, f"prompt {case.prompt_ids}"
        finish = answer["meta_info"]["finish_reason"]
        assert finish["type"] == ("stop" if case.expected.stopped else "length")


def _check_report(report: Answer, setting: Setting, cases: list[Case]) -> None:
    """The steps were of the kind that the test is about: what was not shared, chunked or cached proves nothing."""
    assert _has_shared_steps(report, setting), report
    if setting.chunk != 1:
        assert max(len(case.prompt_ids) for case in cases) > 3 * 16
    if setting.chunk != UNLIMITED:
        assert report["max_chunks_of_a_prompt"] > 3
    if setting.cache:
        assert report["num_cached_tokens"] >= 0.3 * report["num_prompt_tokens"]
    else:
        assert report["num_cached_tokens"] == 0
