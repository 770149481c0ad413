"""Convert token ids to text one token at a time: never half a character, never a text that later tokens would change."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from itertools import dropwhile
from typing import Any, Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_HELD_TOKENS = 8  # a character is at most four tokens; text that is still broken after eight stays broken
_MAX_UNFINISHED_BYTES = 3
_CONTEXT_TOKENS = 6  # enough of the prompt to keep a decoder from treating the answer as the beginning of a text
_INNER_BYTE = re.compile("<0x[89AB][0-9A-F]>")  # any byte of a UTF-8 character but its first


class TextStream(Protocol):
    """The text of one choice. The pieces that `push` and finally `finish` return add up to the whole text."""

    def push(self, token_id: int) -> str:
        """Return the text that this token makes certain; may be empty."""
        ...

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Push each of the tokens and return their text."""
        ...

    def finish(self) -> str:
        """Return the rest, with U+FFFD for incomplete characters. Nothing may be pushed afterwards."""
        ...


class ByteTable(dict[int, bytes]):
    """The bytes of each token id in a byte-level vocabulary, filled on demand. Unknown ids have no bytes."""

    def __init__(self, tokenizer: Any, skipped: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._byte_of = byte_of_character()

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._skipped else self._tokenizer.id_to_token(token_id)
        if token is None:
            value = b""
        elif all(character in self._byte_of for character in token):
            value = bytes(self._byte_of[character] for character in token)
        else:
            value = token.encode()  # an added token: the vocabulary's alphabet lacks some of its characters
        self[token_id] = value
        return value

    def unfinished(self, ids: Sequence[int]) -> bytes:
        """Return the incomplete character at the end of these tokens; usually empty."""
        data = b"".join([self[token_id] for token_id in ids[-_MAX_UNFINISHED_BYTES:]])
        return data[codecs.utf_8_decode(data, "replace")[1] :]


class TextTable(dict[int, str | None]):
    """The text of each token id, filled on demand; None if its bytes are not whole characters."""

    def __init__(self, table: ByteTable) -> None:
        super().__init__()
        self._table = table

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = self._table[token_id].decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


class ByteLevelStream:
    """Stream for byte-level vocabularies: a token's bytes do not depend on its neighbours, so the text is exactly that of one decode."""

    __slots__ = ("_bytes", "_held", "_texts")

    def __init__(self, table: ByteTable, texts: TextTable) -> None:
        """Decode with `texts`, which must have been made from `table`."""
        self._bytes = table
        self._texts = texts
        self._held = b""  # the first bytes of an incomplete character

    def push(self, token_id: int) -> str:
        if not self._held:
            text = self._texts[token_id]
            if text is not None:
                return text
        return self._decode(self._held + self._bytes[token_id])

    def push_all(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1:
            return self.push(token_ids[0])
        return self._decode(self._held + b"".join([self._bytes[token_id] for token_id in token_ids]))

    def finish(self) -> str:
        rest, self._held = self._held, b""
        return rest.decode(errors="replace")

    def _decode(self, data: bytes) -> str:
        text, length = codecs.utf_8_decode(data, "replace")
        self._held = data[length:]
        return text


class CompletingStream(ByteLevelStream):
    """Stream after a prompt that ends inside a character, which belongs to the answer if the answer completes it, else to the prompt."""

    __slots__ = ("_begins_in_prompt",)

    def __init__(self, table: ByteTable, texts: TextTable, unfinished: bytes) -> None:
        super().__init__(table, texts)
        self._held = unfinished
        self._begins_in_prompt = True  # the held bytes are still the prompt's

    def finish(self) -> str:
        return self._of_answer(super().finish())

    def _decode(self, data: bytes) -> str:
        return self._of_answer(super()._decode(data))

    def _of_answer(self, text: str) -> str:
        if not (text and self._begins_in_prompt):
            return text
        self._begins_in_prompt = False
        return text.removeprefix(REPLACEMENT)


class WindowStream:
    """Stream for decoders that look at neighbours (metaspace, byte fallback): decode a small window twice, and emit the difference.

    The window starts at a point where the text was complete, and holds at least the tokens of the last piece. This keeps the leading
    space of a word, which decoders drop at the beginning of a text. The last tokens of the prompt do the same for the answer's first
    word. A character that the prompt leaves incomplete belongs to the answer if the answer completes it.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], skip_special: bool, joined: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._joined = joined  # between two of these tokens the decoder's space is removed
        self._context = list(dropwhile(self._is_inner_byte, prompt_ids[-_CONTEXT_TOKENS:]))
        self._held: list[int] = []
        self._before = self._decode(self._context)
        self._before_unfinished = self._finished_text()
        self._last = prompt_ids[-1] if len(prompt_ids) else -1

    def push(self, token_id: int) -> str:
        self._held.append(token_id)
        between = token_id in self._joined and self._last in self._joined
        self._last = token_id
        text = self._decode(self._context + self._held)
        if text.endswith(REPLACEMENT) and len(self._held) < _MAX_HELD_TOKENS:
            return ""
        piece = self._release(text)
        return piece.removeprefix(" ") if between else piece

    def push_all(self, token_ids: Sequence[int]) -> str:
        return "".join([self.push(token_id) for token_id in token_ids])

    def finish(self) -> str:
        return self._release(self._decode(self._context + self._held)) if self._held else ""

    def _release(self, text: str) -> str:
        before = self._before if text.startswith(self._before) else self._before_unfinished
        piece = text[len(before) :]
        # Tokens without text do not replace the context, which must keep the last word. Tokens that complete the context's last
        # character are added to the context: by themselves they decode to nothing.
        is_whole = piece and before is self._before
        self._context = self._held if is_whole else self._context + self._held
        self._context = self._context[-4 * _CONTEXT_TOKENS :]
        self._held = []
        self._before = self._before_unfinished = self._decode(self._context)
        return piece

    def _is_inner_byte(self, token_id: int) -> bool:
        """Return whether the token is a continuation byte. A decoder replaces all of those that follow a lost first byte."""
        return _INNER_BYTE.fullmatch(self._tokenizer.id_to_token(token_id) or "") is not None

    def _finished_text(self) -> str:
        """Return the text of the context without the incomplete character at its end, if there is one."""
        if self._before.endswith(REPLACEMENT):
            for num_unfinished in range(1, _MAX_UNFINISHED_BYTES + 1):
                text = self._decode(self._context[:-num_unfinished])
                if not text.endswith(REPLACEMENT):
                    return text
        return self._before

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)
        return text


def byte_of_character() -> dict[str, int]:
    """Return the alphabet of byte-level vocabularies: printable Latin-1 maps to itself, other bytes to characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + position): byte for position, byte in enumerate(others)})
    return alphabet
