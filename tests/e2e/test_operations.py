"""What an operator relies on: health, metrics, logs, keys, certificates, traces. One server with all of it switched on."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.server_process import END_S, ROOT, ServerProcess
from tests.support.trace_checks import check_trace

pytestmark = pytest.mark.e2e

CERTIFICATE = ROOT / "tests/support/localhost.pem"  # of localhost, for a century; its key's password is "secret"
USER, ADMIN = {"authorization": "Bearer user"}, {"authorization": "Bearer admin"}
SHORT = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Operated:
    url: str
    process: ServerProcess
    client: httpx.Client
    notified: socket.socket

    def generate(self, request_id: str, **fields: Any) -> httpx.Response:
        body = {"text": "The capital of France is", "sampling_params": SHORT, **fields}
        return self.client.post("/generate", json=body, headers={**USER, "x-request-id": request_id})

    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.process.lines]

    def wait_for_log(self, text: str) -> dict[str, Any]:
        line: dict[str, Any] = json.loads(self.process.wait_for(text))
        return line

    def metric(self, name: str) -> float:
        """The sum of the samples of this name."""
        families = text_string_to_metric_families(self.client.get("/metrics").text)
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)


@pytest.fixture(scope="module")
def operated(qwen3_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    tmp = tmp_path_factory.mktemp("operated")
    words = ["--model-path", str(qwen3_checkpoint), "--device", "cpu", "--port", "0", "--dtype", "float32"]
    words += ["--max-total-tokens", "8192", "--max-running-requests", "2", "--tokenizer-worker-num", "2"]
    words += ["--api-key", "user", "--admin-api-key", "admin", "--enable-metrics", "--decode-log-interval", "10"]
    words += ["--log-format", "json", "--log-requests", "--log-requests-level", "2"]
    words += ["--ssl-certfile", str(CERTIFICATE), "--ssl-keyfile-password", "secret"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(str(tmp / "notify"))
        notified.settimeout(END_S)
        environment = {"NOTIFY_SOCKET": str(tmp / "notify"), "HOME": "/proc/nowhere"}  # that cannot be written to
        with ServerProcess("srt.launch_server", words, tmp, environment) as process:
            url = json.loads(process.wait_for("Ready at "))["message"].split("Ready at ")[1].split()[0]
            # Every request its own connection, so that the kernel gives it to either frontend.
            limits = httpx.Limits(max_keepalive_connections=0)
            trust = ssl.create_default_context(cafile=CERTIFICATE)
            with httpx.Client(base_url=url, timeout=END_S, verify=trust, limits=limits) as client:
                yield Operated(url, process, client, notified)
            process.send(signal.SIGTERM)
            assert process.wait() == 0, process.lines
            while (word := notified.recv(200)).startswith(b"READY=1"):
                pass  # which the test of it has not taken, if it was not chosen
            assert word == b"STOPPING=1\nSTATUS=Stopping"


@contextmanager
def frozen(process: psutil.Process) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def wait_for(client: httpx.Client, path: str, status: int) -> httpx.Response:
    while (answer := client.get(path)).status_code != status:
        assert answer.status_code in (200, 503)
    return answer


def srt_health(operated: Operated) -> tuple[int, str]:
    """It finds the server, its port and its TLS by itself."""
    environment = os.environ | {"TMPDIR": str(operated.process.tmp)}
    command = [sys.executable, "-m", "srt", "health"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=END_S)
    return done.returncode, done.stdout


def test_systemd_is_told_when_the_server_is_ready(operated: Operated) -> None:
    assert operated.notified.recv(200) == f"READY=1\nSTATUS=Ready at {operated.url}".encode()


@pytest.mark.parametrize("name", ["scheduler 0", "worker 0"])
def test_a_server_with_a_frozen_process_does_not_call_itself_healthy(operated: Operated, name: str) -> None:
    client = operated.client
    processes = wait_for(client, "/health", 200).json()["processes"]
    assert set(processes) == {"supervisor", "frontend 0", "frontend 1", "scheduler 0", "worker 0"}
    with frozen(psutil.Process(processes[name]["pid"])):
        told = wait_for(client, "/ready", 503).json()
        assert told["reason"].startswith(f"{name.capitalize()} has given no sign of life for")
        assert told["ready"] is False
        assert [client.get(path).status_code for path in ("/health", "/ping")] == [503, 503]
        assert operated.metric("srt:is_ready") == 0
        code, said = srt_health(operated)
        assert (code, said.startswith(f"{operated.url}: {name.capitalize()} has given no")) == (1, True)
    wait_for(client, "/ready", 200)
    assert [client.get(path).status_code for path in ("/health", "/health_generate")] == [200, 200]
    assert srt_health(operated) == (0, f"{operated.url}: well\n")


def test_a_full_house_is_healthy(operated: Operated) -> None:
    """All slots are taken by requests that do not end: a token is drawn all the same, and they lose nothing."""
    params = {**SHORT, "max_new_tokens": 1200}
    body = {"text": ["a", "b", "c"], "sampling_params": params, "stream": True}
    retracted = operated.metric("srt:retractions_total")
    with operated.client.stream("POST", "/generate", json=body, headers=USER) as stream:
        lines = (line for line in stream.iter_lines() if line)
        seen = [next(lines)]
        while operated.metric("srt:retractions_total") == retracted:  # an answer of the last second counts for all
            assert operated.client.get("/health_generate").status_code == 200
            seen.append(next(lines))
        told = [json.loads(line[6:]) for line in (*seen, *lines) if line != "data: [DONE]"]
    last = {one["index"]: one for one in told}
    assert [last[index]["meta_info"]["completion_tokens"] for index in range(3)] == [1200] * 3


def test_metrics_tell_of_all_frontends_whichever_is_asked(operated: Operated) -> None:
    names = ("sglang:num_requests_total", "sglang:generation_tokens_total", "sglang:time_to_first_token_seconds_count")
    before = [operated.metric(name) for name in names]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(operated.generate, (f"m{i}" for i in range(8))))
    assert [answer.status_code for answer in answers] == [200] * 8
    for _ in range(4):
        assert [operated.metric(name) - old for name, old in zip(names, before, strict=True)] == [8, 40, 8]
    assert operated.metric("sglang:max_total_num_tokens") == 8192
    assert operated.metric("srt:step_time_seconds_count") > 0


def test_every_line_of_every_process_is_json_with_its_name_and_requests_can_be_followed(operated: Operated) -> None:
    operated.generate("follow-me", rid="my-rid")
    ended = operated.wait_for_log("Request my-rid ended")
    assert (ended["level"], ended["request_id"], ended["how"], ended["completion_tokens"]) == (
        "info",
        "follow-me",
        "length",
        5,
    )
    came = next(line for line in operated.log() if line["message"].startswith("Request my-rid arrived"))
    assert (came["process"], came["prompt"]) == (ended["process"], "The capital of France is")
    assert operated.wait_for_log("waiting;")["process"] == "scheduler 0"
    processes = {line["process"] for line in operated.log()}
    assert {"supervisor", "scheduler 0"} < processes
    assert {"frontend 0", "frontend 1"} & processes


def test_what_is_logged_can_be_changed_for_all_frontends_by_the_admin_alone(operated: Operated) -> None:
    off = {"log_requests": False}
    assert operated.client.post("/configure_logging", json=off, headers=USER).status_code == 403
    assert operated.client.post("/configure_logging", json=off, headers=ADMIN).status_code == 200
    for i in range(4):
        operated.generate("unlogged", rid=f"unlogged-{i}")
    operated.client.post("/configure_logging", json={"log_requests": True, "log_requests_level": 0}, headers=ADMIN)
    operated.generate("logged", rid="logged-again")
    operated.wait_for_log("Request logged-again ended")
    assert not any("unlogged" in line for line in operated.process.lines)


def test_a_trace_shows_requests_and_steps_over_all_processes(operated: Operated, tmp_path: Path) -> None:
    client = operated.client
    assert client.post("/stop_profile", headers=ADMIN).status_code in (200, 400)
    started = client.post("/start_profile", json={"output_dir": str(tmp_path / "new")}, headers=ADMIN)
    assert started.status_code == 200, started.text
    assert client.post("/start_profile", headers=ADMIN).status_code == 400
    for i in range(4):
        operated.generate(f"traced-{i}", stream=i % 2 == 0)
    told = client.post("/stop_profile", headers=ADMIN).json()
    assert (told["path"], told["missing_processes"]) == (started.json()["path"], [])
    trace = json.loads(Path(told["path"]).read_text())
    check_trace(trace)
    events = trace["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == ["frontend 0", "frontend 1", "scheduler 0", "worker 0"]
    seen = {(names[event["pid"]].split()[0], event["name"]) for event in events if event["ph"] in "Xb"}
    assert seen >= {
        *(("frontend", name) for name in ("POST /generate", "request", "tokenize", "submit", "detokenize")),
        *(("scheduler", name) for name in ("receive", "waiting", "running", "plan", "result", "send tokens")),
        *(("worker", name) for name in ("launch", "forward", "answer")),
    }
    steps = [event["args"]["step"] for event in events if event["name"] == "forward"]
    assert len(steps) == len(set(steps)) >= 4 * 5
    assert {e["args"]["request_id"] for e in events if e["ph"] == "b" and e["name"] == "request"} == {
        f"traced-{i}" for i in range(4)
    }
    roads: dict[tuple[str, int], list[tuple[str, str]]] = {}
    for event in events:
        if event["ph"] in "stf":
            place = names[event["pid"]].split()[0]
            roads.setdefault((event["cat"], event["id"]), []).append((event["ph"], place))
    by_kind = {
        kind: [road for (name, _), road in roads.items() if name == kind] for kind in ("request", "step", "batch")
    }
    assert len(by_kind["request"]) == 4
    for road in by_kind["request"]:
        assert road[0] == ("s", "frontend") and road[-1] == ("f", "frontend")
        assert road[1:-1] and set(road[1:-1]) == {("t", "scheduler")}
    assert by_kind["step"] == [[("s", "scheduler"), ("t", "worker"), ("f", "scheduler")]] * len(steps)
    assert by_kind["batch"] and all(road == [("s", "scheduler"), ("f", "frontend")] for road in by_kind["batch"])


def test_a_trace_is_whole_whatever_becomes_of_its_requests(operated: Operated, tmp_path: Path) -> None:
    """They run when it begins and when it ends, are aborted, end by a stop string, or lose their client."""
    client, long = operated.client, {**SHORT, "max_new_tokens": 2000}
    body = {"text": "The capital of France is", "stream": True, "sampling_params": long}
    with client.stream("POST", "/generate", json={**body, "rid": "before"}, headers=USER) as before:
        told = before.iter_raw()
        next(told)
        path = client.post("/start_profile", json={"output_dir": str(tmp_path)}, headers=ADMIN).json()["path"]
        client.post("/abort_request", json={"rid": "before"}, headers=ADMIN)  # at once, or it could end by itself
        assert b"".join(told).endswith(b"data: [DONE]\n\n")
    said = operated.generate("said").json()["text"]
    operated.generate("stopped", sampling_params={**SHORT, "stop": said[1:2]})
    operated.generate("two", sampling_params={**SHORT, "n": 2})
    with client.stream("POST", "/generate", json=body, headers=USER) as left:
        next(left.iter_raw())
    with client.stream("POST", "/generate", json={**body, "rid": "behind"}, headers=USER) as behind:
        told = behind.iter_raw()
        next(told)
        assert client.post("/stop_profile", headers=ADMIN).json()["path"] == path
        client.post("/abort_request", json={"rid": "behind"}, headers=ADMIN)
        assert b"".join(told).endswith(b"data: [DONE]\n\n")
    trace = json.loads(Path(path).read_text())
    check_trace(trace)
    ends = {
        e["args"].get("how") or e["args"].get("cut")
        for e in trace["traceEvents"]
        if e["ph"] == "e" and e["name"] == "request"
    }
    assert ends == {"length", "stop", "abort", True}


def test_a_trace_may_end_after_so_many_steps(operated: Operated, tmp_path: Path) -> None:
    body = {"output_dir": str(tmp_path), "num_steps": 3}
    path = Path(operated.client.post("/start_profile", json=body, headers=ADMIN).json()["path"])
    operated.generate("three-steps")
    operated.wait_for_log(f"The trace {path} has")
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event["name"] == "result" for event in events) == 3


def test_a_trace_may_begin_after_so_many_steps_as_sglangs_clients_ask(operated: Operated, tmp_path: Path) -> None:
    body: dict[str, object] = {
        "output_dir": str(tmp_path),
        "activities": ["CPU", "GPU"],
        "num_steps": "1",
        "start_step": "3",
    }
    body |= {"profile_by_stage": False, "profile_stages": None, "profile_prefix": "warm", "merge_profiles": True}
    path = Path(operated.client.post("/start_profile", json=body, headers=ADMIN).json()["path"])
    assert path.name.startswith("warm-srt-trace-")
    operated.generate("five-steps")
    operated.wait_for_log(f"The trace {path} has")
    trace = json.loads(path.read_text())
    check_trace(trace)
    assert sum(event["name"] == "result" for event in trace["traceEvents"]) == 1


def test_plain_http_is_not_served_where_https_is(operated: Operated) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(operated.url.replace("https://", "http://") + "/health", timeout=END_S)
    assert operated.client.get("/health").status_code == 200


def test_server_info_tells_no_secret_and_what_sglang_tells(operated: Operated) -> None:
    answer = operated.client.get("/server_info", headers=USER)
    info = answer.json()
    for key in ("user", "admin", "secret"):
        assert f'"{key}"' not in answer.text
        assert f"{key} " not in info["launch_command"]
    assert "--tokenizer-worker-num 2" in info["launch_command"]
    (state,) = info["internal_states"]
    assert state["effective_max_running_requests_per_dp"] == 2
    assert state["memory_usage"]["token_capacity"] == 8192
    assert state["last_gen_throughput"] > 0
    assert (info["status"], info["max_total_num_tokens"]) == ("ready", 8192)
