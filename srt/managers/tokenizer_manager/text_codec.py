"""Text to token ids and back, for one model: prompts, answers as they grow, conversations. Long texts do not hold up the loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from srt.managers.tokenizer_manager.api_types import GenerateInput, RequestError
from srt.managers.tokenizer_manager.detokenizer import OutputText
from srt.managers.tokenizer_manager.request_checks import bad, check_ids, check_text
from srt.protocol.messages import Int32Array, int32_array
from srt.sampling.parameter_checks import show
from srt.sampling.sampling_params import SamplingParams
from srt.server_args import ServerArgs
from srt.utils.chat_template import ChatTemplate, ChatTemplateError
from srt.utils.text_stream import TextStream
from srt.utils.tokenizer import Tokenizer, load_chat_template, load_tokenizer

LONG_TEXT_CHARS = 8192  # a longer one is tokenized in a thread: the loop's other streams would feel it
HEAD_CHARS_PER_TOKEN = (
    16  # of a text with more, the beginning is tokenized first: as a rule that shows that it is too long
)
_TOKENIZING_THREADS = 2
_IDS_AT_ONCE = 1 << 15
_CONTEXT_TOKENS = 16  # of a prompt, for decoders that look at what is before

logger = logging.getLogger(__name__)


class TextCodec:
    """Owner of the tokenizer, the chat template and the threads that tokenize. One event loop only."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | ChatTemplateError | None,
        *,
        context_length: int,
        vocab_size: int,
    ) -> None:
        """With an error for a template, conversations are refused with its words."""
        self._tokenizer = tokenizer
        self._template = template
        self._context_length = context_length
        self._vocab_size = vocab_size
        self._last_words: tuple[str, ...] = ()
        self._last_forbidden: tuple[int, ...] = ()
        self._threads = ThreadPoolExecutor(_TOKENIZING_THREADS, thread_name_prefix="tokenize")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- Text to ids

    async def prompt_ids(self, request: GenerateInput, num_kept: int | None = None) -> list[int] | Int32Array:
        """All of the prompt's tokens, or the last `num_kept`. RequestError 400 for a text that is far too long, before all of it is
        tokenized."""
        if request.text is None:
            return (request.input_ids or [])[-num_kept if num_kept else None :]
        if num_kept is not None:
            return self._last_tokens(await self._encode(request.text, request.add_special_tokens), num_kept, request)
        most = self._context_length
        head = request.text[: max(HEAD_CHARS_PER_TOKEN * most, 2 * LONG_TEXT_CHARS)]
        if len(head) < len(request.text) and len(await self._encode(head, request.add_special_tokens)) > 2 * most:
            raise bad("text", f"has more than {2 * most} tokens, but the model's context holds {most}")
        return await self._encode(request.text, request.add_special_tokens)

    def _last_tokens(self, ids: Int32Array, num_kept: int, request: GenerateInput) -> Int32Array:
        """The last of a text, and what the tokenizer puts around it."""
        before, after = self._tokenizer.num_added if request.add_special_tokens else (0, 0)
        num_dropped = len(ids) - num_kept
        if num_dropped <= 0:
            return ids
        if num_kept <= before + after:
            raise bad(
                "truncate_prompt_tokens",
                f"must be above {before + after}, the tokens that the tokenizer puts around a text, not {num_kept}",
            )
        return np.concatenate((ids[:before], ids[before + num_dropped :]))

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        check_text("text", text)
        ids: list[int] = (await self._encode(text, add_special_tokens)).tolist()
        return ids

    async def _encode(self, text: str, add_special_tokens: bool) -> Int32Array:
        if len(text) <= LONG_TEXT_CHARS:
            return int32_array(self._tokenizer.encode(text, add_special_tokens))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._encode_long, text, add_special_tokens)

    def _encode_long(self, text: str, add_special_tokens: bool) -> Int32Array:
        """In pieces, between which the loop may run: all at once half a million ids would take it 14 ms."""
        ids = self._tokenizer.encode(text, add_special_tokens)
        pieces = [int32_array(ids[at : at + _IDS_AT_ONCE]) for at in range(0, len(ids), _IDS_AT_ONCE)]
        return np.concatenate(pieces) if pieces else int32_array()

    def forbidden_ids(self, words: tuple[str, ...]) -> tuple[int, ...]:
        """The tokens that these words are, at the beginning of a text and behind a space. RequestError 400 for one of several tokens:
        which of them may be drawn would depend on what is before."""
        if not words:
            return ()
        if words != self._last_words:  # as a rule all prompts of a batch forbid the same
            self._last_words, self._last_forbidden = words, self._forbid(words)
        return self._last_forbidden

    def _forbid(self, words: tuple[str, ...]) -> tuple[int, ...]:
        bare = [word.lstrip() for word in words]
        ids = self._tokenizer.encode_all([form for word in bare for form in (word, " " + word)])
        forbidden: dict[int, None] = {}
        for word, alone, behind_space in zip(words, ids[::2], ids[1::2], strict=True):
            if len(alone) != 1:
                raise bad(
                    "bad_words",
                    f"has {show(word)}, which is {len(alone)} tokens: only words of one token can be forbidden, logit_bias"
                    " holds back single tokens, and stop ends the output before a text",
                )
            forbidden |= dict.fromkeys(alone + behind_space if len(behind_space) == 1 else alone)
        return tuple(forbidden)

    # ---- Ids to text

    def output(self, params: SamplingParams, prompt_ids: Int32Array, stop_ids: frozenset[int]) -> OutputText:
        """The text of one choice, which grows behind this prompt."""
        return OutputText(self.output_stream(params, prompt_ids[-_CONTEXT_TOKENS:].tolist()), params, stop_ids)

    def output_stream(self, params: SamplingParams, prompt_ids: Sequence[int]) -> TextStream:
        """The same without stops, and with the token that ends it."""
        tail = prompt_ids[-_CONTEXT_TOKENS:]
        return self._tokenizer.text_stream(tail, params.skip_special_tokens, params.spaces_between_special_tokens)

    def prompt_stream(self, skip_special_tokens: bool) -> TextStream:
        """What `detokenize` makes of ids, as it grows."""
        return self._tokenizer.text_stream([], skip_special_tokens)

    @property
    def num_added_before(self) -> int:
        """How many tokens stand before those of a text."""
        return self._tokenizer.num_added[0]

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if len(ids) > self._context_length:  # decoding millions would take the loop seconds
            raise bad("tokens", f"has {len(ids)} tokens, but the model's context holds {self._context_length}")
        check_ids("tokens", ids, self._vocab_size)
        return self._tokenizer.decode(ids, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token by itself, as logprobs show it."""
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The same as the bytes it stands for, which need not be whole characters."""
        return self._tokenizer.token_bytes(token_id)

    # ---- Conversations

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text, special tokens included: submit it with add_special_tokens=False. RequestError 400 if the template refuses."""
        if self._template is None:
            raise RequestError(400, "This model has no chat template: the server needs --chat-template.", "messages")
        if isinstance(self._template, ChatTemplateError):
            raise RequestError(400, str(self._template), "messages")
        try:
            text = self._template.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=variables,
            )
        except ChatTemplateError as error:
            raise RequestError(400, str(error), "messages") from error
        check_text("messages", text)
        return text


def load_text_files(model_folder: str, args: ServerArgs) -> tuple[Tokenizer, ChatTemplate | ChatTemplateError | None]:
    """The tokenizer and the chat template; an error in the model's own template, which not everybody needs, is returned.
    StartError for what the user must change."""
    folder = model_folder if args.tokenizer_path is None else args.tokenizer_path
    tokenizer = load_tokenizer(folder)
    try:
        return tokenizer, load_chat_template(folder, tokenizer.special_tokens, args.chat_template)
    except ChatTemplateError as error:
        logger.warning("%s Chat requests will be refused.", error)
        return tokenizer, error
