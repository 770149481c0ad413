"""/tokenize and /detokenize over ASGI with a fake engine, whose tokens are characters."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.entrypoints.fake_engine import CONTEXT, World


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_a_text_becomes_ids_and_a_list_becomes_lists(path: str) -> None:
    world = World()
    one = world.post(path, {"model": "tiny", "prompt": "hi"}).json()
    assert one == {"tokens": [104, 105], "count": 2, "max_model_len": CONTEXT}
    many = world.post(path, {"prompt": ["hi", ""], "add_special_tokens": False}).json()
    assert many == {"tokens": [[104, 105], []], "count": [2, 0], "max_model_len": CONTEXT}


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
def test_ids_become_a_text_and_lists_a_list(path: str) -> None:
    world = World()
    assert world.post(path, {"tokens": [104, 105]}).json() == {"text": "hi"}
    assert world.post(path, {"tokens": []}).json() == {"text": ""}
    assert world.post(path, {"tokens": [[104], []], "skip_special_tokens": False}).json() == {"text": ["h", ""]}


@pytest.mark.parametrize(
    ("path", "body", "parameter"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": [1]}, "prompt"),
        ("/tokenize", {"prompt": ["a"] * 5000}, "prompt"),
        ("/tokenize", {"prompt": "a", "bogus": 1}, "bogus"),
        ("/detokenize", {"tokens": "hi"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [[1], [1 << 40]]}, "tokens"),
        ("/detokenize", {"tokens": [[]] * 5000}, "tokens"),
    ],
)
def test_what_is_wrong_is_named(path: str, body: dict[str, Any], parameter: str) -> None:
    response = World().post(path, body)
    assert response.status_code == 400
    assert parameter in response.json()["error"]["message"]


def test_the_model_must_be_served() -> None:
    assert World().post("/tokenize", {"model": "gpt-4", "prompt": "hi"}).status_code == 404
