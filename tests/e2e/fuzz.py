"""Fuzzes a real server: schemathesis on its own description, then raw bytes.   python -m tests.e2e.fuzz --cases 10000

A case fails when the answer is a 5xx that the description does not name (500, 502 and 504 always do), when there is none in time,
or when a 200 is not what the description says. At the end the server must generate, and nothing may be left running.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import jsonschema_rs
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode, Response
from schemathesis.core.result import Ok

from tests.support.random_checkpoint import CheckpointSpec, write_random_checkpoint
from tests.support.server_process import ServerProcess

PATIENCE_S = 300.0  # for an answer: the largest case draws 72,500 tokens, which took 26 s on a busy machine alone and more beside others
RAW_PATIENCE_S = 20.0
RAW_SHARE = 0.15
NUM_CLIENTS = 8
_MAX_ROUNDS = 60
NEVER = (500, 502, 504)
LEFT_OUT = (
    "/page/stats",  # a stream that goes on until its reader leaves
    "/init_weights_update_group",  # waits a minute for a trainer, and all requests wait with it
    "/save_sharded_model",  # writes folders wherever a path leads
)
CONTEXT = 192  # tokens: a case should not take longer than it must

AnyCase = Case[Any]


@dataclass(slots=True)
class Report:
    """What came back, and what should not have."""

    statuses: Counter[int] = field(default_factory=Counter)  # 0: the connection was closed without an answer
    failures: list[str] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)  # of cases that the description allows
    slowest_s: float = 0.0
    slowest: str = ""

    @property
    def num_cases(self) -> int:
        return sum(self.statuses.values())

    @property
    def share_of_200(self) -> float:
        return self.statuses[200] / max(1, self.num_cases)

    def took(self, seconds: float, what: str) -> None:
        if seconds > self.slowest_s:
            self.slowest_s, self.slowest = seconds, what[:600]

    def fail(self, what: str) -> None:
        self.failures.append(what[:600])

    def __str__(self) -> str:
        counts = ", ".join(f"{status or 'closed'}: {count}" for status, count in sorted(self.statuses.items()))
        return (
            f"{self.num_cases} cases, {self.share_of_200:.1%} answered 200 ({counts}); slowest {self.slowest_s:.2f} s;"
            f" {len(self.failures)} failures"
        )


@contextmanager
def tiny_server() -> Iterator[str]:
    """The URL of a real engine with a random checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, tmp = Path(folder, "checkpoint"), Path(folder, "tmp")
        tmp.mkdir()
        write_random_checkpoint(checkpoint, CheckpointSpec(num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1))
        words = ["--model-path", str(checkpoint), "--port", "0", "--device", "cpu", "--dtype", "float32"]
        words += ["--context-length", str(CONTEXT), "--max-total-tokens", "8192", "--max-running-requests", "128"]
        with ServerProcess("srt.launch_server", words, tmp) as process:
            yield process.wait_ready()


def fuzz(url: str, num_cases: int, seed: int) -> Report:
    report = Report()
    num_raw = int(num_cases * RAW_SHARE)
    _by_description(url, num_cases - num_raw, seed, report)
    _by_bytes(url, num_raw, random.Random(seed), report)
    check_afterwards(url, report)
    return report


# ---- What the description allows, and what it forbids


def _by_description(url: str, num_cases: int, seed: int, report: Report) -> None:
    document = httpx.get(url + "/openapi.json", timeout=PATIENCE_S).json()
    for path in LEFT_OUT:
        del document["paths"][path]
    operations = [
        result.ok()
        for result in schemathesis.openapi.from_dict(document).get_all_operations()
        if isinstance(result, Ok)
    ]
    shares = {operation.label: _weight(operation.method, operation.path, document) for operation in operations}
    goal = num_cases / sum(shares.values())
    for operation in operations:
        allowed = max(1, round(goal * shares[operation.label] * 0.75))
        forbidden = max(1, round(goal * shares[operation.label] * 0.25))
        for mode, count in ((GenerationMode.POSITIVE, allowed), (GenerationMode.NEGATIVE, forbidden)):
            _run(url, operation, mode, count, seed, document, report)


def _weight(method: str, path: str, document: dict[str, Any]) -> float:
    operation = document["paths"][path][method]
    if "501" in operation["responses"]:
        return 0.2
    fields = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    return 0.5 + len(fields.get("properties", {}))


def _run(
    url: str, operation: Any, mode: GenerationMode, count: int, seed: int, document: dict[str, Any], report: Report
) -> None:
    """`count` cases of one operation. Hypothesis may know fewer that differ: then it is given another seed."""
    left = count
    for number in range(_MAX_ROUNDS):
        cases = _draw(operation, mode, min(left, 250), seed * _MAX_ROUNDS + number)
        if mode is GenerationMode.POSITIVE:
            for case in cases:
                case.body = _as_the_server_needs(_with_integers(case.body), operation.path)
        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            for answer in clients.map(partial(_call, url), cases):
                _judge(answer, mode, document, report)
        left -= len(cases)
        if left <= 0 or not cases:
            return


def _draw(operation: Any, mode: GenerationMode, most: int, seed: int) -> list[AnyCase]:
    """None, where nothing can be wrong with the operation."""
    cases: list[AnyCase] = []

    @seeded(seed)
    @settings(
        max_examples=most,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def collect(case: AnyCase) -> None:
        cases.append(case)

    with contextlib.suppress(Unsatisfiable):
        collect()
    return cases[:most]


@dataclass(frozen=True, slots=True)
class Answer:
    case: AnyCase
    response: Response | Exception
    took_s: float

    @property
    def what(self) -> str:
        return f"{self.case.method} {self.case.path} {self.case.query} {self.case.body!r}"


def _call(url: str, case: AnyCase) -> Answer:
    began = time.monotonic()
    response: Response | Exception
    try:
        response = case.call(base_url=url, timeout=PATIENCE_S)
    except Exception as error:
        response = error
    if case.path == "/pause_generation":
        httpx.post(url + "/continue_generation", timeout=PATIENCE_S).raise_for_status()
    return Answer(case, response, time.monotonic() - began)


def _judge(answer: Answer, mode: GenerationMode, document: dict[str, Any], report: Report) -> None:
    case, response = answer.case, answer.response
    report.took(answer.took_s, answer.what)
    if isinstance(response, Exception):
        report.statuses[0] += 1
        report.fail(f"{answer.what}: no answer: {type(response).__name__} {response}")
        return
    status = response.status_code
    report.statuses[status] += 1
    described = document["paths"][case.operation.path][case.method.lower()]["responses"]
    if status in NEVER or (status >= 500 and str(status) not in described):
        report.fail(f"{answer.what}: {status} {response.content[:200]!r}")
    elif status == 400 and mode is GenerationMode.POSITIVE:
        report.refusals[f"{case.path}: {re.sub('[0-9]+', '#', response.json()['error']['message'])[:100]}"] += 1
    elif status == 200 and "json" in str(response.headers.get("content-type")):
        schema = described["200"]["content"]["application/json"]["schema"]
        if not jsonschema_rs.validator_for(schema).is_valid(response.json()):
            report.fail(f"{answer.what}: an answer that is not described: {response.content[:200]!r}")


def _with_integers(value: Any) -> Any:
    """JSON Schema takes 5.0 for an integer, this server does not: half of the allowed cases would be refused for nothing else."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_with_integers(one) for one in value]
    if isinstance(value, dict):
        return {name: _with_integers(one) for name, one in value.items()}
    return value


def _as_the_server_needs(body: Any, path: str) -> Any:
    """The body, with what the description cannot say: half of the allowed cases would be refused for nothing else.

    The description allows the replicas of any server, and this one has a single one. /generate takes a text or ids, and needs one.
    """
    if not isinstance(body, dict):
        return body
    named = {name: 0 if name in ("routed_dp_rank", "data_parallel_rank") else value for name, value in body.items()}
    if path == "/generate" and named.get("text") is None and named.get("input_ids") is None:
        named["text"] = "hi"
    return named


# ---- Raw bytes

_BODIES = (
    b'{"text": "hi", "sampling_params": {"max_new_tokens": 2}}',
    b'{"text": "hi", "stream": true, "sampling_params": {"max_new_tokens": 2}}',
    b'{"prompt": [5, 6], "max_tokens": 2, "stream": true}',
    b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}',
    b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": true}',
    b'{"input": "hi", "max_output_tokens": 2, "stream": true}',
)
_PATHS = (b"/generate", b"/generate", b"/v1/completions", b"/v1/chat/completions", b"/v1/messages", b"/v1/responses")
_HEADERS = (
    b"content-length: 5",
    b"content-length: -1",
    b"content-length: 99999999999999999999",
    b"transfer-encoding: chunked",
    b"transfer-encoding: gzip, chunked",
    b"expect: 100-continue",
    b"connection: close",
    b"connection: upgrade\r\nupgrade: websocket",
    b"upgrade: h2c",
    b"content-type: text/plain",
    b"content-encoding: gzip",
    b"host: \xff",
    b"x: " + b"y" * 70_000,
    b"\x00: \x00",
    b"no colon",
    b" folded: line",
)


def _by_bytes(url: str, num_cases: int, rng: random.Random, report: Report) -> None:
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    for _ in range(num_cases):
        sent = _raw_request(rng)
        began = time.monotonic()
        try:
            answer = _exchange(parts.hostname, parts.port, sent)
        except TimeoutError:
            report.statuses[0] += 1
            report.fail(f"{sent[:300]!r}: neither answered nor closed within {RAW_PATIENCE_S:g} s")
            continue
        report.took(time.monotonic() - began, repr(sent))
        answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        first = answer[9:12]
        status = int(first) if answer.startswith(b"HTTP/1.1 ") and first.isdigit() else 0
        report.statuses[status] += 1
        if status >= 500:
            report.fail(f"{sent[:300]!r}: {answer[:300]!r}")


def _raw_request(rng: random.Random) -> bytes:
    """A good request, made worse in up to four ways."""
    which = rng.randrange(len(_BODIES))
    method, path, body = rng.choice((b"POST", b"POST", b"POST", b"GET", b"PUT", b"BREW")), _PATHS[which], _BODIES[which]
    headers = [
        b"host: test",
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        b"connection: close",
    ]
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        headers.insert(rng.randrange(len(headers) + 1), rng.choice(_HEADERS))
    whole = method + b" " + path + b" HTTP/1.1\r\n" + b"\r\n".join(headers) + b"\r\n\r\n" + body
    for _ in range(rng.choice((0, 0, 1, 2, 4))):
        whole = _damage(whole, rng)
    return whole


def _damage(whole: bytes, rng: random.Random) -> bytes:
    at, end = sorted(rng.randrange(len(whole) + 1) for _ in range(2))
    match rng.randrange(6):
        case 0:
            return whole[:at]
        case 1:
            return whole[:at] + rng.randbytes(rng.randrange(1, 9)) + whole[at:]
        case 2:
            return whole[:at] + whole[end:]
        case 3:
            return whole[:at] + whole[at:end] * 2 + whole[end:]
        case 4:
            return whole.replace(b"\r\n", rng.choice((b"\n", b"\r", b"\r\n\r\n", b" \r\n")), rng.randrange(1, 3))
        case _:
            return whole[:at] + bytes(256 - byte & 255 for byte in whole[at : at + 4]) + whole[at + 4 :]


def _exchange(host: str, port: int, sent: bytes) -> bytes:
    """All that comes until the server closes; the client says that it has no more to send."""
    with socket.create_connection((host, port), RAW_PATIENCE_S) as connection:
        answer = b""
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                answer += part
        except (ConnectionResetError, BrokenPipeError):
            pass  # closed with something of ours unread
        return answer


# ---- Afterwards


def check_afterwards(url: str, report: Report) -> None:
    generated = httpx.get(url + "/health_generate", timeout=PATIENCE_S)
    if generated.status_code != 200:
        report.fail(f"afterwards /health_generate answers {generated.status_code} {generated.text}")
    flushed = httpx.post(url + "/flush_cache", params={"timeout": 60}, timeout=PATIENCE_S)
    if flushed.status_code != 200:
        report.fail(f"afterwards something runs: {flushed.text}")
    info = httpx.get(url + "/server_info", params={"deep": "true"}, timeout=PATIENCE_S).json()
    left = {name: value for name, value in info["frontend"].items() if name.startswith("live_") and value}
    state = info["internal_states"][0]
    if left or state["num_free_pages"] != state["num_total_pages"]:
        report.fail(
            f"afterwards something is left: {left}, {state['num_free_pages']} of {state['num_total_pages']} pages free"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz a server by its own description and by raw bytes.")
    parser.add_argument("--cases", type=int, default=10_000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="which (default: %(default)s)")
    parser.add_argument("--url", help="of a running server; it is paused, flushed and aborted (default: a tiny one)")
    parser.add_argument("--verbose", action="store_true", help="say why cases that the description allows were refused")
    words = parser.parse_args()
    if words.url:
        report = fuzz(words.url.rstrip("/"), words.cases, words.seed)
    else:
        with tiny_server() as url:
            report = fuzz(url, words.cases, words.seed)
    if words.verbose:
        for refusal, count in report.refusals.most_common(40):
            print(f"{count:6} {refusal}")
        print(f"slowest: {report.slowest}")
    for failure in report.failures[:20]:
        print(failure)
    print(report)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
