"""What completions and chat completions have in common: identity, usage, logprobs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from srt.entrypoints.openai.schema import OpenAIBody, StreamOptions
from srt.managers.io_struct import ChoiceUpdate, Finish, TokenLogprob
from srt.managers.request_schema import bad_parameter
from srt.managers.tokenizer_manager import TokenizerManager
from srt.protocol.labels import numbered


@dataclass(frozen=True, slots=True)
class Identity:
    """What every part of an answer says of itself."""

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, body: OpenAIBody, model: str) -> Identity:
        """The client's rid is the answer's id, so that /abort_request knows it; otherwise one is drawn."""
        if body.rid == "":
            raise bad_parameter("rid", "must not be empty")
        return cls(body.rid or f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model)

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def rids(self, count: int) -> list[str]:
        """One label per prompt."""
        return [self.id] if count == 1 else numbered(self.id, count)


class Usage:
    """Counts the tokens of a call: each prompt once, however many choices it has."""

    def __init__(self, options: StreamOptions) -> None:
        self.in_stream = bool(options.include_usage)
        self.in_every_chunk = bool(options.continuous_usage_stats)
        self._latest: dict[tuple[int, int], ChoiceUpdate] = {}

    def take(self, prompt: int, update: ChoiceUpdate) -> None:
        self._latest[prompt, update.index] = update

    def write(self) -> dict[str, Any]:
        prompts: dict[int, int] = {}
        cached: dict[int, int] = {}
        for (prompt, _), update in self._latest.items():
            prompts[prompt] = update.prompt_tokens
            # Later choices find the prompt in the cache because the first has computed it: the least is what was saved.
            cached[prompt] = min(cached.get(prompt, update.cached_tokens), update.cached_tokens)
        num_prompt, num_output = sum(prompts.values()), sum(u.completion_tokens for u in self._latest.values())
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        }

    def in_chunk(self) -> dict[str, Any]:
        """The usage field of a chunk that carries text: the count so far if asked for, null if only the last chunk has it."""
        if self.in_every_chunk:
            return {"usage": self.write()}
        return {"usage": None} if self.in_stream else {}


def finish_fields(finish: Finish | None) -> dict[str, Any]:
    if finish is None:
        return {"finish_reason": None, "matched_stop": None}
    return {"finish_reason": finish.kind, "matched_stop": finish.matched}


class ChatLogprobs:
    """logprobs.content: one entry a token, with its best alternatives."""

    def __init__(self, engine: TokenizerManager) -> None:
        self._engine = engine

    def write(self, tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
        content = [
            {**self._token(one.logprob, one.token_id), "top_logprobs": [self._token(*pair) for pair in one.top]}
            for one in tokens
        ]
        return {"content": content, "refusal": None}

    def _token(self, logprob: float | None, token_id: int) -> dict[str, Any]:
        return {
            "token": self._engine.text.token_text(token_id),
            "logprob": logprob,
            "bytes": list(self._engine.text.token_bytes(token_id)),
        }


class CompletionLogprobs:
    """The older shape: parallel lists. Offsets count characters of the choice's text, token by token."""

    def __init__(self, engine: TokenizerManager) -> None:
        self._engine = engine
        self._offset = 0

    def write(self, tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
        texts: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for one in tokens:
            text = self._text(one.token_id)
            texts.append(text)
            logprobs.append(one.logprob)
            tops.append(self._top(text, one))
            offsets.append(self._offset)
            self._offset += len(text)
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, text: str, one: TokenLogprob) -> dict[str, float] | None:
        """The best tokens, and the chosen one if it is not among them."""
        if one.logprob is None:
            return None
        best: dict[str, float] = {}
        for logprob, token_id in one.top:
            best.setdefault(self._text(token_id), logprob)
        best[text] = one.logprob  # also where another token has the same text
        return best

    def _text(self, token_id: int) -> str:
        """Of tokens that are not whole characters the bytes, as OpenAI writes them: U+FFFD would be one key for all of them."""
        data = self._engine.text.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + repr(data)[2:-1]
