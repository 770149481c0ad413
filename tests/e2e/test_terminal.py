"""The terminal programs against the real server, as a person uses them."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys

import pytest

from srt import generate
from srt.chat import Conversation
from srt.terminal import AnswerError, Client
from tests.e2e.conftest import Server

pytestmark = pytest.mark.e2e
GREEDY = {"temperature": 0, "max_tokens": 12}


def test_a_conversation_remembers_what_was_said_until_it_is_reset(server: Server) -> None:
    conversation = Conversation(Client(server.url, None), "Be brief.", GREEDY)
    shown: list[str] = []
    conversation.ask("Hello", shown.append)
    conversation.ask("And then?", shown.append)
    assert [message["role"] for message in conversation.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert "".join(
        message["content"] for message in conversation.messages if message["role"] == "assistant"
    ) == "".join(shown)
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]


def test_a_refused_question_is_told_and_forgotten(server: Server) -> None:
    conversation = Conversation(Client(server.url, None), None, GREEDY | {"top_p": 7})
    with pytest.raises(AnswerError, match="top_p"):
        conversation.ask("Hello", print)
    assert conversation.messages == []


def test_an_answer_that_is_stopped_is_remembered_as_far_as_it_came(server: Server) -> None:
    conversation = Conversation(
        Client(server.url, None), None, {"temperature": 0, "max_tokens": 2000, "ignore_eos": True}
    )
    shown: list[str] = []

    def interrupt(piece: str) -> None:
        shown.append(piece)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conversation.ask("Hello", interrupt)
    assert conversation.messages[-1] == {"role": "assistant", "content": shown[0]}


def test_ctrl_c_stops_the_answer_and_not_the_program(server: Server) -> None:
    leader, follower = pty.openpty()
    words = [
        sys.executable,
        "-m",
        "srt.chat",
        "--url",
        server.url,
        "--max-tokens",
        "3000",
        "--seed",
        "1",
    ]  # a long answer
    with subprocess.Popen(words, stdin=follower, stdout=subprocess.PIPE, start_new_session=True) as chat:
        os.close(follower)
        assert chat.stdout is not None
        os.write(leader, b"Tell me everything\n")
        while not os.read(chat.stdout.fileno(), 100).replace(b"> ", b""):
            pass  # the prompt; what was typed is echoed on the terminal, not here
        chat.send_signal(signal.SIGINT)
        os.write(leader, b"/help\n/quit\n")
        rest, _ = chat.communicate(timeout=60)
        assert " (stopped)" in rest.decode(errors="replace")
        assert "/reset" in rest.decode(errors="replace")
        assert chat.returncode == 0
    os.close(leader)


def test_generate_writes_the_continuation_and_nothing_else(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--url", server.url, "--temperature", "0", "--max-new-tokens", "12", "Once upon a time"]
    assert generate.main(words) == 0
    first = capsys.readouterr()
    assert generate.main(words) == 0
    assert capsys.readouterr().out == first.out
    assert first.out.endswith("\n")
    assert not first.err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--url", "localhost:1", "x"], "localhost:1"),
        (["--url", "ftp:x", "x"], "ftp:x"),
        (["--model-path", "no-such-model", "x"], "no-such-model"),
    ],
)
def test_what_cannot_be_reached_is_named(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(words) == 1
    assert reason in capsys.readouterr().err


def test_a_server_that_refuses_is_quoted(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--url", server.url, "--top-p", "7", "x"]) == 1
    assert "top_p must be above 0" in capsys.readouterr().err
