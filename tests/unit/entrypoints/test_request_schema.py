"""From JSON to a checked object: what a wrong body may cost."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from srt.entrypoints.native_shapes import GenerateBody
from srt.entrypoints.openai.schema import ChatBody, CompletionBody
from srt.entrypoints.request_schema import RequestBody
from srt.managers.tokenizer_manager.api_types import RequestError

MANY = 5000
WRONG_LISTS: list[tuple[type[RequestBody], dict[str, Any]]] = [
    (CompletionBody, {"prompt": ["a"] * MANY + [1.5] * MANY}),
    (CompletionBody, {"prompt": "a", "stop": [1] * MANY}),
    (ChatBody, {"messages": [7] * MANY}),
    (GenerateBody, {"input_ids": ["a"] * MANY}),
    (GenerateBody, {"input_ids": [[1.5] * MANY] * 3}),
    (GenerateBody, {"text": "a", "sampling_params": [7] * MANY}),
]


@pytest.mark.parametrize(("schema", "body"), WRONG_LISTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_list_of_wrong_entries_is_one_error_and_not_one_for_each(
    schema: type[RequestBody], body: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(body)
    assert caught.value.error_count() <= 4  # of a union, one for each member
    with pytest.raises(RequestError):
        schema.parse(body)


def test_the_first_unknown_field_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    def validated(*_: object) -> None:
        raise AssertionError("all fields were looked at")

    monkeypatch.setattr(GenerateBody, "model_validate", validated)
    with pytest.raises(RequestError, match=r"^bogus is not a known parameter") as caught:
        GenerateBody.parse({"text": "a", "bogus": 1, **{f"x{i}": 1 for i in range(MANY)}})
    assert caught.value.parameter == "bogus"
