"""The keys of grammars: workers that hold one under a key must not take it for another."""

from __future__ import annotations

import pytest

from srt.constrained import resource
from srt.constrained.compiler import Grammar
from srt.constrained.resource import GrammarContent, read_content, resource_of


def test_a_grammar_has_another_key_for_each_text_and_start() -> None:
    contents = [(text, begins_after) for text in ("a", "b") for begins_after in ([], [7], [7, 8])]
    resources = [resource_of(Grammar("constraint", text), begins_after) for text, begins_after in contents]
    assert len({one.key for one in resources}) == 6
    assert [read_content(one.content) for one in resources] == [GrammarContent(*content) for content in contents]


def test_equal_grammars_share_a_key_whatever_they_were_made_of() -> None:
    assert resource_of(Grammar("one constraint", "a")) == resource_of(Grammar("another", "a"), [])


def test_another_version_of_the_library_has_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    before = resource_of(Grammar("constraint", "a"))
    monkeypatch.setattr(resource, "_LIBRARY_VERSION", "0.0.0")
    after = resource_of(Grammar("constraint", "a"))
    assert before.content == after.content and before.key != after.key
