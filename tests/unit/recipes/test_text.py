"""From conversations to tokens and rows."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from recipes.tiny.chat import CHAT_TEMPLATE, Message, render
from recipes.tiny.corpus import draw_conversation, draw_texts
from recipes.tiny.packing import ROWS_PER_SHARD, Packer, ShardTask, stream_shards
from recipes.tiny.tokenizer import load_tokenizer
from srt.utils.chat_template import ChatTemplate, ChatTemplateError
from srt.utils.checkpoint import SHIPPED_MODELS

SHIPPED = SHIPPED_MODELS / "tiny"
TEMPLATE = ChatTemplate({"default": CHAT_TEMPLATE}, {})


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(SHIPPED)


def as_dicts(messages: tuple[Message, ...]) -> list[dict[str, Any]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def test_the_chat_template_writes_what_training_reads() -> None:
    rng = random.Random(0)
    for _ in range(200):
        conversation = draw_conversation(rng)
        written = TEMPLATE.render(
            as_dicts(conversation.messages), tools=list(conversation.tools) or None, add_generation_prompt=False
        )
        assert written == conversation.text()
    question = (Message("user", "Hello"),)
    assert TEMPLATE.render(as_dicts(question)) == render(question, add_generation_prompt=True)


def test_the_chat_template_takes_tool_calls_as_clients_send_them() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    text = '{"a": 1}'
    as_text = {**call, "function": {"name": "f", "arguments": text}}
    for sent in (call, as_text):
        written = TEMPLATE.render(
            [
                {"role": "user", "content": [{"type": "text", "text": "Do it"}]},
                {"role": "assistant", "content": None, "tool_calls": [sent]},
                {"role": "tool", "content": "done"},
                {"role": "tool", "content": "again"},
            ]
        )
        assert written == (
            "<|im_start|>user\nDo it<|im_end|>\n"
            '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
            "<|im_start|>user\n<tool_response>\ndone\n</tool_response>\n<tool_response>\nagain\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n"
        )


def test_the_chat_template_refuses_a_role_that_it_does_not_know() -> None:
    with pytest.raises(ChatTemplateError, match="critic"):
        TEMPLATE.render([{"role": "critic", "content": "no"}])


def test_every_text_survives_the_tokenizer(tokenizer: Tokenizer) -> None:
    texts = [*itertools.islice(draw_texts(3), 200), "naïve  café\n\n\t日本 🙂 x=1;", " leading", "UPPER lower", ""]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_digits_and_letters_in_quotes_are_tokens_of_their_own(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("1234").tokens == ["1", "2", "3", "4"]
    assert tokenizer.encode('"lantern"').tokens == ['"', *"lantern", '"']
    assert len(tokenizer.encode(" lantern").tokens) < len("lantern")
    assert tokenizer.get_vocab_size() == 2048


def test_marks_of_tool_calls_are_shown_and_ends_are_not(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<tool_call>\n{}\n</tool_call><|im_end|><|endoftext|>").ids
    assert tokenizer.decode(ids) == "<tool_call>\n{}\n</tool_call>"


def test_rows_begin_with_a_document_and_learn_only_what_the_assistant_says(tokenizer: Tokenizer) -> None:
    rows = Packer(tokenizer).shard(ShardTask(seed=0, index=5, row_tokens=512))
    assert rows.ids.shape == rows.learned.shape == (ROWS_PER_SHARD, 512)
    for ids, learned in zip(rows.ids, rows.learned, strict=True):
        text = tokenizer.decode(list(ids), skip_special_tokens=False)
        assert text.startswith(("<|im_start|>", "Once upon a time"))
        taught = tokenizer.decode([int(token) for token in ids[learned]], skip_special_tokens=False)
        assert taught.count("<|im_end|>") == text.count("<|im_start|>assistant\n")
        assert "<|im_start|>" not in taught and "<tools>" not in taught


def test_any_number_of_processes_makes_the_same_rows() -> None:
    tasks = [ShardTask(seed=0, index=index, row_tokens=256) for index in range(3)]
    here = list(stream_shards(SHIPPED, iter(tasks), workers=0))
    apart = list(stream_shards(SHIPPED, iter(tasks), workers=2))
    assert all(np.array_equal(one.ids, other.ids) for one, other in zip(here, apart, strict=True))


def test_processes_end_when_their_rows_are_no_longer_wanted() -> None:
    endless = (ShardTask(seed=0, index=index, row_tokens=256) for index in itertools.count())
    shards = stream_shards(Path(SHIPPED), endless, workers=1, ahead=2)
    next(shards)
    shards.close()
    assert next(shards, None) is None
