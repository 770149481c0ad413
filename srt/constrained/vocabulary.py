"""A checkpoint's vocabulary as the grammar library reads it: the bytes of each token, the special ones, and those that end a text."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLTokenizer, TokenizerWrapper

from srt.utils.tokenizer import Tokenizer


class Vocabulary:
    """The vocabulary of one model. Making it takes about half a second for 150,000 tokens, so there is one in a process."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """Read the tokenizer. Ids from its own size up to `vocab_size`, that of the logits, are padding and never allowed.

        eos_ids: tokens of which any may end a text. ValueError if none of them is in the vocabulary.
        """
        self.size = vocab_size
        self.eos_ids = tuple(dict.fromkeys(i for i in eos_ids if 0 <= i < vocab_size))
        if not self.eos_ids:
            raise ValueError("The model names no token that ends a text, so no answer to a constraint could end.")
        specials = sorted(i for i in tokenizer.special_ids if i < vocab_size)
        self.special_ids = {tokenizer.token_bytes(i).decode(errors="replace"): i for i in specials}
        tokens = _Tokens(tokenizer, vocab_size, self.eos_ids[0], specials)
        self.library = LLTokenizer(tokens, eos_token=[*self.eos_ids])
        tokens.library = self.library

    @property
    def mask_words(self) -> int:
        """Number of 32-bit words of a mask."""
        return (self.size + 31) // 32


class _Tokens(TokenizerWrapper):
    """The interface that LLTokenizer asks for. It calls the object to split forced text, so that forced tokens are the usual ones."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_id: int, special_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self.is_tokenizer_wrapper = True
        self.bos_token_id = None
        self.eos_token_id = eos_id
        self.special_token_ids = special_ids
        known = min(tokenizer.vocab_size, vocab_size)
        self.tokens = [*map(tokenizer.token_bytes, range(known)), *([b""] * (vocab_size - known))]
        self._has_all = tokenizer.vocab_size <= vocab_size
        self.library: LLTokenizer | None = None

    def __call__(self, text: str) -> list[int]:
        """Split a text that the grammar forces.

        It comes without the text around it, by which some tokenizers decide where words end. If the longest tokens that fit make fewer
        of it, then the text is a word for the model that its tokenizer would find in place.
        """
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        longest = ids if self.library is None else self.library.greedy_tokenize(text)
        if len(longest) < len(ids):
            return longest
        return ids if self._has_all else [i for i in ids if i < len(self.tokens)]
