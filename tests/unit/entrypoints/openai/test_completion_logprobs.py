"""Logprobs of /v1/completions with real tokenizers: how a token is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from srt.managers.io_struct import ChoiceUpdate, GenerateInput, RequestError, TokenLogprob
from srt.managers.text_codec import TextCodec
from srt.protocol.messages import int32_array
from srt.utils.tokenizer import Tokenizer, load_tokenizer
from tests.support.tokenizers import ids_of, metaspace_tokenizer
from tests.unit.entrypoints.fake_engine import CONTEXT, World, choice_update

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
                )
            ]
            for at, text in enumerate(texts)
        ]

    world.engine.script = script
    return world


def choice_of(world: World, prompt: str | list[int], **more: Any) -> dict[str, Any]:
    response = world.post(PATH, {"prompt": prompt, "logprobs": 3, "max_tokens": 50, **more})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


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
