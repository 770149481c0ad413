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
NEIGHBOUR = {"prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True, "temperature": 0, "stream": True}


def test_answers_to_random_schemas_validate(server: Server) -> None:
    report = ask_all(server.url, range(NUM_SCHEMAS))
    print(report)
    assert report.failures == []
    assert report.num_finished >= 0.9 * NUM_SCHEMAS


def test_hostile_forms_end_and_a_neighbour_takes_part_in_every_step(server: Server) -> None:
    """Each is answered or refused. Of the steps that the engine makes meanwhile, a stream beside them has a row in each but a few."""
    with server.client() as client, client.stream("POST", "/v1/completions", json=NEIGHBOUR) as stream:
        chunks = stream.iter_lines()  # dropping it would end the stream
        next(chunks)
        before = counters(server)
        with ThreadPoolExecutor(4) as clients:
            answers = list(clients.map(lambda form: ask(server, form), HOSTILE.values()))
        added = {name: count - before[name] for name, count in counters(server).items()}
    by_name = dict(zip(HOSTILE, answers, strict=True))
    assert all(status in (200, 400) or is_busy(status, said) for status, said in answers), by_name
    assert all(status == 200 or len(said) < 1000 for status, said in answers), by_name
    num_drawn = sum(num_tokens(said) for status, said in answers if status == 200)
    # A row that is planned ahead for an answer that ends is counted, and its result is dropped.
    of_neighbour = added["num_rows"] - num_drawn - added["num_dropped_rows"]
    # A prompt may have a step of its own, and two steps are on their way.
    assert added["num_steps"] > len(HOSTILE) and of_neighbour >= added["num_steps"] - len(HOSTILE) - 2, added
    body = {"prompt": [5, 6], "regex": "a"}
    after = httpx.post(server.url + "/v1/completions", json=body, timeout=PATIENCE_S).json()
    assert after["choices"][0]["text"] == "a"


def ask(server: Server, form: dict[str, Any]) -> tuple[int, str]:
    body = {"prompt": [5, 6], "max_tokens": 12, **form}
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=PATIENCE_S)
    return answer.status_code, answer.text


def counters(server: Server) -> dict[str, int]:
    """What the scheduler has counted: its steps and the rows in them."""
    (state,) = httpx.get(server.url + "/server_info", timeout=PATIENCE_S).json()["internal_states"]
    return {name: int(state[name]) for name in ("num_steps", "num_rows", "num_dropped_rows")}


def num_tokens(answer: str) -> int:
    return int(json.loads(answer)["usage"]["completion_tokens"])


def is_busy(status: int, said: str) -> bool:
    """Return whether the answer asks to try again: the machine that runs the tests does other things as well."""
    return status == 503 and "too busy to compile" in said


def num_steps(server: Server) -> int:
    """How many steps the engine has made."""
    (state,) = httpx.get(server.url + "/server_info", timeout=PATIENCE_S).json()["internal_states"]
    return int(state["num_steps"])
