"""How the page looks and reads, in a real browser: on a phone, in the dark, by keyboard and to a screen reader."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.browser import Browser, Page
from tests.support.page_server import PageServer, page_server

pytestmark = pytest.mark.e2e

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "' + "c" * 300 + '"}}\n</tool_call>'
FULL = "document.querySelectorAll('.message.assistant .quiet').length && document.querySelector('#running').textContent === '3'"

CONTRASTS = """(() => {
  const pen = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (css) => {
    pen.clearRect(0, 0, 1, 1); pen.fillStyle = css; pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data].map((part) => part / 255);
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] === 1) return colour;
    }
    return rgba("white");
  };
  const ratio = (a, b) => {
    const [low, high] = [luminance(a.slice(0, 3)), luminance(b.slice(0, 3))].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const found = [];
  const take = (node, what, colour, least) =>
    found.push({ what, ratio: ratio(rgba(colour), ground(node)), least });
  for (const node of document.querySelectorAll("body *")) {
    if (!node.checkVisibility() || node.matches(":disabled, .unseen, script, noscript")) continue;
    const style = getComputedStyle(node);
    const name = node.tagName + (node.id ? "#" + node.id : "") + " " + node.textContent.slice(0, 20);
    if ([...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim())) take(node, name, style.color, 4.5);
    if (node.matches("input, textarea")) {
      take(node, name, style.color, 4.5);
      take(node, name + " placeholder", getComputedStyle(node, "::placeholder").color, 4.5);
      take(node.parentElement, name + " border", style.borderTopColor, 3);
    }
    if (node.tagName === "CANVAS") for (const key of ["first", "second"]) take(node, key, style.getPropertyValue("--" + key), 3);
  }
  return found;
})()"""

FLAWS = """(() => {
  const flaws = [];
  const all = (selector) => [...document.querySelectorAll(selector)];
  const flaw = (rule, nodes) => nodes.forEach((node) => flaws.push(`${rule}: ${node.outerHTML.slice(0, 90)}`));
  if (!document.documentElement.lang) flaws.push("no language");
  if (!document.title) flaws.push("no title");
  if (/user-scalable|maximum-scale/.test(document.querySelector("meta[name=viewport]").content)) flaws.push("zoom is forbidden");
  flaw("id used twice", all("[id]").filter((node) => all(`#${CSS.escape(node.id)}`).length > 1));
  for (const name of ["aria-labelledby", "aria-describedby", "for"])
    flaw("points nowhere", all(`[${name}]`).filter((node) => !document.getElementById(node.getAttribute(name))));
  flaw("image without a name", all("canvas, img, [role=img]").filter((node) => !(node.ariaLabel || node.alt)));
  flaw("tab order by number", all("[tabindex]").filter((node) => node.tabIndex > 0));
  if (all("h1").length !== 1 || all("main").length !== 1) flaws.push("not one h1 and one main");
  const levels = all("h1, h2, h3, h4").map((node) => Number(node.tagName[1]));
  levels.forEach((level, at) => { if (at && level > levels[at - 1] + 1) flaws.push(`heading ${at} skips a level`); });
  flaw("scrolls, but no key reaches it", all("body *").filter((node) => node.scrollHeight > node.clientHeight + 1
    && ["auto", "scroll"].includes(getComputedStyle(node).overflowY) && node.tabIndex < 0));
  flaw("neither in a landmark nor an alert", all("body > *").filter((node) =>
    !node.matches("header, main, footer, nav, script, noscript, [role=alert]")));
  flaw("too small for a finger", all("button, input, textarea").filter((node) => {
    const box = node.getBoundingClientRect();
    return node.checkVisibility() && !node.matches("p button") && (box.width < 24 || box.height < 24);
  }));
  return flaws;
})()"""


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    with page_server(answer=f"<think>\n{'r' * 300}\n</think>\n\nCertainly. {'w' * 300}\n{CALL}") as server:
        model = server.world.engine.model
        server.world.engine.model = dataclasses.replace(model, tool_call_parser="hermes", reasoning_parser="qwen3")
        yield server


def fill_the_page(page: Page) -> None:
    """Everything that can be on it: messages with reasoning and calls, figures, opened folds, marks, errors."""
    page.run("document.querySelector('#extras').open = true; document.querySelector('[name=tools]').focus()")
    page.type(json.dumps([TOOL]))
    page.click("#text")
    page.type("A question, and a very long word: " + "q" * 300)
    page.press("Enter")
    page.wait(FULL)
    page.run(
        "document.querySelector('#log').append(Object.assign(document.createElement('p'), "
        "{className: 'error', textContent: 'What went wrong, in words'}))"
    )
    page.run(
        "for (const kind of ['valid', 'invalid', 'unchecked']) document.querySelector('.message.assistant').append("
        "Object.assign(document.createElement('p'), {className: `mark ${kind}`, textContent: 'What was judged'}))"
    )
    page.run("document.querySelector('.reasoning').open = true")
    page.run("document.querySelector('#schema-flaw').hidden = false")
    page.run("document.querySelector('#schema-flaw').textContent = 'What is wrong with it'")
    page.run("document.querySelector('#key-panel').hidden = document.querySelector('#trouble').hidden = false")
    page.run(
        "document.querySelector('#trouble').textContent = document.querySelector('#key-words').textContent = 'Trouble'"
    )


@pytest.mark.parametrize("width", [320, 375, 414, 768, 1280])
def test_nothing_scrolls_sideways_at_any_width(browser: Browser, server: PageServer, width: int) -> None:
    with browser.page(server.url, width=width, height=812) as page:
        fill_the_page(page)
        assert page.run("document.documentElement.scrollWidth") <= width
        outside = page.run(
            "[...document.querySelectorAll('body *')].filter((node) => node.checkVisibility() && !node.matches('.unseen')"
            f" && node.getBoundingClientRect().right > {width}).map((node) => node.outerHTML.slice(0, 80))"
        )
        assert outside == []
        inside = page.run(
            "[...document.querySelectorAll('body *')].filter((node) => node.checkVisibility() && node.scrollWidth > node.clientWidth"
            " && ['auto', 'scroll'].includes(getComputedStyle(node).overflowX)).map((node) => node.outerHTML.slice(0, 80))"
        )
        assert inside == []


def test_on_a_phone_the_chat_comes_first_and_is_usable(browser: Browser, server: PageServer) -> None:
    with browser.page(server.url, width=375, height=812) as page:
        boxes = page.run(
            "['#log', '#text', '#send', '#live-title'].map((one) => document.querySelector(one).getBoundingClientRect().bottom)"
        )
        assert boxes == sorted(boxes)
        assert boxes[2] <= 812, "the button is on the first screen"
        assert page.run("parseFloat(getComputedStyle(document.querySelector('#text')).fontSize)") >= 16, (
            "else phones zoom in"
        )


@pytest.mark.parametrize("dark", [False, True])
def test_everything_can_be_read(browser: Browser, server: PageServer, dark: bool) -> None:
    with browser.page(server.url, dark=dark) as page:
        fill_the_page(page)
        assert page.run("matchMedia('(prefers-color-scheme: dark)').matches") is dark
        found: list[dict[str, Any]] = page.run(CONTRASTS)
        assert len(found) > 60
        assert [one for one in found if one["ratio"] < one["least"]] == []
        ground = page.run("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(18, 20, 23)") is dark


@pytest.mark.parametrize("width", [375, 1280])
def test_the_page_has_none_of_the_usual_flaws(browser: Browser, server: PageServer, width: int) -> None:
    with browser.page(server.url, width=width) as page:
        fill_the_page(page)
        assert page.run(FLAWS) == []


def test_every_control_has_a_name_of_its_own(browser: Browser, server: PageServer) -> None:
    with browser.page(server.url) as page:
        fill_the_page(page)
        controls = [
            (node["role"], node["name"])
            for node in page.accessible_nodes()
            if node["role"] in ("button", "textbox", "spinbutton", "log", "image", "region", "status", "alert")
        ]
        names = [name for role, name in controls if role not in ("status", "alert")]
        assert all(names), controls
        assert len(set(names)) == len(names), controls
        assert ("textbox", "Your message") in controls
        assert ("log", "Conversation") in controls
        assert any(role == "status" for role, _ in controls)
        assert sum(role == "image" for role, _ in controls) >= 6


def test_the_keyboard_reaches_every_control_in_the_order_of_reading_and_the_focus_is_seen(
    browser: Browser, server: PageServer
) -> None:
    with browser.page(server.url) as page:
        fill_the_page(page)
        expected = page.run(
            "[...document.querySelectorAll('button, input, textarea, summary, [tabindex]')].filter((node) => node.checkVisibility()"
            " && !node.disabled).map((node) => node.id || node.name || node.className)"
        )
        page.run("document.querySelector('#log').focus()")
        name = "(({id, name, className}) => id || name || className)(document.activeElement)"
        reached = [page.run(name)]
        while len(reached) < len(expected):
            page.press("Tab")
            reached.append(page.run(name))
            assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid", reached[-1]
        assert reached == expected


def test_zoomed_to_four_times_its_size_it_still_works(browser: Browser, server: PageServer) -> None:
    with browser.page(server.url, width=320, height=256) as page:  # 1280 × 1024 at 400 %
        page.click("#text")
        page.type("Hello")
        page.click("#send")
        page.wait(FULL)
        assert page.run("document.documentElement.scrollWidth") <= 320
