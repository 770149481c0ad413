"""Logprobs of /v1/completions with real tokenizers: how a token is called, and where in the text it begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from srt.managers.tokenizer_manager.api_types import ChoiceUpdate, GenerateInput, RequestError, TokenLogprob
from srt.managers.tokenizer_manager.text_codec import TextCodec
from srt.protocol.messages import int32_array
from srt.utils.tokenizer import Tokenizer, load_tokenizer
from tests.support.checkpoints import CheckpointFactory
from tests.support.tokenizers import ids_of, metaspace_tokenizer
from tests.unit.entrypoints.fake_engine import CONTEXT, World, choice_update
from tests.unit.entrypoints.sse import events

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def tokenizer(qwen3_checkpoint: Path) -> Tokenizer:
    return load_tokenizer(qwen3_checkpoint)


def speaking(tokenizer: Tokenizer, answer: Sequence[int], likeliest: Sequence[int] = ()) -> World:
    """The answer is always this one, a token a step, and at each position others would have been likelier."""
    world = World()
    world.engine.text = codec = TextCodec(tokenizer, None, context_length=CONTEXT, vocab_size=tokenizer.vocab_size)
    world.engine.model = replace(world.engine.model, vocab_size=0x110000)  # of the fake's own ids

    def logprobs(ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
        top = tuple((-0.1 * rank, token_id) for rank, token_id in enumerate(likeliest))
        return tuple(TokenLogprob(-2.0 - at, token_id, top) for at, token_id in enumerate(ids))

    def script(request: GenerateInput) -> list[list[ChoiceUpdate] | RequestError | None]:
        prompt = request.input_ids or tokenizer.encode(request.text or "")
        of_prompt = (TokenLogprob(None, prompt[0]), *logprobs(prompt)[1:])
        output = codec.output(request.params, int32_array(prompt), frozenset())
        texts = [output.push([token_id]).text for token_id in answer]
        texts[-1] += output.finish().text
        return [
            [
                msgspec.structs.replace(
                    choice_update(request, "x" * len(answer), at),
                    text=text,
                    ids=(answer[at],),
                    output_logprobs=logprobs(answer)[at : at + 1],
                    prompt_logprobs=of_prompt if request.logprobs.prompt_start == 0 and at == 0 else (),
                    prompt_ids=tuple(prompt) if request.wants_prompt_ids and at == 0 else (),
                )
            ]
            for at, text in enumerate(texts)
        ]

    world.engine.script = script
    return world


def choice_of(world: World, prompt: str | list[int], **more: Any) -> dict[str, Any]:
    """The whole answer, which is also that of the stream."""
    body = {"prompt": prompt, "logprobs": 3, "max_tokens": 50, **more}
    response = world.post(PATH, body)
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()["choices"][0]
    parts = [chunk["choices"][0] for chunk in events(world.post(PATH, {**body, "stream": True}))]
    assert "".join(part["text"] for part in parts) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert [value for part in parts for value in part["logprobs"][name]] == values
    return whole


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    id_of = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    return [id_of[bytes([byte])] for byte in data]


def test_tokens_that_are_not_whole_characters_are_told_apart_by_their_bytes(tokenizer: Tokenizer) -> None:
    rivals = byte_ids(tokenizer, b"\xe6\x97\xf0")
    world = speaking(tokenizer, tokenizer.encode("日🙂a"), likeliest=rivals)
    logprobs = choice_of(world, "日本語 🙂", echo=True)["logprobs"]
    assert {r"bytes:\xf0", r"bytes:\x9f", "a"} <= set(logprobs["tokens"])
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    rows = list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))
    for token, logprob, top in rows[1:]:
        assert top[token] == logprob
        assert {r"bytes:\xe6", r"bytes:\x97", r"bytes:\xf0"} <= set(top)


def test_of_two_tokens_with_one_text_the_chosen_one_is_told() -> None:
    dot, byte = ids_of(".", "<0x2E>")
    logprobs = choice_of(speaking(metaspace_tokenizer(), [byte], likeliest=[dot]), ids_of("▁a"))["logprobs"]
    assert (logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"]) == (["."], [-2.0], [{".": -2.0}])


def displaced(choice: dict[str, Any]) -> list[str]:
    """The tokens that do not stand in the text where their offset says; of those that are not whole characters none can be read."""
    logprobs, text = choice["logprobs"], choice["text"]
    begins = zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
    return [token for token, at in begins if not token.startswith("bytes:") and not text.startswith(token, at)]


TEXT = "né 日本 🙂. Once"


@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_token_stands_where_its_offset_says(checkpoint: CheckpointFactory, family: str, echo: bool) -> None:
    tokenizer = load_tokenizer(checkpoint(family))
    prompt, added = tokenizer.encode(TEXT), "<|begin_of_text|>" if family == "llama" else ""
    world = speaking(tokenizer, tokenizer.encode(" 🙂 é日a", add_special_tokens=False))
    for asked in (TEXT, prompt):
        choice = choice_of(world, asked, echo=echo)
        assert choice["text"] == (TEXT if echo else "") + " 🙂 é日a"
        assert displaced(choice) == ([added] if added and echo else [])
    shown = choice_of(world, prompt, echo=echo, skip_special_tokens=False)
    assert shown["text"] == (added + TEXT if echo else "") + " 🙂 é日a"
    assert displaced(shown) == []


def test_special_tokens_that_are_written_in_a_prompt_have_their_place(checkpoint: CheckpointFactory) -> None:
    tokenizer = load_tokenizer(checkpoint("llama"))
    bos = tokenizer.special_tokens["bos_token"]
    choice = choice_of(speaking(tokenizer, tokenizer.encode("é", False)), f"{bos}日{bos}", echo=True)
    begins = list(zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True))
    assert [at for token, at in begins if token == bos] == [0, 0, len(bos) + 1]
    assert choice["logprobs"]["text_offset"][-1] == len(f"{bos}日{bos}")


@pytest.mark.parametrize("echo", [True, False])
def test_words_behind_others_begin_with_their_space(echo: bool) -> None:
    world = speaking(metaspace_tokenizer(), ids_of("▁world", "<0xC3>", "<0xA9>", "▁a", "</s>", "."))
    choice = choice_of(world, ids_of("<s>", "▁Hello", "<0xC3>", "<0xA9>"), echo=echo)
    assert choice["text"] == ("Helloé" if echo else "") + " worldé a."
    # The first word of a text has no space, and special tokens are not shown.
    assert displaced(choice) == [*(["<s>", " Hello"] if echo else []), "</s>"]
    offsets = [0, 6, 6, 7, 9, 9]
    assert choice["logprobs"]["text_offset"] == ([0, 0, 5, 5, *(6 + at for at in offsets)] if echo else offsets)


def test_tokens_of_one_character_begin_where_it_does(tokenizer: Tokenizer) -> None:
    data = "é🙂".encode() + b"a\xe6\x97b"
    choice = choice_of(speaking(tokenizer, byte_ids(tokenizer, data)), "x")
    assert choice["text"] == "é🙂a\N{REPLACEMENT CHARACTER}b"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 1, 2, 3, 3, 4]
