"""instructor, which asks for a tool or a schema by default: neither is supported yet, and the answer must say so at once."""

from __future__ import annotations

from typing import Any

import instructor
import openai
import pytest
from instructor.core import InstructorRetryException
from pydantic import BaseModel


class Sum(BaseModel):
    total: int


@pytest.mark.parametrize(
    ("mode", "named"),
    [
        (instructor.Mode.TOOLS, "tools"),
        (instructor.Mode.JSON, "response_format"),
        (instructor.Mode.JSON_SCHEMA, "response_format"),
    ],
)
def test_instructor_reads_what_is_missing(relay: Any, mode: instructor.Mode, named: str) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=relay.url + "/v1", api_key="none", timeout=60), mode=mode)
    with pytest.raises(InstructorRetryException, match=named):
        client.chat.completions.create(
            model="tiny", response_model=Sum, messages=[{"role": "user", "content": "What is 12 + 30?"}]
        )
    assert relay.seen == [("/v1/chat/completions", 400)]
