"""Weights of a real server are updated under load, and its processes are killed before, during and after it."""

from __future__ import annotations

import concurrent.futures
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save

from tests.faults.test_replacement import SCHEDULER, WORKER, Trigger, called, streamed, victim_of, words_for
from tests.support.checkpoints import CheckpointFactory
from tests.support.plan_driver import Job, PlanDriver, greedy
from tests.support.runners import make_runner
from tests.support.server_process import END_S, ServerProcess

pytestmark = pytest.mark.e2e

LENGTH = 40
NUM_BEHIND = 20
"""Tokens of another request, beside which those that run draw about as many."""
GREEDY = {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True}
ENDLESS = {**GREEDY, "max_new_tokens": 4000}
PROMPTS = [[7, 8, 9, number] for number in range(3)]


@pytest.fixture(scope="module")
def server(qwen3_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Two ranks, two frontends."""
    words = [*words_for(qwen3_checkpoint), "--max-replacements", "1000"]
    with ServerProcess("srt.launch_server", words, tmp_path_factory.mktemp("updated")) as process:
        process.wait_ready()
        yield process
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.lines


@pytest.fixture(scope="module")
def folders(checkpoint: CheckpointFactory) -> list[Path]:
    """The checkpoint that the server begins with, and another one of the same shape."""
    return [checkpoint("qwen3"), checkpoint("qwen3", seed=1)]


@pytest.fixture(scope="module")
def expected(folders: list[Path]) -> list[list[list[int]]]:
    """The tokens of each checkpoint for the prompts."""
    return [[said(folder, prompt, LENGTH) for prompt in PROMPTS] for folder in folders]


def said(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Return the first `count` tokens of a checkpoint."""
    job = Job(prompt, greedy(count))
    PlanDriver(make_runner(folder, 16, dtype="float32"), 16).run([job])
    return job.outputs


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.wait_ready()}{path}", json=body, timeout=4 * END_S)


def update(server: ServerProcess, folder: Path, **body: Any) -> httpx.Response:
    return called(lambda: post(server, "/update_weights_from_disk", {"model_path": str(folder), **body}))


def answers(server: ServerProcess, version: str) -> list[list[int]]:
    found = post(server, "/generate", {"input_ids": PROMPTS, "sampling_params": GREEDY}).json()
    assert {answer["meta_info"]["weight_version"] for answer in found} == {version}
    return [answer["output_ids"] for answer in found]


def under_load(server: ServerProcess, action: Any) -> list[dict[str, Any]]:
    """Run the prompts without an end, do something when each has a token, end them later, and return the last chunk of each."""
    url = server.wait_ready()

    def act() -> None:
        action()
        beside = {"input_ids": [5, 6], "sampling_params": {**GREEDY, "max_new_tokens": NUM_BEHIND}}
        assert post(server, "/generate", beside).status_code == 200
        assert post(server, "/abort_request", {"abort_all": True}).status_code == 200

    all_begun = Trigger(len(PROMPTS), act)

    def one(prompt: list[int]) -> dict[str, Any]:
        first = Trigger(1, all_begun)
        return streamed(url, {"input_ids": prompt, "sampling_params": ENDLESS}, first)[0]

    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(one, PROMPTS))


def check_continued(server: ServerProcess, chunk: dict[str, Any], prompt: list[int], old: Path) -> None:
    """The output begins as the old weights' and goes on as the new ones would behind what there was."""
    ids = chunk["output_ids"]
    before = said(old, prompt, len(ids))
    kept = next((n for n, (one, other) in enumerate(zip(ids, before, strict=True)) if one != other), len(ids))
    assert 0 < kept < len(ids) < ENDLESS["max_new_tokens"]
    rest = {**GREEDY, "max_new_tokens": len(ids) - kept}
    again = post(server, "/generate", {"input_ids": prompt + ids[:kept], "sampling_params": rest}).json()
    assert again["output_ids"] == ids[kept:]


def test_running_requests_go_on_with_the_new_weights(
    server: ServerProcess, folders: list[Path], expected: list[list[list[int]]]
) -> None:
    assert answers(server, "default") == expected[0]
    done: list[httpx.Response] = []
    chunks = under_load(server, lambda: done.append(update(server, folders[1], weight_version="one")))
    assert done[0].status_code == 200 and done[0].json()["num_paused_requests"] > 0, done[0].text
    for chunk, prompt in zip(chunks, PROMPTS, strict=True):
        assert chunk["meta_info"]["weight_version"] == "one"
        check_continued(server, chunk, prompt, folders[0])
    assert answers(server, "one") == expected[1]


def test_an_update_may_end_what_runs(
    server: ServerProcess, folders: list[Path], expected: list[list[list[int]]]
) -> None:
    before = answers(server, update(server, folders[0], weight_version="zero").json()["success"] and "zero")
    chunks = under_load(server, lambda: update(server, folders[1], weight_version="one", abort_all_requests=True))
    for chunk, prompt in zip(chunks, PROMPTS, strict=True):
        ids = chunk["output_ids"]
        assert chunk["meta_info"]["finish_reason"]["type"] == "abort"
        assert chunk["meta_info"]["weight_version"] == "zero" and ids == said(folders[0], prompt, len(ids))
    assert (before, answers(server, "one")) == (expected[0], expected[1])


def test_a_replaced_worker_has_the_new_weights(
    server: ServerProcess, folders: list[Path], expected: list[list[list[int]]]
) -> None:
    assert update(server, folders[1], weight_version="one").status_code == 200
    victim_of(server, WORKER).kill()
    assert answers(server, "one") == expected[1]


@pytest.mark.full
@pytest.mark.parametrize("module", [WORKER, SCHEDULER])
def test_an_update_outlives_the_death_of_a_process(
    server: ServerProcess, folders: list[Path], expected: list[list[list[int]]], module: str
) -> None:
    assert update(server, folders[0], weight_version="zero").status_code == 200
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        updating = pool.submit(update, server, folders[1], weight_version="one")
        victim_of(server, module).kill()
        done = updating.result()
    assert done.status_code == 200, done.text
    victim_of(server, module).kill()
    assert answers(server, "one") == expected[1]


def test_a_failing_update_leaves_the_old_weights(
    server: ServerProcess, folders: list[Path], expected: list[list[list[int]]], checkpoint: CheckpointFactory
) -> None:
    assert update(server, folders[1], weight_version="one").status_code == 200
    refused = update(server, checkpoint("qwen3", num_layers=1), weight_version="two")
    assert refused.status_code == 400 and "describes another model" in refused.text
    assert update(server, folders[1] / "absent").status_code == 400
    assert answers(server, "one") == expected[1]
    assert post(server, "/update_weight_version", {"new_version": "three"}).status_code == 200
    assert answers(server, "three") == expected[1]


def test_weights_can_be_looked_at(server: ServerProcess, folders: list[Path]) -> None:
    found = []
    for folder in folders:
        assert update(server, folder).status_code == 200
        stored = load_file(folder / "model.safetensors")
        for layer in ("self_attn.q_proj", "self_attn.o_proj", "input_layernorm"):  # cut by rows, by columns, and whole
            name = f"model.layers.1.{layer}.weight"
            rows = post(server, "/get_weights_by_name", {"name": name, "truncate_size": 50}).json()
            assert rows == stored[name][:50].tolist()
        ranks = post(server, "/weights_checker", {}).json()["ranks"]
        assert [one["rank"] for one in ranks] == [0, 1]
        found.append([one["checksums"] for one in ranks])
    (first, second), (others, _) = found
    assert first.keys() == second.keys() == others.keys()
    name = "model.layers.0.mlp.down_proj.weight.values"
    assert len({first[name], second[name], others[name]}) == 3
    refused = post(server, "/get_weights_by_name", {"name": "model.absent"})
    assert refused.status_code == 400 and "has no tensor 'model.absent'" in refused.text


def test_tensors_are_taken_by_name_and_the_others_stay(
    server: ServerProcess, folders: list[Path], expected: list[list[list[int]]]
) -> None:
    """In two parts, in a pause; the last test, because nothing can be replaced behind it."""
    assert update(server, folders[0], weight_version="zero").status_code == 200
    tensors = load_file(folders[1] / "model.safetensors")
    names = sorted(tensors)
    assert post(server, "/pause_generation", {"mode": "retract"}).status_code == 200
    for part in (names[::2], names[1::2]):
        answer = post_file(server, save({name: tensors[name] for name in part}))
        assert answer.status_code == 200, answer.text
    assert post(server, "/continue_generation", {}).status_code == 200
    assert answers(server, "one") == expected[1]
    refused = post_file(server, save({"model.norm.weight": tensors["model.norm.weight"][1:]}))
    assert refused.status_code == 400 and "of the wrong shape is model.norm.weight" in refused.text
    refused = post_file(server, b"no safetensors file")
    assert refused.status_code == 400, refused.text
    assert post(server, "/update_weights_from_tensor", {"serialized_named_tensors": []}).status_code == 415
    assert answers(server, "one") == expected[1]
    assert update(server, folders[0]).status_code == 200


def post_file(server: ServerProcess, file: bytes) -> httpx.Response:
    url = f"{server.wait_ready()}/update_weights_from_tensor"
    headers = {"content-type": "application/octet-stream"}
    return httpx.post(url, content=file, params={"weight_version": "one"}, headers=headers, timeout=END_S)
