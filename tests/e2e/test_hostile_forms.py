"""Forms of all kinds from a random model, through the real server: random schemas hold, and hostile ones delay no neighbour."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Server
from tests.e2e.schema_answers import PATIENCE_S, ask_all
from tests.support.hostile_constraints import HOSTILE

pytestmark = pytest.mark.e2e

NUM_SCHEMAS = 20
NEIGHBOUR = {
    "input_ids": [5, 6, 7],
    "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True, "temperature": 0},
    "stream": True,
}


def test_answers_to_random_schemas_validate(server: Server) -> None:
    report = ask_all(server.url, range(NUM_SCHEMAS))
    print(report)
    assert report.failures == []
    assert report.num_finished >= 0.9 * NUM_SCHEMAS


def test_hostile_forms_end_and_a_neighbour_takes_part_in_every_step(server: Server) -> None:
    """Each is answered or refused. The steps that the engine makes meanwhile are the neighbour's: it gets a token from each."""
    with server.client() as client, client.stream("POST", "/generate", json=NEIGHBOUR) as stream:
        chunks = stream.iter_lines()
        tokens_before, steps_before = next_count(chunks), num_steps(server)
        with ThreadPoolExecutor(2) as clients:
            answers = list(clients.map(lambda form: ask(server, form), HOSTILE.values()))
        steps = num_steps(server) - steps_before
        tokens = 0
        while tokens < steps - len(HOSTILE) - 2:  # a prompt may have a step of its own, and two steps are on their way
            tokens = next_count(chunks) - tokens_before
    by_name = dict(zip(HOSTILE, answers, strict=True))
    assert all(status in (200, 400) or is_busy(status, said) for status, said in answers), by_name
    assert all(status == 200 or len(said) < 1000 for status, said in answers), by_name
    assert steps > len(HOSTILE), "the neighbour goes on while forms are tried"
    after = httpx.post(server.url + "/generate", json={**NEIGHBOUR, "stream": False, "sampling_params": {"regex": "a"}})
    assert after.json()["text"] == "a"


def ask(server: Server, form: dict[str, Any]) -> tuple[int, str]:
    body = {"prompt": [5, 6], "max_tokens": 3, **form}
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=PATIENCE_S)
    return answer.status_code, answer.text


def is_busy(status: int, said: str) -> bool:
    """Return whether the answer asks to try again: the machine that runs the tests does other things as well."""
    return status == 503 and "too busy to compile" in said


def num_steps(server: Server) -> int:
    """How many steps the engine has made."""
    (state,) = httpx.get(server.url + "/server_info", timeout=PATIENCE_S).json()["internal_states"]
    return int(state["num_steps"])


def next_count(chunks: Any) -> int:
    """How many tokens the neighbour has, as its next chunk says."""
    for line in chunks:
        if line.startswith("data: {"):
            return int(json.loads(line.removeprefix("data: "))["meta_info"]["completion_tokens"])
    raise AssertionError("the neighbour has ended")
