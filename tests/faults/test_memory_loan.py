"""Memory of a real server is released under load and taken back; its processes are killed meanwhile."""

from __future__ import annotations

import concurrent.futures
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.test_replacement import SCHEDULER, WORKER, called, victim_of, words_for
from tests.faults.test_weight_updates import (
    GREEDY,
    LENGTH,
    PROMPTS,
    answers,
    check_continued,
    post,
    said,
    under_load,
    update,
)
from tests.support.checkpoints import CheckpointFactory
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.e2e

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
LARGE: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 4096, "num_layers": 6}
"""So that the weights are most of what a worker can release."""


@pytest.fixture(scope="module")
def folders(checkpoint: CheckpointFactory) -> list[Path]:
    return [checkpoint("qwen3", seed=seed, **LARGE) for seed in (0, 1)]


@pytest.fixture(scope="module")
def expected(folders: list[Path]) -> list[list[list[int]]]:
    return [[said(folder, prompt, LENGTH) for prompt in PROMPTS] for folder in folders]


@pytest.fixture(scope="module")
def server(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    words = [*words_for(folders[0]), "--max-replacements", "1000", "--enable-memory-saver"]
    with ServerProcess("srt.launch_server", words, tmp_path_factory.mktemp("lent")) as process:
        process.wait_ready()
        yield process
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.lines


def resident_bytes(server: ServerProcess) -> int:
    """Memory that one worker really has."""
    status = Path(f"/proc/{victim_of(server, WORKER).pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def done(server: ServerProcess, path: str, **body: Any) -> str:
    answer = called(lambda: post(server, path, body))
    assert answer.status_code == 200, answer.text
    return str(answer.json()["message"])


def test_released_memory_is_free_and_comes_back_with_the_same_tokens(
    server: ServerProcess, folders: list[Path], expected: list[list[list[int]]]
) -> None:
    assert answers(server, "default") == expected[0]
    before = resident_bytes(server)
    said = float(done(server, RELEASE).split("released ")[1].split(" MB")[0].replace(",", "")) * 1e6
    weight_bytes = (folders[0] / "model.safetensors").stat().st_size / 2  # of each rank
    assert said > 0.9 * weight_bytes, "the KV memory counts as well"
    assert before - resident_bytes(server) > 0.8 * weight_bytes
    sizes = []
    for _ in range(8):
        done(server, RESUME)
        sizes.append(resident_bytes(server))
        done(server, RELEASE)
    # Sizes go up and down by a fifth of the weights. A leak adds up over five cycles.
    assert min(sizes[-3:]) - min(sizes[:3]) < 0.3 * weight_bytes, f"cycles leak: {sizes}"
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(answers, server, "default")
        assert not concurrent.futures.wait([waiting], 0.5).done, "nothing can run without memory"
        done(server, RESUME, tags=["kv_cache"])
        assert not concurrent.futures.wait([waiting], 0.5).done
        done(server, RESUME)
        assert waiting.result() == expected[0]


def test_running_requests_go_on_when_the_memory_is_back(server: ServerProcess, folders: list[Path]) -> None:
    def lend() -> None:
        done(server, RELEASE)
        done(server, RESUME)

    check_said(under_load(server, lend), folders[0])


def check_said(chunks: list[dict[str, Any]], folder: Path) -> None:
    """All tokens are this checkpoint's."""
    for chunk, prompt in zip(chunks, PROMPTS, strict=True):
        assert chunk["output_ids"] == said(folder, prompt, len(chunk["output_ids"]))


@pytest.mark.parametrize("tags", [["kv_cache"], ["weights"], ["cuda_graph"]])
def test_parts_are_released_one_by_one(server: ServerProcess, expected: list[list[list[int]]], tags: list[str]) -> None:
    assert tags[0] in done(server, RELEASE, tags=tags)
    assert done(server, RELEASE, tags=tags).startswith("Each rank has released 0.0 MB"), "it is released already"
    done(server, RESUME, tags=tags)
    assert answers(server, "default") == expected[0]


def test_new_requests_are_refused_if_that_is_wanted(server: ServerProcess, expected: list[list[list[int]]]) -> None:
    done(server, RELEASE, refuse_requests=True)
    refused = post(server, "/generate", {"input_ids": PROMPTS[0], "sampling_params": GREEDY})
    assert refused.status_code == 503 and "memory is released" in refused.text
    done(server, RESUME)
    assert answers(server, "default") == expected[0]


@pytest.mark.parametrize("module", [WORKER, pytest.param(SCHEDULER, marks=pytest.mark.full)])
def test_a_replaced_engine_has_its_memory_released_too(
    server: ServerProcess, expected: list[list[list[int]]], module: str
) -> None:
    assert answers(server, "default") == expected[0]
    before = resident_bytes(server)
    done(server, RELEASE)
    released = resident_bytes(server)
    again = len(server.lines_with("at work again"))
    victim_of(server, module).kill()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(answers, server, "default")
        server.wait_for("at work again", again + 1)  # until then the scheduler that is about to end may still answer
        asked = called(lambda: post(server, "/weights_checker", {}))
        assert asked.status_code == 400 and "The memory of the weights is released" in asked.text
        assert not waiting.done()
        assert resident_bytes(server) < released + 0.3 * (before - released)
        done(server, RESUME)
        assert waiting.result() == expected[0]


def test_weights_are_updated_while_the_kv_memory_is_lent(
    server: ServerProcess, folders: list[Path], expected: list[list[list[int]]]
) -> None:
    """As training loops do: all memory goes, and new weights are written, which brings the memory of the weights back."""
    done(server, RELEASE)
    asked = post(server, "/weights_checker", {})
    assert asked.status_code == 400 and "The memory of the weights is released" in asked.text
    assert update(server, folders[1], weight_version="one").status_code == 200
    done(server, RELEASE, tags=["weights"])
    done(server, RESUME)
    assert answers(server, "one") == expected[1]
    chunks = under_load(server, lambda: (done(server, RELEASE), done(server, RESUME)))
    check_said(chunks, folders[1])
    assert update(server, folders[0], weight_version="default").status_code == 200


@pytest.mark.full
def test_an_update_after_a_loan_under_load_continues_requests(server: ServerProcess, folders: list[Path]) -> None:
    def lend() -> None:
        done(server, RELEASE)
        done(server, RESUME, tags=["weights"])
        assert update(server, folders[1], weight_version="one").status_code == 200
        done(server, RESUME)

    for chunk, prompt in zip(under_load(server, lend), PROMPTS, strict=True):
        check_continued(server, chunk, prompt, folders[0])
    assert update(server, folders[0], weight_version="default").status_code == 200


def test_wrong_tags_are_refused(server: ServerProcess) -> None:
    for tags in ([], ["graphs"], "weights"):
        refused = post(server, RELEASE, {"tags": tags})
        assert refused.status_code == 400 and "tags" in refused.text, refused.text


@pytest.mark.full
def test_a_stopped_server_ends_what_waits_for_memory(folders: list[Path], tmp_path: Path) -> None:
    """When the time for running requests is over."""
    words = [*words_for(folders[0]), "--enable-memory-saver"]
    with ServerProcess("srt.launch_server", words, tmp_path) as process:
        url = process.wait_ready()
        assert httpx.post(url + RELEASE, json={}, timeout=60).status_code == 200
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            body = {"input_ids": PROMPTS[0], "sampling_params": GREEDY}
            waiting = pool.submit(httpx.post, url + "/generate", json=body, timeout=60)
            while not httpx.get(url + "/server_info", timeout=60).json()["internal_states"][0]["num_waiting"]:
                pass
            process.send(signal.SIGTERM)
            assert waiting.result().status_code == 503 and "shutting down" in waiting.result().text
        assert process.wait() == 0, process.lines
