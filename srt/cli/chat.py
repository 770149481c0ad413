"""A conversation in the terminal, with a running server or with a model that is started for it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any

from srt.cli.terminal import AnswerError, Client, add_options, engine, exit_code_of, make_parser, not_text, sampling_of

EXAMPLES = """\
examples:
  python -m srt.chat
  python -m srt.chat --url http://localhost:30000 --system "Answer briefly."
  echo "What is 12 + 30?" | python -m srt.chat

While it runs, /help lists the commands. Ctrl-C stops an answer, not the
program; Ctrl-D ends it. If standard input is not a terminal, each line is a
question, and the first that fails ends the program with exit code 1."""

HELP = """\
/reset         forget the conversation
/system TEXT   forget it, and begin again with these instructions (without TEXT: with none)
/help          show this list
/quit          end the program, as Ctrl-D does"""


class Conversation:
    """A conversation: the messages so far, and a way to ask for the next answer."""

    def __init__(self, client: Client, system: str | None, parameters: dict[str, Any]) -> None:
        self._client = client
        self._parameters = parameters
        self.messages: list[dict[str, str]] = []
        self.begin(system)

    def begin(self, system: str | None) -> None:
        self.messages = [{"role": "system", "content": system}] if system else []

    def reset(self) -> None:
        """Forget all messages but the instructions."""
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def ask(self, text: str, show: Callable[[str], None]) -> None:
        """Ask a question, and pass the answer to `show` as it comes.

        What was shown is remembered, even if Ctrl-C or the server broke it off; a question without any answer is forgotten.
        """
        self.messages.append({"role": "user", "content": text})
        answer = ""
        try:
            with contextlib.closing(self._pieces()) as pieces:
                for piece in pieces:
                    answer += piece
                    show(piece)
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()

    def _pieces(self) -> Generator[str, None, None]:
        body = {"messages": self.messages, **self._parameters}
        with contextlib.closing(self._client.stream("/v1/chat/completions", body)) as events:
            for event in events:
                for choice in event["choices"]:
                    if piece := choice["delta"].get("content"):
                        yield piece


def talk(conversation: Conversation, *, is_person: bool) -> None:
    """Read questions and answer them until the end of input. For a person, errors are printed and the conversation continues."""
    while True:
        try:
            line = input("> " if is_person else "").strip()
        except EOFError:
            if is_person:
                print()  # the shell's prompt belongs on a line of its own
            return
        except UnicodeDecodeError:
            _report(not_text(), is_person=is_person)
            continue
        except KeyboardInterrupt:
            if not is_person:
                raise
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
                _report(AnswerError(f"Unknown command {command}: /help lists the commands."), is_person=is_person)
            case _:
                _answer(conversation, line, is_person=is_person)


def _answer(conversation: Conversation, line: str, *, is_person: bool) -> None:
    try:
        conversation.ask(line, lambda piece: print(piece, end="", flush=True))
        print()
    except KeyboardInterrupt:
        if not is_person:
            raise
        print(" (stopped)")
    except AnswerError as error:
        _report(error, is_person=is_person)


def _report(error: AnswerError, *, is_person: bool) -> None:
    if not is_person:
        raise error
    print(error)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("python -m srt.chat [options]", "Talk to a model in the terminal.", EXAMPLES)
    parser.add_argument(
        "--system", metavar="TEXT", help="instructions that the conversation begins with (default: none)"
    )
    add_options(parser)
    options = parser.parse_args(argv)
    is_person = sys.stdin.isatty()

    def work() -> None:
        with engine(options) as client:
            if is_person:
                import readline  # noqa: F401  (gives input() line editing and history)

                print(f"Talking to {client.model()}. /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends.")
            talk(Conversation(client, options.system, sampling_of(options)), is_person=is_person)

    return exit_code_of(work)
