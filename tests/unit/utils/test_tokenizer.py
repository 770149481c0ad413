"""The tokenizer against the one that transformers builds from the same files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from srt.utils.chat_template import ChatTemplate, ChatTemplateError
from srt.utils.errors import StartError
from srt.utils.tokenizer import Tokenizer, load_chat_template, load_tokenizer
from tests.support.checkpoints import CheckpointFactory
from tests.support.tokenizers import ids_of, metaspace_tokenizer

FAMILIES = ("llama", "qwen2", "qwen3")
TEXTS = [
    "Once upon a time",
    "  two  spaces, tabs\t\tand\n\nlines ",
    "né 你好 👩‍👩‍👧 e\u0301",
    "<|im_start|>user\nhi<|im_end|><|eot_id|>",
    "",
    "1234567 x_y 3.14",
]
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": '  Hello <b>&amp; "you"  '},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Bye"},
]


def reference(folder: Path) -> Any:
    """Not AutoTokenizer: for some families that replaces parts of tokenizer.json by what its own code has for the published ones."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(folder))


def copy_of(folder: Path, target: Path, **config: Any) -> Path:
    """The tokenizer of a checkpoint, with other entries in tokenizer_config.json."""
    target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(folder / name, target)
    path = target / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return target


def streamed(tokenizer: Tokenizer, ids: Sequence[int], prompt_ids: Sequence[int] = (), **options: bool) -> str:
    stream = tokenizer.text_stream(prompt_ids, **options)
    return "".join([*map(stream.push, ids), stream.finish()])


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_text_are_those_of_transformers(checkpoint: CheckpointFactory, family: str) -> None:
    folder = checkpoint(family)
    ours, theirs = load_tokenizer(folder), reference(folder)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
                assert streamed(ours, ids, skip_special_tokens=skip) == ours.decode(ids, skip)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": False}, {"tools": [{"type": "function"}]}])
def test_prompts_are_those_of_transformers(checkpoint: CheckpointFactory, family: str, options: dict[str, Any]) -> None:
    folder = checkpoint(family)
    tokenizer = load_tokenizer(folder)
    template = load_chat_template(folder, tokenizer.special_tokens, None)
    assert template is not None
    text = template.render(CONVERSATION, **options)
    options = {"add_generation_prompt": True, **options}
    theirs = reference(folder)
    assert text == theirs.apply_chat_template(CONVERSATION, tokenize=False, **options)
    ids = theirs.apply_chat_template(CONVERSATION, tokenize=True, return_dict=False, **options)
    assert tokenizer.encode(text, add_special_tokens=False) == ids


def test_a_template_that_writes_the_beginning_token_gets_only_one(checkpoint: CheckpointFactory) -> None:
    folder = checkpoint("llama")
    tokenizer = load_tokenizer(folder)
    template = load_chat_template(folder, tokenizer.special_tokens, None)
    assert template is not None
    ids = tokenizer.encode(template.render(CONVERSATION), add_special_tokens=False)
    bos = tokenizer.encode("", add_special_tokens=True)[0]
    assert (ids[0], ids.count(bos)) == (bos, 1)


@pytest.mark.parametrize("flags", [{"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}])
def test_flags_for_tokens_around_a_text_mean_what_they_mean_to_transformers(
    checkpoint: CheckpointFactory, tmp_path: Path, flags: dict[str, bool]
) -> None:
    folder = copy_of(checkpoint("llama"), tmp_path / "copy", **flags)
    assert load_tokenizer(folder).encode("abc") == reference(folder).encode("abc")


def test_tokens_that_only_the_configuration_knows_are_special(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    base = checkpoint("qwen3")
    size = load_tokenizer(base).vocab_size
    token = {"content": "<think>", "special": True, "normalized": False, "lstrip": False, "rstrip": False}
    folder = copy_of(base, tmp_path / "copy", added_tokens_decoder={str(size): token})
    ids = load_tokenizer(folder).encode("a<think>b")
    assert size in ids
    assert ids == reference(folder).encode("a<think>b")
    assert load_tokenizer(folder).decode(ids) == "ab"


def test_nothing_is_truncated_or_padded_whatever_the_file_says(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    folder = copy_of(checkpoint("qwen3"), tmp_path / "copy")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    text = "one two three four five six seven"
    assert load_tokenizer(folder).encode(text) == load_tokenizer(checkpoint("qwen3")).encode(text)


# ---- Decoders that look at neighbours


@pytest.fixture(scope="module")
def metaspace() -> Tokenizer:
    return metaspace_tokenizer()


def test_words_keep_their_spaces(metaspace: Tokenizer) -> None:
    ids = ids_of("▁Hello", "▁world", "ing", ".", "▁a")
    assert streamed(metaspace, ids) == metaspace.decode(ids) == "Hello worlding. a"


def test_the_first_word_keeps_its_space_behind_a_prompt(metaspace: Tokenizer) -> None:
    prompt, answer = ids_of("<s>", "▁Hello"), ids_of("▁world", "▁a")
    assert streamed(metaspace, answer, prompt) == " world a"
    assert streamed(metaspace, answer, prompt[:1]) == "world a"


def test_a_character_of_several_bytes_comes_whole(metaspace: Tokenizer) -> None:
    ids = ids_of("▁a", "<0xE4>", "<0xBD>", "<0xA0>", "▁a")
    stream = metaspace.text_stream([])
    assert [stream.push(i) for i in ids] == ["a", "", "", "你", " a"]
    assert metaspace.decode(ids) == "a你 a"


def test_a_character_that_the_prompt_begins_is_the_answers(metaspace: Tokenizer) -> None:
    prompt = ids_of("▁a", "<0xE6>", "<0x97>")
    stream = metaspace.text_stream(prompt)
    answer = ids_of("<0xA5>", "<0xE6>", "<0x97>", "<0xA5>", "▁a", ".")
    assert [stream.push(i) for i in answer] == ["日", "", "", "日", " a", "."]
    prompt = ids_of("▁a", "<0xE6>", "<0x97>", "<0xA5>", "<0xE6>", "<0x97>")
    assert streamed(metaspace, answer, prompt) == "日日 a."


def test_a_character_that_is_broken_off_was_the_prompts(metaspace: Tokenizer) -> None:
    prompt = ids_of("▁a", "<0xE6>", "<0x97>")
    assert streamed(metaspace, ids_of("▁a", "."), prompt) == " a."
    assert streamed(metaspace, [], prompt) == ""


def test_an_answer_continues_a_prompt_of_bytes_wherever_it_was_cut(metaspace: Tokenizer) -> None:
    text = "a日🙂é🙂語本"
    ids = ids_of("▁a", *(f"<0x{byte:02X}>" for byte in text[1:].encode()))
    assert metaspace.decode(ids) == text
    for cut in range(1, len(ids)):
        whole = text.encode()[:cut].decode(errors="ignore")
        assert streamed(metaspace, ids[cut:], ids[:cut]) == text[len(whole) :]


def test_broken_bytes_are_neither_lost_nor_held_for_ever(metaspace: Tokenizer) -> None:
    stream = metaspace.text_stream([])
    pieces = [stream.push(i) for i in ids_of(*["<0xE4>"] * 40, "▁a")]
    assert "".join([*pieces, stream.finish()]) == "\N{REPLACEMENT CHARACTER}" * 40 + " a"
    assert any(pieces[:20])
    stream = metaspace.text_stream([])
    assert stream.push(ids_of("<0xE4>")[0]) + stream.finish() == "\N{REPLACEMENT CHARACTER}"


def test_special_tokens_are_shown_on_demand(metaspace: Tokenizer) -> None:
    ids = ids_of("▁Hello", "</s>", "</s>", "▁a")
    assert streamed(metaspace, ids) == "Hello a"
    assert streamed(metaspace, ids, skip_special_tokens=False) == metaspace.decode(ids, False) == "Hello</s></s> a"


def test_spaces_between_special_tokens_can_be_left_out() -> None:
    """A decoder that puts a space between any two tokens."""
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "[X]": 2, "[Y]": 3}, unk_token="a"))
    backend.add_special_tokens(["[X]", "[Y]"])
    tokenizer = Tokenizer(backend, {})
    ids = [0, 2, 3, 1]
    assert streamed(tokenizer, ids, skip_special_tokens=False) == "a [X] [Y] b"
    together = streamed(tokenizer, ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert together == "a [X][Y] b"


def test_one_token_is_shown_with_its_space_and_its_bytes(metaspace: Tokenizer) -> None:
    world, byte = ids_of("▁world", "<0xE4>")
    assert (metaspace.token_bytes(world), metaspace.token_bytes(byte)) == (b" world", b"\xe4")
    assert metaspace.token_bytes(10_000) == b""


# ---- What is missing or broken


def test_a_folder_without_a_tokenizer_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"no tokenizer.json.*--tokenizer-path"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 1}}'),
    ],
)
def test_a_broken_file_is_named(checkpoint: CheckpointFactory, tmp_path: Path, name: str, content: str) -> None:
    folder = copy_of(checkpoint("qwen3"), tmp_path / "copy")
    (folder / name).write_text(content)
    with pytest.raises(StartError, match=name):
        load_tokenizer(folder)


def test_older_files_are_converted_once_in_a_process_of_their_own(
    checkpoint: CheckpointFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SRT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "old"
    folder.mkdir()
    content = json.loads((checkpoint("qwen2") / "tokenizer.json").read_text("utf-8"))
    (folder / "vocab.json").write_text(json.dumps(content["model"]["vocab"]), "utf-8")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    tokenizer = load_tokenizer(folder)
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(folder))
    assert tokenizer.encode("Once upon a time") == theirs.encode("Once upon a time")
    (converted,) = (tmp_path / "cache").rglob("*.json")
    before = converted.stat().st_mtime_ns
    load_tokenizer(folder)
    assert converted.stat().st_mtime_ns == before


def test_a_conversion_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "vocab.json").write_text("no JSON")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StartError, match="could not be converted to one: "):
        load_tokenizer(tmp_path)


# ---- Chat templates


def template_of(source: str, **special_tokens: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, special_tokens)


def test_templates_find_the_helpers_that_they_expect() -> None:
    source = """\
{% for m in messages %}
    {% if loop.first %}{% continue %}{% endif %}
    {% generation %}{{ m.content | tojson }}{% endgeneration %}

{% endfor %}
{{ strftime_now('%Y') | length }}{{ bos_token }}{{ extra }}"""
    messages = [{"content": "x"}, {"content": "<é>"}]
    assert template_of(source, bos_token="<s>").render(messages, variables={"extra": 1}) == '"<é>"\n4<s>1'


def test_a_template_may_refuse_a_conversation() -> None:
    template = template_of("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        template.render([])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].nothing.at.all }}",
    ],
)
def test_what_a_template_must_not_or_cannot_do_is_an_error_of_the_request(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        template_of(source).render([{"role": "user", "content": "x"}])


def test_a_template_that_cannot_be_compiled_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match="cannot be compiled"):
        template_of("{% if %}")


def test_reserved_variables_cannot_be_overwritten() -> None:
    with pytest.raises(ChatTemplateError, match="messages cannot be set"):
        template_of("").render([], variables={"messages": []})


@pytest.mark.parametrize("content", ["Hi the", "Hi the  ", " Hi\n", "<", "|", ">", "end", "e", "]"])
def test_a_final_message_can_be_continued(content: str) -> None:
    template = template_of("{% for m in messages %}[{{ m.content }}]<|end|>{% endfor %}")
    messages = [{"role": "user", "content": "e"}, {"role": "assistant", "content": content}]
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "[e]<|end|>[" + content
    with pytest.raises(ChatTemplateError, match="not both"):
        template.render(messages, continue_final_message=True)


@pytest.mark.parametrize("content", ["e", " e\n"])
def test_a_final_message_that_the_template_strips_is_continued_at_its_last_word(content: str) -> None:
    template = template_of("{% for m in messages %}[{{ m.content | trim }}]<|end|>{% endfor %}")
    messages = [{"role": "assistant", "content": content}]
    assert template.render(messages, add_generation_prompt=False, continue_final_message=True) == "[e"


@pytest.mark.parametrize("written", ["m.content | upper", "m.content | e", "m.content[:2]", "''"])
def test_a_final_message_that_the_template_writes_otherwise_is_not_continued(written: str) -> None:
    template = template_of("{% for m in messages %}[{{ " + written + " }}]<end>{% endfor %}")
    messages = [{"role": "assistant", "content": "<end>"}]
    with pytest.raises(ChatTemplateError, match="changes the final message"):
        template.render(messages, add_generation_prompt=False, continue_final_message=True)


def test_a_model_may_have_a_template_for_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert (template.render([]), template.render([], tools=[{"type": "function"}])) == ("plain", "tools")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{{ function.arguments | tojson }}", '{"city": "Köln"}'),
        (
            "{{ function.arguments if function.arguments is string else function.arguments | tojson }}",
            '{"city": "Köln"}',
        ),
        ("{% for key, value in function.arguments.items() %}{{ key }}={{ value }}{% endfor %}", "city=Köln"),
        ("{{ function.arguments }}", '{"city": "Köln"}'),
        ("{{ '' + function.arguments }}", '{"city": "Köln"}'),
    ],
)
def test_arguments_of_calls_are_objects_or_json_as_a_template_wants_them(written: str, expected: str) -> None:
    source = (
        "{% for message in messages %}{% for call in message.tool_calls or [] %}{% set function = call.function %}"
        f"{written}{{% endfor %}}{{% endfor %}}"
    )
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": {"city": "Köln"}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert ChatTemplate({"default": source}, {}).render(messages) == expected


def test_a_template_file_wins_over_the_configuration_and_the_option_over_both(
    checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    folder = copy_of(checkpoint("qwen3"), tmp_path / "copy", chat_template=[{"name": "default", "template": "list"}])
    assert rendered(folder) == "list"
    (folder / "chat_template.jinja").write_text("file")
    assert rendered(folder) == "file"
    (tmp_path / "mine.jinja").write_text("mine")
    assert rendered(folder, str(tmp_path / "mine.jinja")) == "mine"


def rendered(folder: Path, option: str | None = None) -> str:
    template = load_chat_template(folder, {}, option)
    assert template is not None
    return template.render([])


@pytest.mark.parametrize("content", [None, "{% if %}"])
def test_a_template_option_that_cannot_be_used_is_refused_by_name(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "mine.jinja"
    if content is not None:
        path.write_text(content)
    with pytest.raises(StartError, match=r"--chat-template .*mine.jinja"):
        load_chat_template(tmp_path, {}, str(path))


def test_a_model_without_a_template_has_none(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path, {}, None) is None


THE_CALL = {"id": "x", "type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": "", "reasoning_content": "Hm."}, "(Hm.)"),
        ({"content": "Hi", "reasoning_content": "Hm."}, "(Hm.)Hi"),
        ({"content": "", "reasoning_content": "Hm.", "tool_calls": [THE_CALL]}, "(Hm.)"),
        ({"content": "I look.", "reasoning_content": "Hm.", "tool_calls": [THE_CALL]}, "I look."),
        ({"content": "Hi"}, "Hi"),
    ],
)
def test_a_template_with_its_own_name_for_reasoning_gets_it_beside_calls_only_without_content(
    message: dict[str, Any], expected: str
) -> None:
    """As gpt-oss' template, which refuses a message with a call that has both."""
    source = (
        "{% for message in messages %}"
        "{% if message.tool_calls and message.thinking and message.content %}{{ raise_exception('both') }}{% endif %}"
        "{% if message.thinking %}({{ message.thinking }}){% endif %}{{ message.content }}{% endfor %}"
    )
    messages = [{"role": "assistant", **message}]
    assert ChatTemplate({"default": source}, {}).render(messages) == expected
    both = source + "{{ messages[0].reasoning_content }}"
    assert "(" not in ChatTemplate({"default": both}, {}).render(messages), "it reads the usual name"
