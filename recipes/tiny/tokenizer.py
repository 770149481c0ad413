"""The tokenizer: byte-level BPE, digits one by one, and words in quotes letter by letter.

What stands in front of a word decides how it is cut. With a space before it, or with a capital, a word is merged into pieces; without,
as behind a quotation mark, every letter is a token of its own, so that a model can see how the word is written. Names of JSON fields
and of tools are merged whatever stands before them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from recipes.tiny.chat import CHAT_TEMPLATE, CONTROL_TOKENS, END, END_OF_TEXT, MARKS

VOCAB_SIZE = 2048
CONTEXT_LENGTH = 2048

PIECES = (
    r"(?<=\")[a-z]+(?:_[a-z]+)+(?=\")",  # names of tools
    r"(?<=\")[a-z]+(?=\":)",  # fields of JSON objects
    r"(?<=\"type\": \")(?:function|object|string|integer|number|boolean|array)(?=\")",  # types in the descriptions of tools
    r"(?:system|user|assistant|tools|tool_response)(?=[\n>])",  # roles, and the marks around tools
    r"'(?:s|t|re|ve|m|ll|d)(?!\p{L})",
    r" \p{Ll}+",
    r"\p{Lu}\p{Ll}+",
    r"\p{L}",
    r"\p{N}",
    r" ?[^\s\p{L}\p{N}]+",
    r"\s*\n+",
    r"\s+(?!\S)",
    r"\s+",
)
"""How text is cut before merges: the first that matches."""


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Merges learned from `texts`, in a vocabulary of VOCAB_SIZE that starts with the special tokens and all bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join(PIECES)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS]
    special += [AddedToken(token, special=False, normalized=False) for token in MARKS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(
            f"The texts give only {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}: give more of them."
        )
    return _with_plain_marks(tokenizer)


def _with_plain_marks(tokenizer: Tokenizer) -> Tokenizer:
    """The trainer takes all special tokens for control tokens; the marks of tool calls are text, which decoding must show."""
    data = json.loads(tokenizer.to_str())
    for token in data["added_tokens"]:
        token["special"] = token["content"] in CONTROL_TOKENS
    plain: Tokenizer = Tokenizer.from_str(json.dumps(data))
    return plain


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, the chat template in it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT_LENGTH,
        "bos_token": None,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        "added_tokens_decoder": {
            str(token_id(tokenizer, token)): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": token in CONTROL_TOKENS,
            }
            for token in (*CONTROL_TOKENS, *MARKS)
        },
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """KeyError if the vocabulary lacks the token."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return int(found)


def load_tokenizer(folder: Path) -> Tokenizer:
    tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer
