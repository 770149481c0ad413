"""Text to token ids and back, for one model: prompts, growing answers, conversations. Long texts do not block the event loop."""

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

LONG_TEXT_CHARS = 8192  # a longer text is tokenized in a thread, so that it does not delay the loop's other streams
# A text of more than this many characters for each token of the context is probably too long: only its head is tokenized at first.
HEAD_CHARS_PER_TOKEN = 16
_TOKENIZING_THREADS = 2
_IDS_AT_ONCE = 1 << 15
_CONTEXT_TOKENS = 16  # last prompt tokens given to the decoder, whose output can depend on preceding tokens

logger = logging.getLogger(__name__)


class TextCodec:
    """Owner of the tokenizer, the chat template and the tokenizing threads. Use it from one event loop only."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | ChatTemplateError | None,
        *,
        context_length: int,
        vocab_size: int,
    ) -> None:
        """Create a codec. With an error in place of the template, conversations are refused with that error's message."""
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
        """Return the prompt's tokens, or only the last `num_kept`. Refuse a far too long text before all of it is tokenized."""
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
        """Keep `num_kept` tokens: the last ones of the text, and the special tokens around it."""
        before, after = self._tokenizer.num_added if request.add_special_tokens else (0, 0)
        num_dropped = len(ids) - num_kept
        if num_dropped <= 0:
            return ids
        if num_kept <= before + after:
            raise bad(
                "truncate_prompt_tokens",
                f"must be above {before + after}, the number of special tokens around a text, not {num_kept}",
            )
        return np.concatenate((ids[:before], ids[before + num_dropped :]))

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        check_text("text", text)
        ids: list[int] = (await self._encode(text, add_special_tokens)).tolist()
        return ids

    async def tokenize_pair(self, first: str, second: str) -> list[int]:
        """Return the ids of two texts that belong together, with the special tokens that the tokenizer puts around them."""
        check_text("text", first)
        check_text("text", second)
        if len(first) + len(second) <= LONG_TEXT_CHARS:
            return self._tokenizer.encode_pair(first, second)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._tokenizer.encode_pair, first, second)

    async def _encode(self, text: str, add_special_tokens: bool) -> Int32Array:
        if len(text) <= LONG_TEXT_CHARS:
            return int32_array(self._tokenizer.encode(text, add_special_tokens))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._encode_long, text, add_special_tokens)

    def _encode_long(self, text: str, add_special_tokens: bool) -> Int32Array:
        """Encode, and convert the ids in pieces between which the event loop can run: at once, half a million ids block it for 14 ms."""
        ids = self._tokenizer.encode(text, add_special_tokens)
        pieces = [int32_array(ids[at : at + _IDS_AT_ONCE]) for at in range(0, len(ids), _IDS_AT_ONCE)]
        return np.concatenate(pieces) if pieces else int32_array()

    def single_token(self, text: str) -> int | None:
        """Return the token that is this text, or None if it takes several."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return ids[0] if len(ids) == 1 else None

    def forbidden_ids(self, words: tuple[str, ...]) -> tuple[int, ...]:
        """Return the token ids of these words, both at the beginning of a text and behind a space.

        Raise RequestError (400) for a word of several tokens: whether one of them may be drawn would depend on the tokens before it.
        """
        if not words:
            return ()
        if words != self._last_words:  # usually all prompts of a batch forbid the same words
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
                    f"has {show(word)}, which is {len(alone)} tokens, but only words of one token can be forbidden: use logit_bias"
                    " to suppress single tokens, or stop to end the output before a text",
                )
            forbidden |= dict.fromkeys(alone + behind_space if len(behind_space) == 1 else alone)
        return tuple(forbidden)

    # ---- Ids to text

    def output(self, params: SamplingParams, prompt_ids: Int32Array, stop_ids: frozenset[int]) -> OutputText:
        """Return the incremental decoder, with stops, for one choice's text behind this prompt."""
        return OutputText(self.output_stream(params, prompt_ids[-_CONTEXT_TOKENS:].tolist()), params, stop_ids)

    def output_stream(self, params: SamplingParams, prompt_ids: Sequence[int]) -> TextStream:
        """Return an incremental decoder for a choice's text without stops; it also decodes the token that ends the choice."""
        tail = prompt_ids[-_CONTEXT_TOKENS:]
        return self._tokenizer.text_stream(tail, params.skip_special_tokens, params.spaces_between_special_tokens)

    def prompt_stream(self, skip_special_tokens: bool) -> TextStream:
        """Return an incremental decoder whose text, end to end, equals that of `detokenize`."""
        return self._tokenizer.text_stream([], skip_special_tokens)

    @property
    def num_added_before(self) -> int:
        """Number of special tokens that the tokenizer puts before a text."""
        return self._tokenizer.num_added[0]

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if len(ids) > self._context_length:  # decoding millions of ids would block the event loop for seconds
            raise bad("tokens", f"has {len(ids)} tokens, but the model's context holds {self._context_length}")
        check_ids("tokens", ids, self._vocab_size)
        return self._tokenizer.decode(ids, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token, as logprobs show it."""
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a single token, which need not be whole characters."""
        return self._tokenizer.token_bytes(token_id)

    def is_special(self, text: str) -> bool:
        """Return whether the text is a special token, which skip_special_tokens leaves out."""
        return text in self._tokenizer.special_texts

    # ---- Conversations

    def template_knows(self, variable: str) -> bool:
        """Return whether the chat template has this word, so that a variable of this name may have an effect."""
        return isinstance(self._template, ChatTemplate) and variable in self._template.source

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text of a conversation; raise RequestError (400) if the template refuses.

        The text includes special tokens: submit it with add_special_tokens=False.
        """
        if self._template is None:
            raise RequestError(
                400, "This model has no chat template: start the server with --chat-template.", "messages"
            )
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
    """Load the tokenizer and the chat template; raise StartError for what the user must change.

    An error in the model's own template is returned in its place, because only chat requests need it.
    """
    folder = model_folder if args.tokenizer_path is None else args.tokenizer_path
    tokenizer = load_tokenizer(folder)
    try:
        return tokenizer, load_chat_template(folder, tokenizer.special_tokens, args.chat_template)
    except ChatTemplateError as error:
        logger.warning("%s Chat requests will be refused.", error)
        return tokenizer, error
