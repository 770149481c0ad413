"""Optional fields of an answer: the token ids of prompt and output, and the prompt's logprobs in vLLM's format."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from srt.entrypoints.answers import OutputFields, PromptFields, PromptLogprob
from srt.entrypoints.openai.schema import OpenAIBody
from srt.managers.tokenizer_manager.api_types import ChoiceUpdate, TokenLogprob


class PromptFacts:
    """The writer of the optional fields that a request asks for."""

    def __init__(self, body: OpenAIBody, token_text: Callable[[int], str]) -> None:
        self.has_ids = body.return_token_ids
        self._top = body.prompt_logprobs
        self._token_text = token_text

    def of_output(self, update: ChoiceUpdate) -> OutputFields:
        """Return the ids of the output; in a stream, those of the update."""
        return {"token_ids": list(update.ids)} if self.has_ids else {}

    def of_prompt(self, update: ChoiceUpdate) -> PromptFields:
        """Return the prompt's ids and logprobs, from the first update of a choice."""
        fields: PromptFields = {"prompt_token_ids": list(update.prompt_ids)} if self.has_ids else {}
        if self._top is not None:
            fields["prompt_logprobs"] = [self._position(one, self._top) for one in update.prompt_logprobs]
        return fields

    def _position(self, one: TokenLogprob, top: int) -> dict[str, PromptLogprob] | None:
        """Return the prompt's token and then the likeliest ones; None for the first token, which has no logprob."""
        if one.logprob is None:
            return None
        ranks = {token_id: rank for rank, (_, token_id) in enumerate(one.top, 1)}
        pairs: Sequence[tuple[float, int]] = ((one.logprob, one.token_id), *one.top[:top])
        return {
            str(token_id): {
                "logprob": logprob,
                "rank": ranks.get(token_id),
                "decoded_token": self._token_text(token_id),
            }
            for logprob, token_id in pairs
        }
