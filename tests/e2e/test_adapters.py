"""LoRA adapters through the real server, two ranks and two frontends: tokens are those of the merged models, whatever happens meanwhile."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from tests.support.checkpoints import CheckpointFactory
from tests.support.oracle import Oracle
from tests.support.plan_driver import greedy, token_ids
from tests.support.random_adapter import AdapterSpec, merge, write_adapter
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.e2e

MODEL = "tiny-test"
NAMES = ("red", "green", "blue")
NUM_TOKENS = 24
WORKER, FRONTEND = "srt.managers.tp_worker", "srt.entrypoints.http_server"


@dataclass(frozen=True, slots=True)
class Case:
    adapter: str
    prompt: list[int]
    expected: list[int]


@dataclass(frozen=True, slots=True)
class World:
    """A server with two of three adapters, memory for two, and what each must answer."""

    url: str
    process: ServerProcess
    folders: dict[str, Path]
    cases: list[Case]

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=120)

    def load(self, name: str, folder: Path) -> None:
        self.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}).raise_for_status()

    def generate(self, case: Case, name: str | None = None) -> dict[str, Any]:
        params = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
        body = {"input_ids": case.prompt, "sampling_params": params, "lora_path": name or case.adapter or None}
        answer: dict[str, Any] = self.post("/generate", body).raise_for_status().json()
        return answer

    def check(self, answers: list[dict[str, Any]], cases: list[Case]) -> None:
        assert [answer["output_ids"] for answer in answers] == [case.expected for case in cases]

    def of(self, adapter: str) -> list[Case]:
        return [case for case in self.cases if case.adapter == adapter]


@pytest.fixture(scope="module")
def world(checkpoint: CheckpointFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("adapters")
    folder = checkpoint("qwen3", tied=False)
    folders = {name: root / name for name in NAMES}
    rng = np.random.default_rng(4)
    prefix, cases = token_ids(rng, 40, 512), []
    for seed, name in enumerate(("", *NAMES)):
        merged = folder
        if name:
            deltas = write_adapter(folders[name], folder, AdapterSpec(seed=seed))
            merged = merge(root / f"{name}-merged", folder, deltas)
        oracle = Oracle(merged)
        for number in range(5):
            prompt = [*prefix, 100 + number]
            expected = oracle.expect(prompt, greedy(NUM_TOKENS))
            if expected.is_safe:
                cases.append(Case(name, prompt, list(expected.ids)))
    words = ["--model-path", str(folder), "--served-model-name", MODEL, "--port", "0", "--device", "cpu", "--tp", "2"]
    words += ["--dtype", "float32", "--max-total-tokens", "16384", "--tokenizer-worker-num", "2"]
    words += ["--max-loras-per-batch", "2", "--max-replacements", "100", "--lora-paths"]
    words += [f"{name}={folders[name]}" for name in NAMES[:2]]
    with ServerProcess("srt.launch_server", words, root) as process:
        yield World(process.wait_ready(), process, folders, cases)
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.lines


def at_once(world: World, cases: list[Case]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(cases)) as pool:
        return list(pool.map(world.generate, cases))


def test_more_adapters_than_fit_are_served_together_with_rows_without_one(world: World) -> None:
    """The third is loaded while the server runs; every frontend knows it, and one of three always has to make room."""
    world.load("blue", world.folders["blue"])
    for _ in range(2):
        answers = at_once(world, world.cases)
        world.check(answers, world.cases)
    by_adapter = {case.adapter: answer for case, answer in zip(world.cases, answers, strict=True)}
    assert all(answer["meta_info"]["cached_tokens"] for answer in by_adapter.values())


def test_the_openai_api_names_an_adapter_as_a_model(world: World) -> None:
    case = world.of("red")[0]
    cards = {card["id"]: card for card in httpx.get(f"{world.url}/v1/models", timeout=60).json()["data"]}
    assert cards[MODEL]["parent"] is None
    assert (cards["red"]["parent"], cards["red"]["root"]) == (MODEL, str(world.folders["red"]))
    assert httpx.get(f"{world.url}/v1/models/red", timeout=60).json()["parent"] == MODEL
    body: dict[str, Any] = {"prompt": case.prompt, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    text = world.generate(case)["text"]
    for naming in ({"model": "red"}, {"model": f"{MODEL}:red"}, {"model": MODEL, "lora_path": "red"}):
        answer = world.post("/v1/completions", {**body, **naming}).raise_for_status().json()
        assert answer["choices"][0]["text"] == text
        assert answer["model"] == naming["model"]
    assert world.post("/v1/completions", {**body, "model": "yellow"}).status_code == 404
    chat = {"messages": [{"role": "user", "content": "Yes or no?"}], "model": "green", "regex": "(yes|no)"}
    message = world.post("/v1/chat/completions", chat).raise_for_status().json()["choices"][0]["message"]
    assert message["content"] in ("yes", "no")


def test_an_unloaded_adapter_serves_its_running_requests_to_their_end(world: World) -> None:
    case = world.of("green")[0]
    params = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
    body = {"input_ids": case.prompt, "sampling_params": params, "lora_path": "green", "stream": True}
    with httpx.stream("POST", f"{world.url}/generate", json=body, timeout=120) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: "))
        next(lines)
        world.post("/unload_lora_adapter", {"lora_name": "green"}).raise_for_status()
        assert list(lines)[-1] == "data: [DONE]"
    refused = world.post("/generate", {**body, "stream": False})
    assert (refused.status_code, "green" in refused.text) == (400, True)
    assert world.post("/unload_lora_adapter", {"lora_name": "green"}).status_code == 400
    world.load("green", world.folders["green"])
    world.check([world.generate(case)], [case])


def test_a_name_with_new_content_is_another_adapter(world: World) -> None:
    """Also where the first one's keys and values are cached."""
    red, blue = world.of("red"), world.of("blue")
    world.check([world.generate(case) for case in red], red)
    world.load("red", world.folders["blue"])
    world.check([world.generate(case, "red") for case in blue], blue)
    world.load("red", world.folders["red"])
    world.check([world.generate(case) for case in red], red)


def test_adapters_survive_killed_workers_and_frontends(world: World) -> None:
    """Requests in flight go on, and an adapter that was loaded while the server ran is still known."""
    world.load("blue", world.folders["blue"])
    with ThreadPoolExecutor(len(world.cases)) as pool:
        running = [pool.submit(world.generate, case) for case in world.cases]
        _victim(world, WORKER).kill()
        world.check([future.result() for future in running], world.cases)
    for frontend in [child for child in world.process.children() if child.cmdline()[-1] == FRONTEND]:
        frontend.kill()
    answers = [_patiently(world, case) for case in world.of("blue")]
    world.check(answers, world.of("blue"))


def _victim(world: World, module: str) -> psutil.Process:
    return next(child for child in world.process.children() if child.cmdline()[-1] == module)


def _patiently(world: World, case: Case) -> dict[str, Any]:
    """Ask until a frontend that was replaced is there and ready."""
    while True:
        try:
            return world.generate(case)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != 503:
                raise
        except httpx.TransportError:
            assert world.process.popen.poll() is None, world.process.lines
