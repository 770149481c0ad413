"""instructor, which demands the call of a tool by default: that is not supported yet, and the answer must say so at once."""

from __future__ import annotations

from typing import Any

import instructor
import openai
import pytest
from instructor.core import InstructorRetryException
from pydantic import BaseModel


class Sum(BaseModel):
    total: int


def test_instructor_reads_what_is_missing(relay: Any) -> None:
    api = openai.OpenAI(base_url=relay.url + "/v1", api_key="none", timeout=60)
    client = instructor.from_openai(api, mode=instructor.Mode.TOOLS)
    with pytest.raises(InstructorRetryException, match="tool_choice"):
        client.chat.completions.create(
            model="tiny", response_model=Sum, messages=[{"role": "user", "content": "What is 12 + 30?"}]
        )
    assert relay.seen == [("/v1/chat/completions", 400)]
