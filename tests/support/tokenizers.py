"""Small tokenizers of other kinds than those of the random checkpoints, which are byte-level."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from srt.utils.tokenizer import Tokenizer

_SPECIAL = ("<unk>", "<s>", "</s>")
_PIECES = (*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁Hello", "▁world", "▁", "ing", "▁a", ".")
_IDS = {piece: number for number, piece in enumerate(_PIECES)}


def metaspace_tokenizer() -> Tokenizer:
    """As in the Llama 2 family: `▁` for a space, bytes for what the vocabulary lacks, no space at the beginning of a text, and
    <s> before it."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=dict(_IDS), merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", _IDS["<s>"])])
    return Tokenizer(backend, {"bos_token": "<s>"})


def ids_of(*pieces: str) -> list[int]:
    """Of its vocabulary."""
    return [_IDS[piece] for piece in pieces]


class Characters:
    """A TextStream in which a token is a character, or, negative, none."""

    def push(self, token_id: int) -> str:
        return chr(token_id) if token_id >= 0 else ""

    def push_all(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self.push, token_ids))

    def finish(self) -> str:
        return ""
