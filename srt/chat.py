"""A conversation in the terminal, with a running server or with a model that is started for it.

    python -m srt.chat
    python -m srt.chat --url http://localhost:30000
    python -m srt.chat --model-path FOLDER --system "Answer briefly."

/reset forgets the conversation, /system TEXT begins anew with these instructions, /help lists the commands. Ctrl-C stops an answer,
not the program; Ctrl-D ends it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from srt.managers.io_struct import RequestError
from srt.server_args import ArgumentError
from srt.terminal import AnswerError, Client, add_options, engine, sampling_of
from srt.utils.errors import StartError

HELP = """\
/reset         forget the conversation
/system TEXT   forget it, and begin with these instructions (without TEXT: with none)
/help          this list
/quit          end, as Ctrl-D does"""


class Conversation:
    """What was said so far, and the next answer."""

    def __init__(self, client: Client, system: str | None, parameters: dict[str, Any]) -> None:
        self._client = client
        self._parameters = parameters
        self.messages: list[dict[str, str]] = []
        self.begin(system)

    def begin(self, system: str | None) -> None:
        self.messages = [{"role": "system", "content": system}] if system else []

    def reset(self) -> None:
        """Instructions stay."""
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def ask(self, text: str, show: Callable[[str], None]) -> None:
        """Pass the answer to `show` as it comes. What was shown is remembered, also if Ctrl-C or the server broke it off; a question
        that got no answer at all is forgotten."""
        self.messages.append({"role": "user", "content": text})
        answer = ""
        try:
            for piece in self._pieces():
                answer += piece
                show(piece)
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()

    def _pieces(self) -> Iterator[str]:
        for event in self._client.stream("/v1/chat/completions", {"messages": self.messages, **self._parameters}):
            for choice in event["choices"]:
                if piece := choice["delta"].get("content"):
                    yield piece


def talk(conversation: Conversation) -> None:
    """Read, answer, until the end of input."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print()  # leave the half-typed line, as a shell does
            continue
        command, _, rest = line.partition(" ")
        match command:
            case "":
                pass
            case "/quit" | "/exit":
                return
            case "/reset":
                conversation.reset()
            case "/system":
                conversation.begin(rest.strip() or None)
            case "/help":
                print(HELP)
            case _ if command.startswith("/"):
                print(f"There is no command {command}; /help lists them.")
            case _:
                _answer(conversation, line)


def _answer(conversation: Conversation, line: str) -> None:
    try:
        conversation.ask(line, lambda piece: print(piece, end="", flush=True))
        print()
    except KeyboardInterrupt:
        print(" (stopped)")
    except AnswerError as error:
        print(error)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m srt.chat", description="Talk to a model in the terminal.")
    parser.add_argument("--system", help="instructions that the conversation begins with")
    add_options(parser)
    options = parser.parse_args(argv)
    if sys.stdin.isatty():
        import readline  # noqa: F401  (gives input() its history and line editing)
    try:
        with engine(options) as client:
            talk(Conversation(client, options.system, sampling_of(options)))
    except (AnswerError, StartError, ArgumentError, RequestError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
