"""The page's chat, in a real browser: with the shipped model behind it, or with an engine that says what a test needs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from srt.managers.tokenizer_manager.api_types import ChoiceUpdate, GenerateInput, RequestError
from tests.e2e.conftest import Server
from tests.support.browser import Browser, Page
from tests.support.page_server import PageServer, page_server
from tests.unit.entrypoints.fake_engine import choice_update, typing_out

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("browser")]

CONNECTED = "document.querySelector('#health').textContent === 'connected'"
LAST = "[...document.querySelectorAll('.message.assistant .words')].at(-1)?.textContent"
SETTLED = "document.querySelector('#stop').disabled && document.querySelector('.message.assistant .quiet')"


@pytest.fixture
def fake() -> Iterator[PageServer]:
    with page_server() as server:
        yield server


def ask(page: Page, question: str) -> None:
    page.click("#text")
    page.type(question)
    page.press("Enter")


def fill(page: Page, **fields: str) -> None:
    for name, value in fields.items():
        # Not with the mouse: what the engine tells moves the fields, also while it is on its way.
        page.run(f"document.querySelector('[name={name}]').focus()")
        page.type(value)


def hanging(said: str) -> Any:
    """An answer that begins with these letters and never ends."""

    def script(request: GenerateInput) -> list[list[ChoiceUpdate] | RequestError | None]:
        return [*([choice_update(request, said + "…", at)] for at in range(len(said))), None]

    return script


def test_an_answer_of_the_shipped_model_appears_piece_by_piece(browser: Browser, tiny_server: Server) -> None:
    with browser.page(tiny_server.url) as page:
        fill(page, temperature="0")
        page.run(
            "window.seen = new Set(); new MutationObserver(() => "
            f"seen.add({LAST} ?? '')).observe(document.querySelector('#log'), {{childList: true, subtree: true}})"
        )
        ask(page, "What is 123 + 456?")
        page.wait(SETTLED)
        assert page.run(LAST) == "123 + 456 = 579"
        assert "stop · " in page.text(".message.assistant .quiet")
        page.run("seen.clear()")
        # A story has many pieces. So the browser sees several states even if it gets some pieces together.
        ask(page, "Tell me a story about a brave fox.")
        page.wait(f"{SETTLED} && document.querySelectorAll('.quiet').length > 1")
        assert page.run("seen.size") >= 4


def test_the_next_question_brings_the_conversation_along_also_after_a_reload(
    browser: Browser, tiny_server: Server
) -> None:
    with browser.page(tiny_server.url) as page:
        fill(page, temperature="0")
        ask(page, "My name is Dmitri.")
        page.wait(SETTLED)
        page.reload()
        assert "Dmitri" in page.text("#log")
        ask(page, "What is my name?")
        page.wait(SETTLED)
        assert page.run(LAST) == "Your name is Dmitri."
        page.click("#new")
        assert page.run("document.querySelectorAll('.message').length") == 0
        ask(page, "What is my name?")
        page.wait(SETTLED)
        assert "Dmitri" not in page.run(LAST)


def test_the_seed_that_is_shown_gives_the_same_answer_again(browser: Browser, tiny_server: Server) -> None:
    with browser.page(tiny_server.url) as page:
        fill(page, temperature="1.5", max_tokens="24")
        ask(page, "Tell me a story about a brave fox.")
        page.wait(SETTLED)
        first = page.run(LAST)
        page.click(".seed")
        page.click("#new")
        ask(page, "Tell me a story about a brave fox.")
        page.wait(SETTLED)
        assert page.run(LAST) == first


def test_every_parameter_that_is_filled_in_is_sent_and_no_other(browser: Browser, fake: PageServer) -> None:
    numbers = {"max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1}
    numbers |= {"frequency_penalty": -1, "presence_penalty": 0.3}
    with browser.page(fake.url) as page:
        ask(page, "plain")
        page.wait(SETTLED)
        fill(page, **{name: str(value) for name, value in numbers.items()})
        fill(page, system="Be brief.", stop="END\nStop", seed="18446744073709551615")
        ask(page, "full")
        page.wait(f"{SETTLED} && document.querySelectorAll('.quiet').length > 1")
        (_, plain), (_, full) = page.posted
        assert set(json.loads(plain)) == {"messages", "stream", "stream_options"}
        sent = json.loads(full)
        assert {name: sent[name] for name in numbers} == numbers
        assert (sent["stop"], sent["seed"]) == (["END", "Stop"], 18446744073709551615)
        assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
        assert [message["role"] for message in sent["messages"]] == ["system", "user", "assistant", "user"]
        assert fake.world.engine.handles[1].request.params.sampling_seed == 18446744073709551615


def test_a_parameter_that_cannot_be_is_not_sent(browser: Browser, fake: PageServer) -> None:
    with browser.page(fake.url) as page:
        fill(page, top_p="7")
        ask(page, "Hello")
        page.wait("document.querySelector('[name=top_p]').matches(':user-invalid')")
        assert page.posted == []
        assert page.run("document.querySelector('#text').value") == "Hello"


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_stop_ends_the_request_and_keeps_what_was_said(browser: Browser, fake: PageServer, way: str) -> None:
    fake.world.engine.script = hanging("Once upon")
    with browser.page(fake.url) as page:
        ask(page, "Tell me everything")
        page.wait(f"{LAST} === 'Once upon'")
        assert page.run("document.querySelector('#send').disabled")
        page.click("#stop") if way == "button" else page.press("Escape")
        page.wait(SETTLED)
        fake.wait(lambda: fake.world.engine.handles[0].was_aborted)
        assert page.run(LAST) == "Once upon"
        assert "stopped" in page.text(".message.assistant .quiet")
        assert page.run("document.activeElement.id") == "text"
        fake.do(lambda: setattr(fake.world.engine, "script", None))
        ask(page, "Go on")
        page.wait(f"{SETTLED} && {LAST} === 'Hello!'")
        assert json.loads(page.posted[-1][1])["messages"][1] == {"role": "assistant", "content": "Once upon"}


@pytest.mark.parametrize("said", ["Once", ""])
def test_a_reload_in_the_middle_of_an_answer_ends_the_request_and_keeps_what_was_said(
    browser: Browser, fake: PageServer, said: str
) -> None:
    fake.world.engine.script = hanging(said)
    with browser.page(fake.url) as page:
        ask(page, "Tell me everything")
        fake.wait(lambda: fake.world.engine.handles)
        page.wait(f"{LAST} === {said!r}")
        page.reload()
        fake.wait(lambda: fake.world.engine.handles[0].was_aborted)
        words = page.run("[...document.querySelectorAll('.words')].map((one) => one.textContent)")
        assert words == (["Tell me everything", "Once"] if said else [])
        assert page.run("document.querySelector('#text').value") == ("" if said else "Tell me everything")


def test_a_new_conversation_ends_the_running_answer(browser: Browser, fake: PageServer) -> None:
    fake.world.engine.script = hanging("Once")
    with browser.page(fake.url) as page:
        ask(page, "Tell me everything")
        page.wait(f"{LAST} === 'Once'")
        page.click("#new")
        fake.wait(lambda: fake.world.engine.handles[0].was_aborted)
        assert page.run("document.querySelectorAll('.message').length") == 0


@pytest.mark.parametrize(
    "said",
    [
        "<img src=x onerror='window.hurt=1'><script>window.hurt=1</script><b>bold</b> & so on",
        "<svg onload=alert(1)>",
        "</div></article><iframe src='javascript:alert(1)'>",
    ],
)
def test_what_is_said_never_becomes_markup(browser: Browser, fake: PageServer, said: str) -> None:
    fake.world.engine.answer = said
    with browser.page(fake.url) as page:
        ask(page, said)
        page.wait(SETTLED)
        assert page.run(LAST) == said
        page.reload()
        assert page.run("[...document.querySelectorAll('.words')].map((one) => one.textContent)") == [said, said]
        assert page.run("document.querySelectorAll('#log :is(img, script, b, svg, iframe)').length") == 0
        assert page.run("window.hurt") is None


def test_a_refusal_is_told_in_the_servers_words_and_the_question_is_kept(browser: Browser, fake: PageServer) -> None:
    fake.world.engine.script = lambda request: [RequestError(400, "The prompt is <i>too</i> long.")]
    with browser.page(fake.url) as page:
        ask(page, "Hello")
        page.wait("document.querySelector('#log .error[role=alert]')")
        assert page.text("#log .error") == "The prompt is <i>too</i> long."
        assert page.run("document.querySelector('#text').value") == "Hello"
        assert page.run("document.querySelectorAll('.message').length") == 0


def test_an_engine_that_dies_in_the_middle_is_told_in_the_answer(browser: Browser, fake: PageServer) -> None:
    fake.world.engine.script = hanging("Once")
    with browser.page(fake.url) as page:
        ask(page, "Tell me everything")
        page.wait(f"{LAST} === 'Once'")
        fake.do(lambda: fake.world.engine.engine_died("worker 0 was killed"))
        page.wait("document.querySelector('#log .error[role=alert]')")
        assert "worker 0 was killed" in page.text("#log .error")
        assert page.run(LAST) == "Once"
        page.wait("document.querySelector('#health').textContent === 'lost'")
        assert "The engine has ended." in page.text("#trouble")


def test_the_key_is_asked_for_and_used(browser: Browser) -> None:
    with page_server(api_key="secret") as fake, browser.page(fake.url) as page:
        page.wait("!document.querySelector('#key-panel').hidden")
        assert page.run("document.activeElement.id") == "key"
        assert page.text("#health") == "API key needed"
        page.type("wrong")
        page.press("Enter")
        page.wait("!document.querySelector('#key-panel').hidden && document.activeElement.id === 'key'")
        page.type("secret")
        page.press("Enter")
        page.wait(CONNECTED)
        assert page.run("document.querySelector('#key-panel').hidden")
        ask(page, "Hello")
        page.wait(SETTLED)
        assert page.run(LAST) == "Hello!"
        assert "secret" not in page.run("document.documentElement.outerHTML")
        page.reload()
        page.wait(CONNECTED)


def test_shift_enter_begins_a_new_line(browser: Browser, fake: PageServer) -> None:
    fake.world.engine.script = lambda request: typing_out(request, "ok")
    with browser.page(fake.url) as page:
        page.click("#text")
        page.type("one")
        page.press("Enter", shift=True)
        page.type("two")
        assert page.posted == []
        page.press("Enter")
        page.wait(SETTLED)
        assert json.loads(page.posted[0][1])["messages"][0]["content"] == "one\ntwo"
