"""Fuzzes stored responses in random order: asked for, continued, cancelled, deleted.   python -m tests.e2e.stored_fuzz --cases 2000

Each client knows what has become of its own responses, so every answer is compared with what it must be. A case fails when the answer
is another one, when it is a 5xx, or when there is none in time. At the end the server must generate, and nothing may be left running.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from tests.e2e.fuzz import NUM_CLIENTS, PATIENCE_S, Report, check_afterwards
from tests.support.server_process import ServerProcess

PATH = "/v1/responses"
STRANGE_IDS = ("resp_no", "..", "%", "ä", "a b", "x" * 3000, "cancel", "input_items", "resp_1/input_items", "?", "\r\n")
TOOL = {"type": "function", "name": "get", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = {"type": "function_call", "call_id": "call_1", "name": "get", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "7"}
FORM = {"type": "json_schema", "name": "x", "schema": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}}
ENDED = ("completed", "incomplete")


class StoredResponses:
    """One client and what it knows of its responses."""

    def __init__(self, url: str, draws: random.Random, report: Report) -> None:
        self._client = httpx.Client(base_url=url, timeout=PATIENCE_S)
        self._draws = draws
        self._report = report
        self._stored: dict[str, bool] = {}  # by id: whether it was begun in the background
        self._gone: list[str] = []

    def run(self, num_cases: int) -> None:
        draws = self._draws
        for _ in range(num_cases):
            draws.choice(
                (self._create, self._create, self._continue, self._get, self._delete, self._cancel, self._stray)
            )()
        for response_id in [*self._stored]:
            self._send("DELETE", response_id, 200)
        self._client.close()

    # ---- Cases

    def _create(self, **more: Any) -> None:
        """Ask for a response in one of many ways, of which some are wrong."""
        draws = self._draws
        body: dict[str, Any] = {
            "input": draws.choice(
                ["hi", "", [{"role": "user", "content": "hi"}], [CALL, OUTPUT], [CALL], [OUTPUT], []]
            ),
            "max_output_tokens": draws.choice([1, 2, 8]),
            "temperature": draws.choice([0, 1]),
            **more,
        }
        if draws.random() < 0.3:
            body |= draws.choice([{"stream": True}, {"store": False}, {"tools": [TOOL]}, {"text": {"format": FORM}}])
        if draws.random() < 0.3:
            body |= {"background": True, "max_output_tokens": draws.choice([1, 4, 2000]), "ignore_eos": True}
        if draws.random() < 0.1:
            body["request_id"] = draws.choice([*self._stored, *self._gone, "a/b", ""])
        self._note(body, self._ask("POST", PATH, body))

    def _continue(self) -> None:
        known = [*self._stored, *self._gone[-3:], "resp_no"]
        self._create(previous_response_id=self._draws.choice(known))

    def _get(self) -> None:
        if (response_id := self._any_id()) is None:
            return
        answer = self._send("GET", response_id, 200)
        if answer.get("id") != response_id or answer.get("background") is not self._stored[response_id]:
            self._report.fail(f"GET of {response_id} is answered by another response: {answer}")

    def _delete(self) -> None:
        if (response_id := self._any_id()) is None:
            return
        answer = self._send("DELETE", response_id, 200)
        if answer.get("deleted") is not True:
            self._report.fail(f"DELETE of {response_id}: {answer}")
        del self._stored[response_id]
        self._gone.append(response_id)
        for method, rest in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
            self._send(method, response_id, 404, rest)

    def _cancel(self) -> None:
        if (response_id := self._any_id()) is None:
            return
        is_in_background = self._stored[response_id]
        answer = self._send("POST", response_id, 200 if is_in_background else 400, "/cancel")
        if is_in_background and answer.get("status") not in ("cancelled", *ENDED):
            self._report.fail(f"cancelled, {response_id} is {answer.get('status')}")
        if answer.get("status") == "cancelled" and self._send("GET", response_id, 200).get("status") != "cancelled":
            self._report.fail(f"{response_id} goes on behind its end")

    def _stray(self) -> None:
        """Ask for what is not there."""
        draws = self._draws
        response_id = draws.choice([*STRANGE_IDS, *self._stored])
        rest = draws.choice(["", "/cancel", "/input_items", "/", "/cancel/"])
        method = draws.choice(["GET", "POST", "DELETE", "PUT", "PATCH"])
        if response_id in self._stored and rest in ("", "/cancel"):
            return  # the other cases do this, and know what follows
        self._ask(method, f"{PATH}/{quote(response_id, safe='/')}{rest}", None, allowed=(400, 404, 405, 501))

    # ---- Answers

    def _any_id(self) -> str | None:
        return self._draws.choice([*self._stored]) if self._stored else None

    def _send(self, method: str, response_id: str, status: int, rest: str = "") -> dict[str, Any]:
        return self._ask(method, f"{PATH}/{quote(response_id)}{rest}", None, allowed=(status,))

    def _ask(self, method: str, path: str, body: Any, allowed: tuple[int, ...] = (200, 400)) -> dict[str, Any]:
        """Return the answer, or the last event's response of a stream. A wrong status is a failure, and its answer empty."""
        what = f"{method} {path[:200]} {json.dumps(body)[:400]}"
        try:
            answer = self._client.request(method, path, json=body) if body else self._client.request(method, path)
        except httpx.HTTPError as error:
            self._report.statuses[0] += 1
            self._report.fail(f"{what}: no answer: {type(error).__name__} {error}")
            return {}
        self._report.statuses[answer.status_code] += 1
        if answer.status_code not in allowed:
            self._report.fail(f"{what}: {answer.status_code} {answer.text[:200]!r}")
            return {}
        if answer.headers["content-type"].startswith("text/event-stream"):
            (*_, last) = [line for line in answer.text.splitlines() if line.startswith("data: {")]
            answered: dict[str, Any] = json.loads(last.removeprefix("data: "))["response"]
        else:
            answered = answer.json()
        return answered

    def _note(self, body: Mapping[str, Any], response: Mapping[str, Any]) -> None:
        """Remember a new response. Check what it says of itself."""
        if "error" in response and response.get("object") != "response":
            return
        if not response:
            return
        is_in_background = bool(body.get("background"))
        if (response["status"] == "in_progress") is not is_in_background:
            self._report.fail(f"{json.dumps(body)[:300]}: {response['status']}")
        if response["previous_response_id"] in (*self._gone, "resp_no"):
            self._report.fail(f"{json.dumps(body)[:300]}: it continues what is not there")
        if body.get("store") is not False:
            self._stored[response["id"]] = is_in_background
            self._gone = [one for one in self._gone if one != response["id"]]


def fuzz_stored(url: str, num_cases: int, seed: int) -> Report:
    """Let clients send about so many cases to a server with --enable-response-store."""
    report = Report()
    clients = [StoredResponses(url, random.Random(f"{seed} {number}"), report) for number in range(NUM_CLIENTS)]
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        list(threads.map(lambda client: client.run(-(-num_cases // NUM_CLIENTS)), clients))
    check_afterwards(url, report)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the stored responses of a server.")
    parser.add_argument("--cases", type=int, default=2000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="which (default: %(default)s)")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = ["--model-path", "tiny", "--port", "0", "--device", "cpu", "--max-total-tokens", "16384"]
        with ServerProcess("srt.launch_server", [*server, "--enable-response-store"], Path(folder)) as process:
            report = fuzz_stored(process.wait_ready(), words.cases, words.seed)
    print("\n".join(report.failures[:20]))
    print(report)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
