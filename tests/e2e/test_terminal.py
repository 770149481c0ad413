"""The terminal programs against real sockets, as a person or a script uses them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from srt.cli import chat, generate
from srt.managers.tokenizer_manager.api_types import ChoiceUpdate, GenerateInput, RequestError
from tests.e2e.conftest import Server
from tests.support.page_server import PageServer, page_server
from tests.support.server_process import ROOT, all_gone
from tests.support.terminal import CTRL_D, UP, Terminal
from tests.unit.entrypoints.fake_engine import choice_update

pytestmark = pytest.mark.e2e


@pytest.fixture
def fake() -> Iterator[PageServer]:
    with page_server() as server:
        yield server


@pytest.fixture
def hanging() -> Iterator[PageServer]:
    """Its answers begin with `Once` and never end."""

    def script(request: GenerateInput) -> list[list[ChoiceUpdate] | RequestError | None]:
        return [*([choice_update(request, "Once…", at)] for at in range(4)), None]

    with page_server() as server:
        server.world.engine.script = script
        yield server


def run(*words: str, typed: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """Without a terminal."""
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, input=typed, capture_output=True, text=True, timeout=120, cwd=ROOT, **options)


# ---- srt.cli.chat on a terminal


def test_a_conversation_on_a_terminal(tiny_server: Server) -> None:
    with Terminal(["srt.chat", "--url", tiny_server.url, "--temperature", "0"]) as terminal:
        assert "Talking to tiny." in terminal.until("> ")
        terminal.type("My name is Dmitri.\r")
        terminal.until("> ")
        terminal.type("What is my name?\r")
        assert "Your name is Dmitri." in terminal.until("> ")
        terminal.type("/reset\r")
        terminal.until("> ")
        terminal.type(UP + UP + "\r")  # the question before
        assert "What is my name?" in (said := terminal.until("> "))
        assert "Your name is Dmitri" not in said
        terminal.type("/help\r")
        assert "/system TEXT" in terminal.until("> ")
        terminal.type("/nonsense\r")
        assert "Unknown command /nonsense: " in terminal.until("> ")
        terminal.type(CTRL_D)
        assert terminal.end() == 0


def test_system_begins_anew_with_these_instructions(fake: PageServer) -> None:
    with Terminal(["srt.chat", "--url", fake.url, "--system", "First."]) as terminal:
        for line in ("Hello", "/system Second.", "Hello", "/system", "Hello"):
            terminal.until("> ")
            terminal.type(line + "\r")
        terminal.until("Hello!")
        terminal.until("> ")
        terminal.type("/quit\r")
        assert terminal.end() == 0
    prompts = [handle.request.text for handle in fake.world.engine.handles]
    assert prompts == [
        "<system>First.<user>Hello<assistant>",
        "<system>Second.<user>Hello<assistant>",
        "<user>Hello<assistant>",
    ]


def test_ctrl_c_stops_the_answer_and_not_the_program(hanging: PageServer) -> None:
    with Terminal(["srt.chat", "--url", hanging.url]) as terminal:
        terminal.until("> ")
        terminal.type("Tell me everything\r")
        terminal.until("Once")
        terminal.interrupt()
        terminal.until("(stopped)")
        hanging.wait(lambda: hanging.world.engine.handles[0].was_aborted)
        terminal.until("> ")
        terminal.type("Go on\r")
        terminal.until("Once")
        assert hanging.world.engine.handles[1].request.text == (
            "<user>Tell me everything<assistant>Once<user>Go on<assistant>"
        )
        terminal.interrupt()
        terminal.until("(stopped)")
        terminal.until("> ")
        terminal.type("half a line")
        terminal.until("half a line")
        terminal.interrupt()
        terminal.until("> ")
        terminal.type(CTRL_D)
        assert terminal.end() == 0


def test_a_refused_question_is_told_and_forgotten(fake: PageServer) -> None:
    fake.world.engine.script = lambda request: [RequestError(400, "The prompt is too long.")]
    with Terminal(["srt.chat", "--url", fake.url]) as terminal:
        terminal.until("> ")
        terminal.type("Hello\r")
        assert "The prompt is too long." in terminal.until("> ")
        fake.do(lambda: setattr(fake.world.engine, "script", None))
        terminal.type("Again\r")
        terminal.until("Hello!")
        assert fake.world.engine.handles[-1].request.text == "<user>Again<assistant>"
        terminal.until("> ")
        terminal.type("/exit\r")
        assert terminal.end() == 0


def test_a_chat_with_an_engine_of_its_own_leaves_nothing_behind() -> None:
    with Terminal(["srt.chat", "--device", "cpu", "--temperature", "0"]) as terminal:
        terminal.until("Starting tiny")
        terminal.until("> ")
        engine = psutil.Process(terminal.process.pid).children(recursive=True)
        assert len(engine) >= 4
        terminal.type("What is 12 + 30?\r")
        terminal.until("12 + 30 = 42")
        terminal.until("> ")
        terminal.type(CTRL_D)
        assert terminal.end() == 0
        assert all_gone(engine)


def test_ctrl_c_while_the_engine_starts_ends_both() -> None:
    with Terminal(["srt.chat", "--device", "cpu"]) as terminal:
        terminal.until("Starting tiny")
        chat_process = psutil.Process(terminal.process.pid)
        while not (engine := chat_process.children(recursive=True)):
            pass
        terminal.interrupt()
        assert terminal.end() == 130
        assert all_gone(engine)


# ---- srt.cli.chat with a pipe


def test_each_piped_line_is_a_question(tiny_server: Server) -> None:
    words = ["srt.chat", "--url", tiny_server.url, "--temperature", "0"]
    done = run(*words, typed="My name is Dmitri.\nWhat is my name?\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "Your name is Dmitri."


def test_the_first_piped_question_that_fails_ends_the_program(fake: PageServer) -> None:
    done = run("srt.chat", "--url", fake.url, "--top-p", "7", typed="Hello\nAnd then?\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert "top_p must be above 0" in done.stderr
    assert len(done.stderr.splitlines()) == 1


# ---- srt.cli.generate


def test_generate_writes_the_continuation_and_nothing_else(fake: PageServer) -> None:
    for words, typed in ((["Once upon"], ""), (["-"], "Once upon"), ([], "Once upon")):
        done = run("srt.generate", "--url", fake.url, "--stop", "END", "--min-p", "0.1", *words, typed=typed)
        assert (done.returncode, done.stdout, done.stderr) == (0, "Hello!\n", "")
        request = fake.world.engine.handles[-1].request
        assert request.text == "Once upon"
        assert request.params.min_p == 0.1
        assert "END" in request.params.stop


def test_generate_writes_json_for_scripts(tiny_server: Server) -> None:
    words = ["--url", tiny_server.url, "--json", "--max-new-tokens", "5", "--seed", "3", "--temperature", "0", "Hello"]
    done = run("srt.generate", *words)
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert set(answer) == {"text", "finish_reason", "seed", "usage"}
    assert (answer["finish_reason"], answer["seed"]) == ("length", 3)
    assert answer["usage"]["completion_tokens"] == 5
    assert done.stdout.count("\n") == 1


def test_generate_without_a_prompt_says_how_to_give_one(fake: PageServer) -> None:
    with Terminal(["srt.generate", "--url", fake.url]) as terminal:
        terminal.until("a prompt is missing")
        assert terminal.end() == 2


@pytest.mark.parametrize("module", ["srt.generate", "srt.chat"])
def test_ctrl_c_in_a_script_ends_the_program_and_its_request(hanging: PageServer, module: str) -> None:
    command = [sys.executable, "-m", module, "--url", hanging.url]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as program:
        assert program.stdin is not None and program.stdout is not None and program.stderr is not None
        program.stdin.write(b"Tell me everything\n")
        program.stdin.close()
        assert program.stdout.read(4) == b"Once"
        while psutil.Process(program.pid).status() != psutil.STATUS_SLEEPING:
            pass
        program.send_signal(signal.SIGINT)
        assert program.wait(60) == 130
        assert program.stderr.read() == b""
    hanging.wait(lambda: hanging.world.engine.handles[0].was_aborted)


def test_a_reader_that_goes_ends_generate_and_its_request(hanging: PageServer) -> None:
    command = [sys.executable, "-m", "srt.generate", "--url", hanging.url, "x"]
    reader, writer = os.pipe()
    with subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, cwd=ROOT) as program:
        os.close(writer)
        os.close(reader)
        assert program.wait(60) == 141
        assert program.stderr is not None
        assert program.stderr.read() == b""
    hanging.wait(lambda: hanging.world.engine.handles[0].was_aborted)


# ---- What both say


@pytest.mark.parametrize("module", ["srt.generate", "srt.chat"])
def test_what_standard_output_cannot_write_is_a_question_mark(fake: PageServer, module: str) -> None:
    fake.world.engine.answer = "日a本"
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = run(module, "--url", fake.url, typed="x\n", env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "?a?\n", "")


def test_json_loses_nothing_where_standard_output_cannot_write_it(fake: PageServer) -> None:
    fake.world.engine.answer = "日a🙂"
    done = run("srt.generate", "--url", fake.url, "--json", "x", env={**os.environ, "PYTHONIOENCODING": "latin-1"})
    assert json.loads(done.stdout)["text"] == "日a🙂"


@pytest.mark.parametrize("module", ["srt.generate", "srt.chat"])
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--api-key", "k日"], "The API key has a character that is not printable ASCII"),
        (["--api-key", "k\ny"], "The API key has a character that is not printable ASCII"),
        (["--api-key", "k\udcff"], "--api-key is not valid utf-8."),
        (["--stop", "a", "--stop", "\udcff"], "--stop is not valid utf-8."),
        (["--temperature", "nan"], "--temperature must be a finite number, not nan."),
        (["--repetition-penalty", "inf"], "--repetition-penalty must be a finite number, not inf."),
    ],
)
def test_what_no_request_can_say_is_not_sent(fake: PageServer, module: str, words: list[str], reason: str) -> None:
    done = run(module, "--url", fake.url, *words, typed="x\n")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert reason in done.stderr
    assert fake.world.engine.handles == []


@pytest.mark.parametrize(("module", "option"), [("srt.generate", "The prompt"), ("srt.chat", "--system")])
def test_words_that_are_no_text_are_not_sent(fake: PageServer, module: str, option: str) -> None:
    words = ["a\udcff"] if module == "srt.generate" else ["--system", "a\udcff"]
    done = run(module, "--url", fake.url, *words, typed="x\n")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{option} is not valid utf-8.\n")


@pytest.mark.parametrize("module", ["srt.generate", "srt.chat"])
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_input_that_is_no_text_is_not_sent(fake: PageServer, module: str, locale: str) -> None:
    environment = {**os.environ, "LC_ALL": locale}
    done = run(module, "--url", fake.url, typed="a\udcff\n", errors="surrogateescape", env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "Standard input is not valid utf-8.\n")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--url", "localhost:1", "x"], "localhost:1"),
        (["--url", "ftp:x", "x"], "ftp:x"),
        (["--url", "http://h/ä", "x"], "http://h/ä is not the address of a server"),
        (["--url", "http://a b/", "x"], "http://a b/ is not the address of a server"),
        (["--url", "http://a..b/", "x"], "http://a..b/ is not the address of a server"),
        (["--url", "http://[::1", "x"], "http://[::1 is not the address of a server"),
        (["--model-path", "no-such-model", "x"], "no-such-model"),
    ],
)
def test_what_cannot_be_reached_is_named(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(words) == 1
    assert reason in capsys.readouterr().err


def test_a_server_that_refuses_is_quoted(fake: PageServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--url", fake.url, "--top-p", "7", "x"]) == 1
    assert "top_p must be above 0" in capsys.readouterr().err


def test_the_key_comes_from_the_options_or_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with page_server(api_key="secret") as server:
        assert generate.main(["--url", server.url, "x"]) == 1
        assert "API key" in capsys.readouterr().err
        assert generate.main(["--url", server.url, "--api-key", "secret", "x"]) == 0
        monkeypatch.setenv("SRT_API_KEY", "secret")
        assert generate.main(["--url", server.url, "x"]) == 0


@pytest.mark.parametrize("main", [chat.main, generate.main])
def test_the_help_is_grouped_and_keeps_the_key_for_itself(
    main: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SRT_API_KEY", "very-secret")
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "very-secret" not in text
    headings = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings[-3:] == ["Where the model runs:", "Sampling:", "examples:"]
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "(default: 512)" in text
    assert "(default: tiny, shipped with srt)" in " ".join(text.split())
