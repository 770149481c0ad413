"""instructor, which demands the call of a tool by default."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from pydantic import BaseModel


class Sum(BaseModel):
    total: int


def test_instructor_gets_an_object(relay: Any) -> None:
    api = openai.OpenAI(base_url=relay.url + "/v1", api_key="none", timeout=60)
    client = instructor.from_openai(api, mode=instructor.Mode.TOOLS)
    answer = client.chat.completions.create(
        model="tiny", response_model=Sum, messages=[{"role": "user", "content": "What is 12 + 30?"}], temperature=0
    )
    assert isinstance(answer, Sum)
    assert relay.seen == [("/v1/chat/completions", 200)]
