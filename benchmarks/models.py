"""Folders of the shapes in `configs/`, to be served with `--load-format dummy`: a config and a tokenizer of the right size.

python -m benchmarks.models qwen3-8b        prints the folder
"""

from __future__ import annotations

import json
import sys
from itertools import islice, product
from pathlib import Path

from srt.utils.checkpoint import resolve_model_path

CONFIGS = Path(__file__).parent / "configs"
CACHE = Path(".cache/models")
SPECIAL_TOKENS = 3


def folder_of(name_or_folder: str) -> str:
    """The folder of a shape in `configs/`, written if it is not there yet; any other name as the server resolves it."""
    config = CONFIGS / f"{name_or_folder}.json"
    if not config.is_file():
        return str(resolve_model_path(name_or_folder))
    folder = CACHE / name_or_folder
    if not (folder / "config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        vocab_size = json.loads(config.read_text())["vocab_size"]
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer(vocab_size)))
        (folder / "tokenizer_config.json").write_text("{}")
        (folder / "config.json").write_text(config.read_text())
    return str(folder)


def tokenizer(vocab_size: int) -> dict[str, object]:
    """A byte-level BPE of `vocab_size` entries: all bytes, all pairs of them, and as many triples as there is room for.

    So each id is text, and loading and decoding cost what they cost with a real one.
    """
    letters = byte_letters()
    pairs = list(product(letters, letters))
    num_triples = vocab_size - SPECIAL_TOKENS - len(letters) - len(pairs)
    triples = list(islice(((a + b, c) for (a, b), c in product(pairs, letters)), num_triples))
    merges = pairs + triples
    tokens = letters + [left + right for left, right in merges]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": len(tokens) + i,
                "content": content,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for i, content in enumerate(special)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [list(merge) for merge in merges],
        },
    }


def byte_letters() -> list[str]:
    """The 256 characters that byte-level tokenizers write bytes with."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    shifted = [byte for byte in range(256) if byte not in plain]
    letter = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(shifted)}
    return [letter[byte] for byte in range(256)]


if __name__ == "__main__":
    print(folder_of(sys.argv[1]))
