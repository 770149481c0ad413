"""Structural tags: free text with parts that follow a grammar, in both spellings."""

from __future__ import annotations

import json
from typing import Any

import pytest

from srt.constrained.compile_process import try_constraint
from srt.constrained.constraint import Constraint
from srt.constrained.grammar import GrammarRefusal
from srt.constrained.matcher import Grammars
from srt.constrained.vocabulary import Vocabulary
from srt.utils.tokenizer import Tokenizer

ARGUMENTS = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
CALL = {"type": "json_schema", "json_schema": ARGUMENTS}
TAGS = [
    {"type": "tag", "begin": "<f=a>", "content": CALL, "end": "</f>"},
    {"type": "tag", "begin": "<f=b>", "content": {"type": "regex", "pattern": "[0-9/]{2}"}, "end": "</f>"},
]
OLD: dict[str, Any] = {
    "structures": [{"begin": "<f=a>", "schema": ARGUMENTS, "end": "</f>"}],
    "triggers": ["<f"],
}


def triggered(**options: bool) -> dict[str, Any]:
    return {"format": {"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS, **options}}


def sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"format": {"type": "sequence", "elements": list(elements)}}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def members(required: list[bool], separator: str) -> dict[str, Any]:
    elements = [const(letter) for letter in "abc"]
    return {"format": {"type": "members", "elements": elements, "required": required, "separator": separator}}


def either(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"format": {"type": "or", "elements": list(elements)}}


SHORT = {"type": "regex", "excludes": ["</p>"]}
THINK = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": ["</think>", "</end>"]}

ALLOWED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (OLD, ["just text <", 'so: <f=a>{"x":1}</f> and <f=a>{"x": 2}</f>'], ["<f=c>", '<f=a>{"x":"a"}', "<f=a></f>"]),
    (triggered(), ["no call", "a <f=b>1/</f> b"], ["<f=b>1</f>", "<f=b>"]),
    (triggered(at_least_one=True), ["text <f=b>12</f>", "<f=b>12</f><f=b>34</f> end"], ["text", "text <f=b>12"]),
    (triggered(stop_after_first=True), ["text", "<f=b>12</f>"], ["<f=b>12</f> more"]),
    (triggered(at_least_one=True, stop_after_first=True), ["<f=b>12</f>", 'a<f=a>{"x":0}</f>'], ["a", "<f=b>12</f> "]),
    (
        {"format": {"type": "tags_with_separator", "tags": TAGS, "separator": ",", "at_least_one": True}},
        ["<f=b>12</f>", '<f=b>12</f>,<f=a>{"x":1}</f>'],
        ["", "<f=b>12</f><f=b>12</f>"],
    ),
    ({"format": {"type": "tags_with_separator", "tags": TAGS, "separator": ""}}, ["", "<f=b>12</f><f=b>34</f>"], ["x"]),
    (
        {"format": {"type": "tags_with_separator", "tags": TAGS, "separator": ",", "stop_after_first": True}},
        ["", "<f=b>12</f>"],
        ["<f=b>12</f>,<f=b>12</f>"],
    ),
    (
        sequence(THINK, const("\n"), CALL),
        ['<think>a < b</think>\n{"x":1}', '<think></end>\n{"x":1}'],
        ["<think>a", '{"x":1}'],
    ),
    (sequence(const("a"), {"type": "any_text"}), ["a", "abc"], ["b"]),
    (sequence({"type": "grammar", "grammar": 'root ::= "x" | "y" root'}, const("!")), ["x!", "yyx!"], ["y!", "x"]),
    (
        {"format": {"type": "or", "elements": [const("yes"), {"type": "regex", "pattern": "no+"}]}},
        ["yes", "nooo"],
        ["n"],
    ),
    (sequence(const("<|im_start|>"), const("tool")), ["<|im_start|>tool"], ["tool"]),
    (
        sequence({"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "<|im_start|>"}, const("x")),
        ["some text<|im_start|>x"],
        ["some text", "<|im_end|>x"],
    ),
    (
        sequence({"type": "regex", "pattern": ["[a-z/]+", "(?s:.{2,4})"], "excludes": ["no"]}),
        ["ab", "a/n", "onx"],
        ["a", "abcde", "ano", "A"],
    ),
    (
        sequence(
            {"type": "tag", "begin": "<p>", "content": {**SHORT, "pattern": "(?s:.){0,6}"}, "end": "</p>"}, const("!")
        ),
        ["<p></p>!", "<p>a</b\n</p>!", "<p></</p>!"],
        ["<p>1234567</p>!", "<p>a</p></p>!", "<p>a</p>"],
    ),
    (
        sequence(
            {"type": "tag", "begin": "", "content": {**SHORT, "pattern": "(?s:.){0,6}"}, "end": "</<|im_start|>p>"}
        ),
        ["</<|im_start|>p>", "a/<</<|im_start|>p>"],
        ["a<|im_start|>p>", "1234567</<|im_start|>p>"],
    ),
    (
        sequence({"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": ["</<|im_start|>p>", "stop"]}),
        ["some text</<|im_start|>p>", "</</<|im_start|>p>", "some stop"],
        ["some text", "some<|im_start|>p>", "stop it"],
    ),
    (
        either(CALL, sequence(THINK, {"type": "regex", "pattern": "\\n{0,2}"}, CALL)["format"]),
        ['{"x":1}', '<think>a {</think>{"x":1}', '<think></think>\n\n{"x":1}'],
        ["<think>a</think>", '<think>a{"x":1}', 'a</think>{"x":1}', '<think></think>{"x":1}</think>{"x":1}'],
    ),
    (members([True, False, False], ", "), ["a", "a, b", "a, c", "a, b, c"], ["", "b", "a, c, b", "a, ", "a, b, b"]),
    (members([False, False, False], ""), ["", "b", "ac", "abc"], ["ba", "aa"]),
    (members([False, True, False], ";"), ["b", "a;b", "b;c", "a;b;c"], ["a", "a;c", ";b"]),
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "needs either format, or structures"),
    ({"format": {"type": "poem"}}, "has the type 'poem' at format"),
    ({"format": 1}, "has the type None at format"),
    ({"format": const("a"), "triggers": []}, "has the member triggers"),
    ({"format": {"type": "const_string"}}, "needs a string in value, at format"),
    ({"format": {"type": "or", "elements": []}}, "needs a list of at least one entry in elements"),
    (sequence({"type": "any_text"}, const("a")), "has free text at format/0 with something behind it"),
    ({**OLD, "triggers": ["<g"]}, "has the trigger '<g' at format"),
    ({**OLD, "structures": [*OLD["structures"], {"begin": "[g]", "end": ""}]}, "has a tag at format/tags/1"),
    (
        {"structures": [{"begin": "<f", "schema": {"items": {"not": {}}}, "end": ""}], "triggers": ["<f"]},
        "has the keyword not at #/items/not: it cannot be enforced: say what the value must be instead, for example with enum"
        " (within format/tags/0/content/json_schema)",
    ),
    (sequence({"type": "grammar", "grammar": "root ::= x"}), "cannot be read: "),
    (sequence({"type": "regex", "pattern": "("}), "cannot be compiled: "),
    (sequence({"type": "regex", "pattern": []}), "needs an expression, or a list of expressions, in pattern, at"),
    (sequence({"type": "regex", "pattern": "a", "excludes": [1]}), "needs a list of texts in excludes, at format"),
    (sequence({"type": "members", "elements": [], "required": [True]}), "needs lists of one length in elements and"),
]


def allows(vocabulary: Vocabulary, tokenizer: Tokenizer, tag: dict[str, Any], text: str) -> bool:
    grammars = Grammars(vocabulary)
    grammars.compile("key", try_constraint(Constraint("structural_tag", json.dumps(tag)), vocabulary))
    matcher = grammars.matcher("key")
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.accept_all(ids) == len(ids) and matcher.may_end


@pytest.mark.parametrize(("tag", "right", "wrong"), ALLOWED, ids=range(len(ALLOWED)))
def test_a_tag_allows_what_it_says(
    vocabulary: Vocabulary, tokenizer: Tokenizer, tag: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    for text in right:
        assert allows(vocabulary, tokenizer, tag, text), text
    for text in wrong:
        assert not allows(vocabulary, tokenizer, tag, text), text


@pytest.mark.parametrize(("tag", "sentence"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_tag_is_refused(vocabulary: Vocabulary, tag: dict[str, Any], sentence: str) -> None:
    with pytest.raises(GrammarRefusal) as caught:
        try_constraint(Constraint("structural_tag", json.dumps(tag)), vocabulary)
    assert str(caught.value).startswith(sentence)
