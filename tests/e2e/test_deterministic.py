"""A deterministic server gives every request one result: on two ranks, under load, with prefixes in common, and after a worker's death."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from srt.cli import verify
from srt.kernels.build import cpu_library
from tests.support.checkpoints import CheckpointFactory
from tests.support.server_process import ServerProcess

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not cpu_library.is_supported(), reason="this processor has no AVX2"),
]
WORKER = "srt.managers.tp_worker"
PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.2, "top_k": 20},
    {"frequency_penalty": 0.5, "presence_penalty": 0.3},
    {"repetition_penalty": 1.2},
    {"min_new_tokens": 6, "stop_token_ids": list(range(20, 120)), "ignore_eos": False},
    {"stop": ["e", "a"], "no_stop_trim": True},
    {"stop_regex": ["[iou]"]},
    {"logit_bias": {"70": 4.0, "80": -3.0}},
    {"regex": "[a-z ]{5,30}"},
    {"json_schema": '{"type": "array", "items": {"enum": ["owl", "lamp"]}}'},
    {"ebnf": 'root ::= ("a" | "b")+'},
    {"n": 3, "temperature": 0.9},
]
TEXT = "A deterministic server gives the same answer to the same request. " * 3


@pytest.fixture(scope="module")
def server(checkpoint: CheckpointFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    words = ["--model-path", str(checkpoint("qwen3")), "--device", "cpu", "--dtype", "bfloat16", "--port", "0"]
    words += ["--tp", "2", "--max-total-tokens", "4096", "--chunked-prefill-size", "64", "--page-size", "4"]
    words += ["--enable-deterministic-inference", "--max-replacements", "100"]
    with ServerProcess("srt.launch_server", words, tmp_path_factory.mktemp("deterministic")) as process:
        process.wait_ready()
        yield process
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.lines


def body(length: int, seed: int, num_tokens: int = 12) -> dict[str, Any]:
    """A request with the first characters of the text; each seed has its own way to draw."""
    ways: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "top_p": 0.9}, {"frequency_penalty": 0.5}]
    sampling = {**ways[seed % 3], "sampling_seed": seed, "max_new_tokens": num_tokens, "ignore_eos": True}
    return {"text": TEXT[:length], "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}


def results(server: ServerProcess, bodies: list[dict[str, Any]]) -> list[str]:
    """What the client gets of each request, all sent at once: ids and logprobs."""
    url = server.wait_ready()

    def ask(one: dict[str, Any]) -> str:
        answer = httpx.post(f"{url}/generate", json=one, timeout=120).raise_for_status().json()
        choices = answer if isinstance(answer, list) else [answer]
        assert all(choice["meta_info"]["deterministic"] is True for choice in choices)
        return json.dumps([result_of(choice) for choice in choices])

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(ask, bodies))


def result_of(answer: dict[str, Any]) -> list[Any]:
    meta = answer["meta_info"]
    return [answer["output_ids"], meta["output_token_logprobs"], meta["output_top_logprobs"]]


def test_one_prompt_has_one_result_in_batches_of_any_size(server: ServerProcess) -> None:
    """The mode `single` of SGLang's test_deterministic."""
    found = [one for size in (1, 2, 5, 12) for one in results(server, [body(20, 1)] * size)]
    assert len(set(found)) == 1


def test_prompts_of_different_lengths_have_one_result_each(server: ServerProcess) -> None:
    """The mode `prefix`: prompts that begin alike, in random mixtures."""
    rng, found = random.Random(0), dict[int, set[str]]()
    for size in (1, 3, 8, 16):
        lengths = rng.choices((1, 40, 90, 190), k=size)
        for length, one in zip(lengths, results(server, [body(length, 2) for length in lengths]), strict=True):
            found.setdefault(length, set()).add(one)
    assert {length: len(ones) for length, ones in found.items()} == dict.fromkeys((1, 40, 90, 190), 1)


def test_cached_prefixes_change_nothing(server: ServerProcess) -> None:
    """The mode `radix`: the same request with a cold cache, and with longer and longer prefixes in it."""
    url, found = server.wait_ready(), set[str]()
    for length in (0, 30, 77, 150):
        httpx.post(f"{url}/flush_cache", timeout=60).raise_for_status()
        if length:
            results(server, [body(length, 0)])
        found |= set(results(server, [body(150, 4)]))
    assert len(found) == 1


def test_requests_with_any_sampling_parameters_have_one_result(server: ServerProcess) -> None:
    bodies = [body(60 + seed, seed, num_tokens=20) for seed in range(len(PARAMETERS))]
    for one, parameters in zip(bodies, PARAMETERS, strict=True):
        one["sampling_params"] = {"sampling_seed": 7, "max_new_tokens": 20, "ignore_eos": True, **parameters}
    alone = [results(server, [one])[0] for one in bodies]
    httpx.post(f"{server.wait_ready()}/flush_cache", timeout=60).raise_for_status()
    assert results(server, bodies * 2) == alone * 2


def test_a_request_that_outlives_a_worker_has_the_same_result(server: ServerProcess) -> None:
    bodies = [body(50, seed, num_tokens=100) for seed in range(4)]
    before = results(server, bodies)
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(results, server, bodies[1:])
        first = streamed_past_a_death(server, bodies[0])
        assert [first, *others.result()] == before
    server.wait_for("replaced")


def streamed_past_a_death(server: ServerProcess, one: dict[str, Any]) -> str:
    """Stream a request, and kill a worker when it has a few tokens."""
    with httpx.stream("POST", f"{server.wait_ready()}/generate", json={**one, "stream": True}, timeout=120) as answer:
        chunks = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))
        for _ in range(5):
            last = next(chunks)
        next(child for child in server.children() if child.cmdline()[-1] == WORKER).kill()
        for last in chunks:
            assert "error" not in last, last
    return json.dumps([result_of(last)])


def test_recorded_answers_are_verified(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests, answers = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    requests.write_text("\n".join(json.dumps(body(60, seed)) for seed in range(3)))
    url = ["--url", server.wait_ready()]
    assert verify.main([*url, "--record", str(answers), str(requests)]) == 0
    assert verify.main([*url, "--rescore", str(answers)]) == 0
    assert capsys.readouterr().out == "1: the same\n2: the same\n3: the same\n"
    records = [json.loads(line) for line in answers.read_text().splitlines()]
    records[0]["answer"]["output_ids"][3] += 1
    records[1]["answer"]["meta_info"]["output_token_logprobs"][5][0] += 1e-7
    answers.write_text("\n".join(map(json.dumps, records)))
    assert verify.main([*url, str(answers)]) == 1
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("1: output token 3 is ")
    assert second.startswith("2: output_token_logprobs[5] is ")
    assert third == "3: the same"
