"""`srt chat` with schemas, tools and models that reason, on a terminal and in a pipe."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Server
from tests.support.page_server import PageServer, page_server
from tests.support.server_process import ROOT
from tests.support.terminal import CTRL_D, Terminal

pytestmark = pytest.mark.e2e

FUNCTION = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
COUNT = {
    "type": "object",
    "properties": {"count": {"type": "integer", "minimum": 3, "maximum": 99}},
    "required": ["count"],
    "additionalProperties": False,
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a schema, tools, and files that cannot be used."""
    (tmp_path / "schema.json").write_text(json.dumps(COUNT))
    (tmp_path / "refused.json").write_text('{"type": "object", "not": {}}')
    (tmp_path / "tools.json").write_text(json.dumps([{"type": "function", "function": FUNCTION}]))
    (tmp_path / "broken.json").write_text('{"type": ')
    return tmp_path


@pytest.fixture
def fake() -> Iterator[PageServer]:
    """A server whose model reasons and calls tools. A token is a character."""
    with page_server(answer="<think>\nTwo and two.\n</think>\n\nFour.") as server:
        model = server.world.engine.model
        server.world.engine.model = dataclasses.replace(model, tool_call_parser="hermes", reasoning_parser="qwen3")
        yield server


def run(url: str, *lines: str) -> subprocess.CompletedProcess[str]:
    """Without a terminal."""
    command = [sys.executable, "-m", "srt.chat", "--url", url, "--temperature", "0"]
    typed = "".join(f"{line}\n" for line in lines)
    return subprocess.run(command, input=typed, capture_output=True, text=True, timeout=120, cwd=ROOT)


def test_reasoning_is_one_line_and_can_be_shown(fake: PageServer) -> None:
    with Terminal(["srt.chat", "--url", fake.url]) as terminal:
        terminal.until("> ")
        terminal.type("/reasoning\r")
        assert "The last answer has no reasoning." in terminal.until("> ")
        terminal.type("What is 2 + 2?\r")
        said = terminal.until("> ")
        assert "… reasoning, " in said and "Four." in said.splitlines()
        assert "Two and two." not in said
        terminal.type("/reasoning\r")
        assert "Two and two." in terminal.until("> ").splitlines()
        terminal.type(CTRL_D)
        assert terminal.end() == 0


def test_a_pipe_has_the_answers_alone(fake: PageServer) -> None:
    done = run(fake.url, "What is 2 + 2?")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Four.\n", "")


def test_the_shipped_model_calls_a_tool_until_tools_are_off(tiny_server: Server, files: Path) -> None:
    question = "What is the weather in Lisbon?"
    done = run(tiny_server.url, f"/tools {files}/tools.json", question, "/tools off", "/reset", question)
    assert (done.returncode, done.stderr) == (0, "")
    call, answer = done.stdout.splitlines()
    assert call == 'get_weather({"city": "Lisbon"})'
    assert "get_weather" not in answer


def test_answers_are_held_to_a_schema_until_it_is_off(tiny_server: Server, files: Path) -> None:
    done = run(tiny_server.url, f"/schema {files}/schema.json", "How many?", "/schema off", "/reset", "What is 1 + 2?")
    assert (done.returncode, done.stderr) == (0, "(valid JSON for the schema)\n")
    counted, answer = done.stdout.splitlines()
    assert 3 <= json.loads(counted)["count"] <= 99
    assert answer == "1 + 2 = 3"


def test_a_person_is_told_what_is_wrong_and_goes_on(tiny_server: Server, files: Path) -> None:
    words = ["srt.chat", "--url", tiny_server.url, "--temperature", "0", "--max-tokens", "2"]
    with Terminal(words) as terminal:
        for typed, sentence in [
            ("/schema", "/schema needs the name of a file, or off."),
            (f"/schema {files}/missing.json", "missing.json cannot be read: No such file or directory."),
            (f"/tools {files}/broken.json", "broken.json is not JSON: "),
            (f"/schema {files}/refused.json", ""),
            ("Hello", "the keyword not at #/not"),
            (f"/schema {files}/schema.json", ""),
            ("How many?", "(not JSON, or not all of it)"),
        ]:
            terminal.until("> ")
            terminal.type(f"{typed}\r")
            terminal.until(sentence)
        terminal.until("> ")
        terminal.type("/quit\r")
        assert terminal.end() == 0


def test_a_file_that_cannot_be_read_ends_a_script(fake: PageServer, files: Path) -> None:
    done = run(fake.url, f"/tools {files}/broken.json", "Hello")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert f"{files}/broken.json is not JSON: " in done.stderr
