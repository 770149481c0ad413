"""Parts of the answers that completions and chat completions share: identity, usage (also of cached tokens), logprobs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from srt.entrypoints.answers import (
    ChatLogprobLists,
    ChatToken,
    ChatTokenWithTop,
    ChunkUsage,
    CompletionLogprobLists,
    Ending,
    Head,
    ReasoningUsage,
    SglExt,
    TokenUsage,
)
from srt.entrypoints.native_shapes import cached_tokens_details
from srt.entrypoints.openai.message_parts import MessageParts
from srt.entrypoints.openai.schema import ChatBody, CompletionBody, OpenAIBody
from srt.entrypoints.streaming import DONE, event
from srt.managers.tokenizer_manager.api_types import ChoiceUpdate, Finish, GenerateInput, TokenLogprob
from srt.managers.tokenizer_manager.tokenizer_manager import TokenizerManager
from srt.protocol.labels import numbered
from srt.utils.text_stream import TextStream


@dataclass(frozen=True, slots=True)
class Identity:
    """The identifying fields that every object of an answer carries."""

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, body: OpenAIBody, model: str) -> Identity:
        """Return a new identity. Its id is the client's rid, so that /abort_request finds it, or a random one behind `prefix`."""
        return cls(body.name or prefix + uuid.uuid4().hex, int(time.time()), model)

    def head(self, kind: str) -> Head:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def rids(self, count: int) -> list[str]:
        """Return one label for each prompt."""
        return [self.id] if count == 1 else numbered(self.id, count)


class Usage:
    """The token counts of a call. Each prompt counts once, for any number of choices."""

    def __init__(self, body: OpenAIBody) -> None:
        options = body.check_stream_options()
        self.in_stream = bool(options.include_usage)
        self._has_details = body.return_cached_tokens_details
        self.in_every_chunk = bool(options.continuous_usage_stats)
        self._latest: dict[tuple[int, int], ChoiceUpdate] = {}
        self.parts: Sequence[
            MessageParts
        ] = ()  # which count the reasoning of a chat's choices, if it is told from the text

    def add(self, prompt: int, update: ChoiceUpdate) -> None:
        self._latest[prompt, update.index] = update

    def write(self) -> TokenUsage:
        prompts = {prompt: update.prompt_tokens for (prompt, _), update in self._latest.items()}
        num_prompt, num_output = sum(prompts.values()), sum(u.completion_tokens for u in self._latest.values())
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": self._num_cached()},
            **self._reasoning(),
        }

    def _reasoning(self) -> ReasoningUsage:
        if not any(parts.counts_reasoning for parts in self.parts):
            return {}
        num_tokens = sum(parts.num_reasoning_tokens for parts in self.parts)
        return {"reasoning_tokens": num_tokens, "completion_tokens_details": {"reasoning_tokens": num_tokens}}

    def _num_cached(self) -> int:
        cached: dict[int, int] = {}
        for (prompt, _), update in self._latest.items():
            # Later choices find the prompt in the cache because the first one computed it: only the smallest count was saved work.
            cached[prompt] = min(cached.get(prompt, update.cached_tokens), update.cached_tokens)
        return sum(cached.values())

    def sglext(self) -> SglExt:
        """Return the answer's sglext field, if it was asked for."""
        if not self._has_details:
            return {}
        return {"sglext": {"cached_tokens_details": cached_tokens_details(self._num_cached())}}

    def in_chunk(self) -> ChunkUsage:
        """Return the usage field of a chunk with text: the counts so far if asked for, null if only the last chunk has them."""
        if self.in_every_chunk:
            return {"usage": self.write()}
        return {"usage": None} if self.in_stream else {}


def last_chunks(head: Head, usage: Usage) -> bytes:
    """Return the events behind the choices of a stream: sglext and usage, if asked for, and [DONE]."""
    sglext = usage.sglext()
    events = event({**head, "choices": [], **sglext, **usage.in_chunk()}) if sglext else b""
    if usage.in_stream:
        events += event({**head, "choices": [], "usage": usage.write()})
    return events + DONE


def finish_fields(finish: Finish | None) -> Ending:
    if finish is None:
        return {"finish_reason": None, "matched_stop": None}
    return {"finish_reason": finish.kind, "matched_stop": finish.matched}


class ChatLogprobs:
    """The writer of chat completions' logprobs: one entry for each token, with its best alternatives."""

    def __init__(self, engine: TokenizerManager, body: ChatBody) -> None:
        self._engine = engine
        self._top = body.top_logprobs or 0
        self._as_ids = body.return_tokens_as_token_ids

    def write(self, tokens: Iterable[TokenLogprob]) -> ChatLogprobLists:
        content: list[ChatTokenWithTop] = [
            {
                **self._token(one.logprob, one.token_id),
                "top_logprobs": [self._token(*pair) for pair in one.top[: self._top]],
            }
            for one in tokens
        ]
        return {"content": content, "refusal": None}

    def _token(self, logprob: float | None, token_id: int) -> ChatToken:
        return {
            "token": id_name(token_id) if self._as_ids else self._engine.text.token_text(token_id),
            "logprob": logprob,
            "bytes": list(self._engine.text.token_bytes(token_id)),
        }


class CompletionLogprobs:
    """The writer of completions' logprobs for one choice: parallel lists. Offsets count characters of its text, including an echoed
    prompt."""

    def __init__(self, engine: TokenizerManager, body: CompletionBody, request: GenerateInput, echo: str) -> None:
        """Prepare for one choice. Its updates must carry the prompt's ids, because a token's text can depend on the tokens before."""
        self._engine = engine
        self._top = body.logprobs or 0
        self._as_ids = body.return_tokens_as_token_ids
        self._has_prompt = body.echo
        self._request = request
        self._echo = echo
        self._starts: _TokenStarts | None = None  # for the output; set by the first update

    def write(self, update: ChoiceUpdate) -> CompletionLogprobLists:
        """Return the lists for an update. Call it for all updates, in order."""
        if self._starts is None:
            stream = self._engine.text.output_stream(self._request.params, update.prompt_ids)
            self._starts = _TokenStarts(stream, len(self._echo))
        prompt = update.prompt_logprobs if self._has_prompt else ()
        tokens = (*prompt, *update.output_logprobs)
        texts = [self._text(one.token_id) for one in tokens]
        offsets = self._prompt_offsets(prompt, texts[: len(prompt)]) if prompt else []
        offsets += self._starts.of(update.output_logprobs, texts[len(prompt) :])
        return {
            "tokens": [self._name(one.token_id) for one in tokens],
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [self._best(one) for one in tokens],
            "text_offset": offsets,
        }

    def _prompt_offsets(self, tokens: Sequence[TokenLogprob], texts: Sequence[str]) -> list[int]:
        """Return the offsets of the prompt's tokens in its echo, which repeats a text as it came: with special tokens written in it,
        without those that the tokenizer added before it."""
        codec, is_text = self._engine.text, self._request.text is not None
        num_added = codec.num_added_before if is_text and self._request.add_special_tokens else 0
        starts = _TokenStarts(codec.prompt_stream(self._request.params.skip_special_tokens and not is_text), 0)
        return [0] * num_added + starts.of(tokens[num_added:], texts[num_added:])

    def _best(self, one: TokenLogprob) -> dict[str, float] | None:
        """Return the best tokens' logprobs by name, and the chosen token's."""
        if one.logprob is None:
            return None
        best: dict[str, float] = {}
        for logprob, token_id in one.top[: self._top]:
            best.setdefault(self._name(token_id), logprob)
        best[self._name(one.token_id)] = one.logprob  # overrides another token with the same text
        return best

    def _name(self, token_id: int) -> str:
        return id_name(token_id) if self._as_ids else self._text(token_id)

    def _text(self, token_id: int) -> str:
        """Return a token's text; for one that is not whole characters its bytes, as OpenAI writes them: with U+FFFD all of these would
        share one key."""
        data = self._engine.text.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + repr(data)[2:-1]


def id_name(token_id: int) -> str:
    """Return a token's name in the format of return_tokens_as_token_ids."""
    return f"token_id:{token_id}"


class _TokenStarts:
    """The offsets of tokens in the text that a stream decodes from them. All tokens of a character begin where the character does."""

    def __init__(self, stream: TextStream, start: int) -> None:
        """Start behind `start` characters of text."""
        self._stream = stream
        self._end = start

    def of(self, tokens: Sequence[TokenLogprob], texts: Sequence[str]) -> list[int]:
        """Return the offsets of the next tokens; `texts` are their texts when decoded one by one."""
        return [self._next(one.token_id, text) for one, text in zip(tokens, texts, strict=True)]

    def _next(self, token_id: int, text: str) -> int:
        begin, piece = self._end, self._stream.push(token_id)
        self._end += len(piece)
        # The piece may begin with an unfinished character that this token breaks off.
        return self._end - len(text) if piece.endswith(text) else begin
