"""The tokenizer of a checkpoint, without torch or transformers.

It reads tokenizer.json, the additions in tokenizer_config.json, and the chat template. A checkpoint without tokenizer.json is
converted once by a helper process (convert_tokenizer.py). text_stream.py turns tokens back into text one at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from srt.utils.cache_folders import own_folder
from srt.utils.chat_template import ChatTemplate, ChatTemplateError
from srt.utils.errors import StartError
from srt.utils.text_stream import ByteLevelStream, ByteTable, CompletingStream, TextStream, TextTable, WindowStream

_CONVERSION_TIMEOUT_S = 300
_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
# The files that make up a tokenizer without tokenizer.json.
_SLOW_FILES = (
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_METASPACE = "▁"


class Tokenizer:
    """Converts text to ids and back. Never truncates, never pads. `encode` may run in any thread and releases the GIL."""

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> None:
        self._backend = backend
        self.special_tokens = dict(special_tokens)  # bos_token, eos_token, …, if the model has them
        special_ids = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self._special_ids = frozenset(special_ids)
        self.special_texts = frozenset(t.content for t in backend.get_added_tokens_decoder().values() if t.special)
        decoders = _decoder_types(backend)
        self._is_byte_level = bool(decoders) and set(decoders) == {"ByteLevel"}
        self._has_metaspace = "Metaspace" in decoders or "Replace" in decoders
        self._bytes = ByteTable(backend, frozenset())
        self._texts = TextTable(self._bytes)
        self._bytes_without_special = ByteTable(backend, self._special_ids)
        self._texts_without_special = TextTable(self._bytes_without_special)

    @property
    def vocab_size(self) -> int:
        size: int = self._backend.get_vocab_size(with_added_tokens=True)
        return size

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that control a model, such as the end of a text; `skip_special_tokens` leaves them out of texts."""
        return self._special_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`, which must be encodable as UTF-8. Special tokens written out in it are recognised."""
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Return the ids of two texts that belong together, such as a question and a text that may answer it."""
        ids: list[int] = self._backend.encode_batch_fast([(first, second)], add_special_tokens=True)[0].ids
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text by itself, without special tokens around it."""
        return [one.ids for one in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    @property
    def num_added(self) -> tuple[int, int]:
        """Number of special tokens that `encode` puts before and behind a text."""
        plain, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        before = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
        return before, len(whole) - before - len(plain)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def text_stream(
        self, prompt_ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> TextStream:
        """Return a stream that decodes the answer to this prompt, token by token."""
        if self._is_byte_level:
            tables = (self._bytes, self._texts)
            if skip_special_tokens:
                tables = (self._bytes_without_special, self._texts_without_special)
            unfinished = self._bytes.unfinished(prompt_ids)
            return CompletingStream(*tables, unfinished) if unfinished else ByteLevelStream(*tables)
        joined = frozenset() if spaces_between_special_tokens else self._special_ids
        return WindowStream(self._backend, prompt_ids, skip_special_tokens, joined)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token by itself: a special token as it is written, an unknown id as b""."""
        if self._is_byte_level:
            return self._bytes[token_id]
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte:
            return bytes([int(byte[1], 16)])
        if self._has_metaspace:
            return str(token).replace(_METASPACE, " ").encode()
        return self.decode([token_id], skip_special_tokens=False).encode()


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Return the tokenizer in this folder; StartError with the reason if there is no usable one.

    tokenizer.json alone decides which tokens surround a text (BOS, EOS): add_bos_token in tokenizer_config.json has no effect beside
    it, as in transformers. A converted tokenizer has these tokens built in.
    """
    folder = Path(folder)
    config = _read_config(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        path = _converted(folder)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise StartError(
            f"{path} is not a tokenizer: {error}. Name the folder of one with --tokenizer-path."
        ) from error
    backend.no_truncation()
    backend.no_padding()
    special_tokens = _named_tokens(config)
    try:
        _add_missing_tokens(backend, config, special_tokens)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StartError(
            f"{folder}/tokenizer_config.json is not understood: {type(error).__name__} {error}."
        ) from error
    return Tokenizer(backend, special_tokens)


def load_chat_template(
    folder: str | Path, special_tokens: Mapping[str, str], option: str | None
) -> ChatTemplate | None:
    """Return the template in the file `option`, else the model's own; None if the model has none.

    ChatTemplateError if the model's template is broken, because the server may still complete text; StartError if the user's is.
    """
    if option is None:
        try:
            sources = _template_sources(Path(folder))
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ChatTemplateError(
                f"The model's chat template cannot be read: {type(error).__name__} {error}."
            ) from error
        return ChatTemplate(sources, special_tokens) if sources else None
    try:
        return ChatTemplate({"default": Path(option).read_text("utf-8")}, special_tokens)
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"--chat-template {option} cannot be read: {error}.") from error
    except ChatTemplateError as error:
        raise StartError(f"--chat-template {option}: {error}") from error


def _read_config(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json merged over the special_tokens_map.json of older checkpoints; both may be absent."""
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        try:
            content = json.loads((folder / name).read_text("utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise StartError(f"{folder / name} cannot be read: {error}.") from error
        if not isinstance(content, dict):
            raise StartError(f"{folder / name} must hold a JSON object.")
        merged.update(content)
    return merged


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            named[name] = content
    return named


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Add the tokens, and the marks of special tokens, that appear only in tokenizer_config.json."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder")
    for _, entry in sorted((listed if isinstance(listed, dict) else {}).items(), key=lambda item: int(item[0])):
        content = entry["content"]
        special = bool(entry.get("special"))
        if content not in known or (special and not known[content].special):
            flags = {name: bool(entry.get(name)) for name in ("lstrip", "rstrip", "single_word", "normalized")}
            backend.add_tokens([AddedToken(content, special=special, **flags)])
    for content in special_tokens.values():
        if content not in known and backend.token_to_id(content) is not None:
            backend.add_special_tokens([AddedToken(content, special=True, normalized=False)])


def _decoder_types(backend: tokenizers.Tokenizer) -> list[str]:
    """Return the types of the decoders in the order in which they run."""
    if backend.decoder is None:
        return []
    description = json.loads(backend.decoder.__getstate__())
    return [one["type"] for one in description.get("decoders", [description])]


def _template_sources(folder: Path) -> dict[str, str]:
    """Return the template texts by name. A template in a file of its own replaces the one in tokenizer_config.json."""
    sources: dict[str, str] = {}
    written = _read_config(folder).get("chat_template")
    if isinstance(written, str):
        sources["default"] = written
    elif isinstance(written, list):
        sources.update({one["name"]: one["template"] for one in written})
    elif (folder / "chat_template.json").is_file():
        sources["default"] = json.loads((folder / "chat_template.json").read_text("utf-8"))["chat_template"]
    if (folder / "chat_template.jinja").is_file():
        sources["default"] = (folder / "chat_template.jinja").read_text("utf-8")
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        sources[path.stem] = path.read_text("utf-8")
    return sources


def _converted(folder: Path) -> Path:
    """Return the tokenizer.json converted from older files, by this server or an earlier one."""
    parts = [folder / name for name in (*_SLOW_FILES, "tokenizer_config.json")] + sorted(folder.glob("*.tiktoken"))
    parts = [path for path in parts if path.is_file()]
    if not parts or parts == [folder / "tokenizer_config.json"]:
        raise StartError(
            f"{folder} has no tokenizer.json and no other tokenizer; name its folder with --tokenizer-path."
        )
    digest = hashlib.sha256(version("transformers").encode())
    for path in parts:
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    target = own_folder("tokenizers", os.environ) / f"{digest.hexdigest()[:32]}.json"
    if not target.is_file():
        _convert(folder, target)
    return target


def _convert(folder: Path, target: Path) -> None:
    command = [sys.executable, "-m", "srt.utils.convert_tokenizer", str(folder), str(target)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CONVERSION_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        reason = f"the conversion took more than {_CONVERSION_TIMEOUT_S} seconds"
    else:
        if done.returncode == 0 and target.is_file():
            return
        lines = done.stderr.strip().splitlines()
        reason = (lines[-1] if lines else f"exit code {done.returncode}").rstrip(".")
    raise StartError(f"{folder} has no tokenizer.json, and its tokenizer could not be converted to one: {reason}.")
