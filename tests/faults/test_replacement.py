"""Processes of a real server are killed and stopped under load: clients notice a pause, and the answers are what they would have been."""

from __future__ import annotations

import concurrent.futures
import json
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import srt
from tests.support.poisoned_worker import POISON
from tests.support.server_process import END_S, ServerProcess

pytestmark = pytest.mark.e2e

WORKER, SCHEDULER, FRONTEND = "srt.managers.tp_worker", "srt.managers.scheduler", "srt.entrypoints.http_server"
LENGTH = 120
Chunks = dict[int, dict[str, Any]]  # the last of each choice
GREEDY = {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True}
DRAWN = {**GREEDY, "temperature": 0.8, "top_p": 0.9}
BODIES: list[dict[str, Any]] = [
    *({"text": f"Story {number}", "sampling_params": GREEDY} for number in range(3)),
    *({"text": f"Tale {number}", "sampling_params": {**DRAWN, "sampling_seed": number}} for number in range(3)),
    {"text": "Two of a kind", "sampling_params": {**DRAWN, "n": 2, "sampling_seed": 8}},
    {"text": "Said before", "sampling_params": {**DRAWN, "frequency_penalty": 0.5, "sampling_seed": 9}},
    {"text": "a fox and a cat " * 20, "sampling_params": {**DRAWN, "sampling_seed": 10}},
    {"text": "How likely", "sampling_params": GREEDY, "return_logprob": True, "logprob_start_len": 0},
]


def words_for(checkpoint: Path) -> list[str]:
    """Two ranks, two frontends."""
    words = ["--model-path", str(checkpoint), "--device", "cpu", "--dtype", "float32", "--port", "0"]
    return [*words, "--tp", "2", "--max-total-tokens", "16384", "--tokenizer-worker-num", "2"]


@pytest.fixture(scope="module")
def server(qwen3_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Whoever dies is replaced, however often."""
    words = [*words_for(qwen3_checkpoint), "--max-replacements", "1000", "--watchdog-timeout", "5"]
    with ServerProcess("srt.launch_server", words, tmp_path_factory.mktemp("replaced")) as process:
        process.wait_ready()
        yield process
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.lines


def url_of(server: ServerProcess) -> str:
    return server.wait_ready()


def victim_of(server: ServerProcess, module: str, number: int = 0) -> psutil.Process:
    return [child for child in server.children() if runs(child, module)][number]


def runs(child: psutil.Process, module: str) -> bool:
    try:
        return module in child.cmdline()[-1:]
    except psutil.NoSuchProcess:  # it has ended meanwhile, or is a zombie
        return False


def streamed(url: str, body: dict[str, Any], notice: Callable[[], None] = lambda: None) -> Chunks:
    """The last chunk of each choice. `notice` is called for every token: how many chunks they come in depends on the machine."""
    last: Chunks = {}
    with (
        httpx.Client(timeout=2 * END_S) as client,
        client.stream("POST", f"{url}/generate", json={**body, "stream": True}) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                before = last.get(index := chunk.get("index", 0))
                last[index] = chunk
                for _ in range(num_tokens(chunk) - (num_tokens(before) if before else 0)):
                    notice()
    return last


def num_tokens(chunk: dict[str, Any]) -> int:
    return int(chunk["meta_info"]["completion_tokens"])


def called(call: Callable[[], httpx.Response]) -> httpx.Response:
    """Call until the frontend that answers has met the engine: after a replacement, each meets the new one in its own time."""
    while (answer := call()).status_code == 503:
        pass
    return answer


def without_logprobs(chunks: Chunks) -> dict[int, Any]:
    """What must not depend on what happened meanwhile."""
    found = {}
    for index, chunk in sorted(chunks.items()):
        meta = chunk["meta_info"]
        counts = meta["prompt_tokens"], meta["completion_tokens"]
        tokens = [row[1] for row in logprob_rows(chunk)]
        found[index] = (chunk["text"], chunk["output_ids"], meta["finish_reason"], counts, tokens)
    return found


def logprob_rows(chunk: dict[str, Any]) -> list[list[Any]]:
    meta = chunk["meta_info"]
    return [*meta.get("input_token_logprobs", ()), *meta.get("output_token_logprobs", ())]


def check_same(found: list[Chunks], expected: list[Chunks]) -> None:
    assert [without_logprobs(chunks) for chunks in found] == [without_logprobs(chunks) for chunks in expected]
    for mine, others in zip(found, expected, strict=True):
        for index, chunk in mine.items():
            values = [row[0] for row in logprob_rows(others[index])[1:]]  # the first token of a prompt has none
            assert [row[0] for row in logprob_rows(chunk)[1:]] == pytest.approx(values, abs=1e-3)


def all_streamed(url: str, notice: Callable[[], None] = lambda: None) -> list[Chunks]:
    with concurrent.futures.ThreadPoolExecutor(len(BODIES)) as pool:
        return list(pool.map(lambda body: streamed(url, body, notice), BODIES))


class Trigger:
    """Does it once, at that call."""

    def __init__(self, at: int, action: Callable[[], object]) -> None:
        self._left = at
        self._action = action
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._action()


@pytest.fixture(scope="module")
def undisturbed(server: ServerProcess) -> list[Chunks]:
    return all_streamed(url_of(server))


def check_books(server: ServerProcess) -> None:
    """All processes agree on what there is, and nothing runs."""
    url, wait = url_of(server), {"timeout": END_S}
    assert called(lambda: httpx.post(f"{url}/flush_cache", params=wait, timeout=2 * END_S)).status_code == 200
    info = called(lambda: httpx.get(f"{url}/server_info", params={"deep": "true"}, timeout=END_S))
    state = info.json()["internal_states"][0]
    assert state["num_running"] == state["num_waiting"] == state["num_pinned"] == 0
    assert (state["num_free_pages"], state["num_free_slots"]) == (state["num_total_pages"], state["num_slots"])
    assert state["num_total_pages"] == 16384 // state["page_size"]


def check_files(server: ServerProcess) -> None:
    """Of engines that have ended none is left."""
    (run_dir,) = server.left_behind()
    kinds = Counter(path.name.rstrip("0123456789") for path in run_dir.iterdir())
    assert (kinds["f"], kinds["w"], kinds["rendezvous-"]) == (1, 1, 1)


@pytest.mark.parametrize("at", [1, 150, pytest.param(700, marks=pytest.mark.full)])
@pytest.mark.parametrize(("module", "number"), [(WORKER, 0), (WORKER, 1), (SCHEDULER, 0)])
def test_the_engine_is_replaced_and_every_answer_is_what_it_would_have_been(
    server: ServerProcess, undisturbed: list[Chunks], module: str, number: int, at: int
) -> None:
    again = len(server.lines_with("at work again"))
    victim = victim_of(server, module, number)
    check_same(all_streamed(url_of(server), Trigger(at, victim.kill)), undisturbed)
    server.wait_for("at work again", again + 1)
    assert not victim.is_running()
    check_books(server)
    check_files(server)


def test_a_worker_that_hangs_is_replaced(server: ServerProcess, undisturbed: list[Chunks]) -> None:
    again = len(server.lines_with("at work again"))
    victim = victim_of(server, WORKER, 1)
    check_same(all_streamed(url_of(server), Trigger(200, victim.suspend)), undisturbed)
    server.wait_for("at work again", again + 1)
    assert not victim.is_running()
    check_books(server)


def test_who_asks_while_the_engine_is_replaced_waits_for_the_answer(
    server: ServerProcess, undisturbed: list[Chunks]
) -> None:
    victim_of(server, SCHEDULER).kill()
    check_same(all_streamed(url_of(server)), undisturbed)


def num_connections(process: psutil.Process) -> int:
    return sum(one.status == psutil.CONN_ESTABLISHED for one in process.net_connections("tcp"))


def test_a_frontend_takes_its_own_clients_along_and_no_others(server: ServerProcess, undisturbed: list[Chunks]) -> None:
    url, frontends = url_of(server), {}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        body = {"text": "Endless", "sampling_params": {**GREEDY, "max_new_tokens": 1500}}
        all_there = threading.Barrier(9)
        barriers = [Trigger(3, all_there.wait) for _ in range(8)]
        running = [pool.submit(streamed, url, body, barrier) for barrier in barriers]
        all_there.wait(END_S)
        victim = max((victim_of(server, FRONTEND, number) for number in range(2)), key=num_connections)
        open_connections = num_connections(victim)
        victim.kill()
        psutil.wait_procs([victim])  # whom it accepts while it dies, it takes along
        aborted = called(lambda: httpx.post(f"{url}/abort_request", json={"abort_all": True}, timeout=END_S))
        assert aborted.status_code == 200
        for future in running:
            frontends[future] = future.exception(END_S)
    lost = [error for error in frontends.values() if error is not None]
    assert all(isinstance(error, httpx.TransportError) for error in lost), lost
    assert len(lost) == open_connections > 0
    check_same(all_streamed(url), undisturbed)
    check_books(server)


def test_a_request_of_which_workers_die_fails_alone(
    qwen3_checkpoint: Path, tmp_path: Path, undisturbed: list[Chunks]
) -> None:
    words = ["launch", *words_for(qwen3_checkpoint), "--tokenizer-worker-num", "1"]
    with ServerProcess("tests.support.poisoned_worker", words, tmp_path) as server:
        url = url_of(server)
        body = {"text": "Story 0", "sampling_params": {**GREEDY, "sampling_seed": POISON}}
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            poisoned: list[concurrent.futures.Future[httpx.Response]] = []

            def poison() -> None:
                poisoned.append(pool.submit(httpx.post, f"{url}/generate", json=body, timeout=2 * END_S))

            check_same(all_streamed(url, Trigger(100, poison)), undisturbed)
            answer = poisoned[0].result(END_S)
        assert answer.status_code == 500
        assert "The engine died twice while it ran this request and nothing else." in answer.text
        server.wait_for("at work again", 4)
        assert len(server.lines_with("at work again")) == 4  # two with others, two alone
        assert httpx.post(f"{url}/generate", json=body, timeout=2 * END_S).status_code == 500
        server.wait_for("at work again", 5)
        check_books(server)
        assert len(server.lines_with("at work again")) == 5  # who tries again needs one more
        check_books(server)
        server.send(signal.SIGTERM)
        assert server.wait() == 0


def test_nobody_goes_on_with_another_model(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    """Where somebody has written to the checkpoint meanwhile: a frontend's or an engine's successor would read that."""
    folder = Path(shutil.copytree(qwen3_checkpoint, tmp_path / "model"))
    with ServerProcess("srt.launch_server", words_for(folder), tmp_path) as server:
        url = url_of(server)

        def change() -> None:
            (folder / "model.safetensors").touch()
            victim_of(server, WORKER, 1).kill()

        with pytest.raises(AssertionError, match="The engine has ended: The files in "):
            streamed(url, {"text": "Endless", "sampling_params": {**GREEDY, "max_new_tokens": 400}}, Trigger(3, change))
        assert server.wait() == 1
        assert server.lines[-1].endswith(
            f"The files in {folder} have changed since the server was started: start it anew."
        )
        assert len(server.lines_with("are replaced")) == 1


def test_a_runtime_goes_on_too(qwen3_checkpoint: Path) -> None:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_total_tokens": 8192}
    with srt.Runtime(model_path=str(qwen3_checkpoint), **options) as runtime:
        expected = runtime.generate("Once", DRAWN | {"sampling_seed": 1})["output_ids"]
        stream = runtime.generate("Once", DRAWN | {"sampling_seed": 1}, stream=True)
        chunks = [next(stream)]
        (worker,) = [c for c in psutil.Process(runtime.pid).children() if c.cmdline()[-1] == WORKER]
        worker.kill()
        assert [*chunks, *stream][-1]["output_ids"] == expected
        assert runtime.generate("Once", DRAWN | {"sampling_seed": 1})["output_ids"] == expected
