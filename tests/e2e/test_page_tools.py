"""What the page's chat shows beside text, in a real browser: reasoning, calls of tools, and whether an answer fits its schema."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest

from srt.managers.tokenizer_manager.api_types import ChoiceUpdate, GenerateInput, RequestError
from tests.e2e.conftest import Server
from tests.support.browser import Browser, Page
from tests.support.page_server import PageServer, page_server
from tests.unit.constrained.test_json_schema import EXAMPLES, FORMAT_TEXTS
from tests.unit.entrypoints.fake_engine import choice_update

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("browser")]

SETTLED = "document.querySelector('#stop').disabled && document.querySelector('.message.assistant .quiet')"
LAST = "[...document.querySelectorAll('.message.assistant .words')].at(-1)?.textContent"
FIELD = "document.querySelector('[name={}]')"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ARGUMENTS = '{"city": "Köln {1}", "days": [1, 2], "no": {}}'
SHOWN = '{\n  "city": "Köln {1}",\n  "days": [\n    1,\n    2\n  ],\n  "no": {}\n}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
COUNT = {"type": "object", "properties": {"count": {"type": "integer", "minimum": 3}}, "required": ["count"]}


@pytest.fixture
def fake() -> Iterator[PageServer]:
    """A server whose model reasons and calls tools. A token is a character."""
    with page_server() as server:
        model = server.world.engine.model
        server.world.engine.model = dataclasses.replace(model, tool_call_parser="hermes", reasoning_parser="qwen3")
        yield server


def ask(page: Page, question: str) -> None:
    page.click("#text")
    page.type(question)
    page.press("Enter")


def paste(page: Page, name: str, text: str) -> None:
    page.run(f"document.querySelector('#extras').open = true; {FIELD.format(name)}.select()")
    page.type(text)


def hanging(said: str) -> Any:
    """An answer that begins with these letters and never ends."""

    def script(request: GenerateInput) -> list[list[ChoiceUpdate] | RequestError | None]:
        return [*([choice_update(request, said + "…", at)] for at in range(len(said))), None]

    return script


# ---- Reasoning


def test_reasoning_is_folded_above_the_answer_and_a_click_opens_it(browser: Browser, fake: PageServer) -> None:
    fake.world.engine.answer = "<think>\nTwo <b>and</b> two.\n</think>\n\nFour."
    with browser.page(fake.url) as page:
        ask(page, "What is 2 + 2?")
        page.wait(SETTLED)
        assert page.run(LAST) == "Four."
        assert page.run("document.querySelector('.reasoning').nextElementSibling.className") == "words"
        words = "document.querySelector('.reasoning div')"
        assert page.run(f"{words}.checkVisibility()") is False
        count = json.loads(
            fake.world.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}).text
        )
        num_tokens = count["usage"]["reasoning_tokens"]
        assert page.text(".reasoning summary") == f"Reasoning, {num_tokens} tokens"
        page.click(".reasoning summary")
        assert page.run(f"{words}.checkVisibility()") is True
        assert page.run(f"{words}.textContent") == "Two <b>and</b> two."


def test_reasoning_is_counted_while_it_comes_and_kept_when_it_is_stopped(browser: Browser, fake: PageServer) -> None:
    fake.world.engine.script = hanging("<think>\nHmm")
    with browser.page(fake.url) as page:
        ask(page, "Hello")
        page.wait("document.querySelector('.reasoning div')?.textContent === 'Hmm'")
        assert page.text(".reasoning summary").startswith("Reasoning, ")
        page.click("#stop")
        page.wait(SETTLED)
        page.reload()
        assert page.run("document.querySelector('.reasoning div').textContent") == "Hmm"
        fake.do(lambda: setattr(fake.world.engine, "script", None))
        ask(page, "Go on")
        page.wait(SETTLED)
        sent = json.loads(page.posted[-1][1])["messages"]
        assert sent[1] == {"role": "assistant", "content": "", "reasoning_content": "Hmm"}


# ---- Calls of tools


def test_a_call_is_shown_with_its_arguments_while_it_comes(browser: Browser, fake: PageServer) -> None:
    said = CALL[: CALL.index("2]")]
    fake.world.engine.script = hanging(said)
    with browser.page(fake.url) as page:
        paste(page, "tools", json.dumps([WEATHER]))
        ask(page, "How is the weather?")
        page.wait("document.querySelector('.call code')?.textContent.trimEnd().endsWith('1,')")
        assert page.text(".call b") == "get_weather"
        assert page.run("document.querySelector('.call code').textContent.trimEnd()") == SHOWN[: SHOWN.index("\n    2")]


def test_calls_are_kept_with_the_conversation_also_after_a_reload(browser: Browser, fake: PageServer) -> None:
    fake.world.engine.answer = f"I look.\n{CALL}\n{CALL}"
    with browser.page(fake.url) as page:
        paste(page, "tools", json.dumps([WEATHER]))
        ask(page, "How is the weather?")
        page.wait(SETTLED)
        assert "calls tools · " in page.text(".message.assistant .quiet")
        shown = "[...document.querySelectorAll('.call code')].map((one) => one.textContent)"
        assert page.run(shown) == [SHOWN, SHOWN]
        page.reload()
        assert page.run(shown) == [SHOWN, SHOWN]
        assert page.run("document.querySelector('#in-use').textContent") == "(tools in use)"
        ask(page, "And now?")
        page.wait(SETTLED)
        body = json.loads(page.posted[-1][1])
        assert body["tools"] == [WEATHER]
        before = body["messages"][1]
        assert before["content"] == "I look."
        assert [call["function"] for call in before["tool_calls"]] == [
            {"name": "get_weather", "arguments": ARGUMENTS}
        ] * 2


def test_the_shipped_model_calls_a_tool(browser: Browser, tiny_server: Server) -> None:
    with browser.page(tiny_server.url) as page:
        paste(page, "tools", json.dumps([WEATHER]))
        page.run(f"{FIELD.format('temperature')}.value = '0'")
        ask(page, "What is the weather in Lisbon?")
        page.wait(SETTLED)
        assert page.text(".call b") == "get_weather"
        assert page.run("document.querySelector('.call code').textContent") == '{\n  "city": "Lisbon"\n}'


# ---- Schemas


def test_an_answer_of_the_shipped_model_is_held_to_a_schema(browser: Browser, tiny_server: Server) -> None:
    with browser.page(tiny_server.url) as page:
        paste(page, "schema", json.dumps({**COUNT, "additionalProperties": False}))
        page.run(f"{FIELD.format('temperature')}.value = '0'")
        ask(page, "How many apples?")
        page.wait(SETTLED)
        assert json.loads(page.run(LAST))["count"] >= 3
        assert page.text(".mark.valid") == "valid JSON for the schema"


@pytest.mark.parametrize(
    ("answer", "mark"),
    [
        ('{"count": 3}', "valid JSON for the schema"),
        ('{"count": 2}', "not valid for the schema: count must be at least 3"),
        ('{"count": ', "not JSON, or not all of it"),
    ],
)
def test_a_mark_says_whether_an_answer_is_valid(browser: Browser, fake: PageServer, answer: str, mark: str) -> None:
    fake.world.engine.answer = answer
    with browser.page(fake.url) as page:
        paste(page, "schema", '{"minimum": 9007199254740993, ' + json.dumps(COUNT)[1:])
        ask(page, "How many?")
        page.wait(SETTLED)
        assert page.text(".mark") == mark
        assert '"minimum": 9007199254740993' in page.posted[-1][1], "no digit is lost"
        paste(page, "schema", " ")
        ask(page, "How many?")
        page.wait(f"{SETTLED} && document.querySelectorAll('.message.assistant .quiet').length === 2")
        assert page.run("document.querySelectorAll('.mark').length") == 1
        assert "response_format" not in json.loads(page.posted[-1][1])


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("schema", '{"type": "object", "not": {}}', "the keyword not at #/not"),
        ("schema", "[1]", "response_format"),
        ("tools", '[{"type": "function"}]', "tools[0]"),
    ],
)
def test_a_refusal_stands_beside_the_field(
    browser: Browser, tiny_server: Server, name: str, text: str, sentence: str
) -> None:
    with browser.page(tiny_server.url) as page:
        paste(page, name, text)
        page.run("document.querySelector('#extras').open = false")
        ask(page, "Hello")
        page.wait(f"!document.querySelector('#{name}-flaw').hidden")
        assert sentence in page.text(f"#{name}-flaw")
        assert page.run("document.querySelector('#extras').open")
        assert page.run("document.querySelector('#text').value") == "Hello"
        assert page.run("document.querySelectorAll('#log .error, .message').length") == 0
        paste(page, name, " ")
        assert page.run(f"document.querySelector('#{name}-flaw').hidden")


@pytest.mark.parametrize("name", ["schema", "tools"])
def test_what_is_not_json_is_not_sent(browser: Browser, fake: PageServer, name: str) -> None:
    with browser.page(fake.url) as page:
        paste(page, name, '{"type": ')
        ask(page, "Hello")
        page.wait(f"!document.querySelector('#{name}-flaw').hidden")
        assert page.text(f"#{name}-flaw").startswith("This is not JSON: ")
        assert page.posted == []


def test_the_validator_knows_every_keyword_and_format_that_the_server_enforces(
    browser: Browser, fake: PageServer
) -> None:
    texts = [(schema, right, wrong) for schema, right, wrong in EXAMPLES.values()]
    for form, (right, wrong) in FORMAT_TEXTS.items():
        texts.append(({"type": "string", "format": form}, [json.dumps(right)], [json.dumps(wrong)]))
    cases = [(json.loads(text), schema, True) for schema, right, _ in texts for text in right]
    cases += [(json.loads(text), schema, False) for schema, _, wrong in texts for text in wrong]
    with browser.page(fake.url) as page:
        is_valid = flaws(page, [(value, schema) for value, schema, _ in cases])
        assert [case for case, flaw in zip(cases, is_valid, strict=True) if (flaw is None) != case[2]] == []


@pytest.mark.parametrize(
    ("value", "schema", "flaw"),
    [
        ({"a": [{"b": 1}]}, {"properties": {"a": {"items": {"required": ["c"]}}}}, "a[0] must have the property c"),
        ({"a": 1}, {"additionalProperties": False}, "the answer may not have the property a"),
        ({"x": True}, {"additionalProperties": {"type": "null"}}, "x must be of the type null"),
        ([1, 2], {"prefixItems": [{}], "items": False}, "[1] must not be there"),
        ("b", {"anyOf": [{"const": "a"}, {"type": "null"}]}, "the answer fits none of the schemas in anyOf"),
        (3, {"oneOf": [{"minimum": 1}, {"minimum": 2}]}, "the answer fits 2 of the schemas in oneOf instead of one"),
        ([0.3, 0.35], {"items": {"multipleOf": 0.1}}, "[1] must be a multiple of 0.1"),
        ({"toString": 1}, {"properties": {}, "required": ["valueOf"]}, "the answer must have the property valueOf"),
    ],
)
def test_a_flaw_is_named_with_its_place(browser: Browser, fake: PageServer, value: Any, schema: Any, flaw: str) -> None:
    with browser.page(fake.url) as page:
        assert flaws(page, [(value, schema)]) == [flaw]


def test_a_schema_that_the_browser_cannot_read_is_not_judged(browser: Browser, fake: PageServer) -> None:
    fake.world.engine.answer = '"a"'
    with browser.page(fake.url) as page:
        paste(page, "schema", '{"type": "string", "pattern": "\\\\A(?P<x>a)"}')
        ask(page, "Hello")
        page.wait(SETTLED)
        assert page.text(".mark.unchecked").startswith("JSON, not checked against the schema: this browser cannot read")


def flaws(page: Page, cases: list[tuple[Any, Any]]) -> list[str | None]:
    """What the page's validator says of each value and schema."""
    script = f"import('/page/schema.js').then(({{flawOf}}) => {json.dumps(cases)}.map((one) => flawOf(...one)))"
    found: list[str | None] = page.run(script)
    return found
