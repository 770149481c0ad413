"""What an answer tells of its prompts and tokens beside the text: token ids as vLLM writes them."""

from __future__ import annotations

from typing import Any

from srt.entrypoints.openai.schema import OpenAIBody
from srt.managers.io_struct import ChoiceUpdate


class PromptFacts:
    """Writes the fields that were asked for, and none besides."""

    def __init__(self, body: OpenAIBody) -> None:
        self.has_ids = body.return_token_ids

    def of_output(self, update: ChoiceUpdate) -> dict[str, Any]:
        """The ids of the output; in a stream, of what is new of it."""
        return {"token_ids": list(update.ids)} if self.has_ids else {}

    def of_prompt(self, update: ChoiceUpdate) -> dict[str, Any]:
        """The prompt's ids, of the first update of a choice."""
        return {"prompt_token_ids": list(update.prompt_ids)} if self.has_ids else {}
