"""A conversation in the terminal, with a running server or with a model that is started for it."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from srt.cli.chat_answer import Answer, Printer
from srt.cli.schema_check import judge
from srt.cli.terminal import AnswerError, Client, add_options, engine, exit_code_of, make_parser, not_text, sampling_of

EXAMPLES = """\
examples:
  srt chat
  srt chat --url http://localhost:30000 --system "Answer briefly."
  echo "What is 12 + 30?" | srt chat

While it runs, /help lists the commands. Ctrl-C stops an answer, not the
program; Ctrl-D ends it. If standard input is not a terminal, each line is a
question, and the first that fails ends the program with exit code 1."""

HELP = """\
/reset         forget the conversation
/system TEXT   forget it, and begin again with these instructions (without TEXT: with none)
/schema FILE   hold answers to the JSON Schema in FILE, and say whether they are valid (off: no longer)
/tools FILE    offer the tools in FILE, a JSON array in OpenAI's shape (off: no longer)
/reasoning     show the reasoning of the last answer
/help          show this list
/quit          end the program, as Ctrl-D does"""


class Conversation:
    """A conversation: the messages so far, and a way to ask for the next answer."""

    def __init__(self, client: Client, system: str | None, parameters: dict[str, Any]) -> None:
        self._client = client
        self._parameters = parameters
        self.messages: list[dict[str, Any]] = []
        self.given: dict[str, Any] = {}  # what `/schema` and `/tools` have read, by these words
        self.last = Answer()
        self.begin(system)

    def begin(self, system: str | None) -> None:
        self.messages = [{"role": "system", "content": system}] if system else []
        self.last = Answer()

    def reset(self) -> None:
        """Forget all messages but the instructions."""
        self.messages = [message for message in self.messages if message["role"] == "system"]
        self.last = Answer()

    def ask(self, text: str, show: Callable[[dict[str, Any], int], None]) -> None:
        """Ask a question, and pass the pieces of the answer to `show` as they come, with the number of reasoning tokens so far.

        What was shown is remembered, even if Ctrl-C or the server broke it off; a question without any answer is forgotten.
        """
        self.messages.append({"role": "user", "content": text})
        self.last = Answer()
        try:
            with contextlib.closing(self._pieces()) as pieces:
                for delta, num_reasoning_tokens in pieces:
                    self.last.add(delta)
                    show(delta, num_reasoning_tokens)
        finally:
            if self.last.is_empty:
                self.messages.pop()
            else:
                self.messages.append(self.last.message())

    def _pieces(self) -> Generator[tuple[dict[str, Any], int], None, None]:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"messages": self.messages, "stream_options": options, **self._parameters}
        if "schema" in self.given:
            named = {"name": "answer", "schema": self.given["schema"]}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        if "tools" in self.given:
            body["tools"] = self.given["tools"]
        with contextlib.closing(self._client.stream("/v1/chat/completions", body)) as events:
            for event in events:
                num_reasoning_tokens = (event.get("usage") or {}).get("reasoning_tokens", 0)
                for choice in event["choices"]:
                    yield choice["delta"], num_reasoning_tokens


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
            case "/schema" | "/tools":
                _give(conversation, command[1:], rest.strip(), is_person=is_person)
            case "/reasoning":
                print(conversation.last.reasoning or "The last answer has no reasoning.")
            case "/help":
                print(HELP)
            case _ if command.startswith("/"):
                _report(AnswerError(f"Unknown command {command}: /help lists the commands."), is_person=is_person)
            case _:
                _answer(conversation, line, is_person=is_person)


def _give(conversation: Conversation, name: str, path: str, *, is_person: bool) -> None:
    """Send what is in a file with each question from now on; with "off", no longer."""
    try:
        if path == "off":
            conversation.given.pop(name, None)
        else:
            conversation.given[name] = _read_json(name, path)
    except AnswerError as error:
        _report(error, is_person=is_person)


def _read_json(name: str, path: str) -> Any:
    if not path:
        raise AnswerError(f"/{name} needs the name of a file, or off.")
    try:
        return json.loads(Path(path).expanduser().read_text("utf-8"))
    except (OSError, RuntimeError) as error:  # RuntimeError: no such home folder, or too many levels of nesting
        raise AnswerError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    except ValueError as error:
        raise AnswerError(f"{path} is not JSON: {error}.") from error


def _answer(conversation: Conversation, line: str, *, is_person: bool) -> None:
    printer = Printer(is_terminal=sys.stdout.isatty())
    try:
        conversation.ask(line, printer.show)
        printer.end()
        if "schema" in conversation.given and conversation.last.content:
            verdict = judge(conversation.last.content, conversation.given["schema"])
            # A program that reads the answers finds nothing else on standard output.
            print(f"({verdict})", file=sys.stdout if is_person else sys.stderr)
    except KeyboardInterrupt:
        if not is_person:
            raise
        print(" (stopped)")
    except AnswerError as error:
        printer.break_off()
        _report(error, is_person=is_person)


def _report(error: AnswerError, *, is_person: bool) -> None:
    if not is_person:
        raise error
    print(error)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("srt chat [options]", "Talk to a model in the terminal.", EXAMPLES)
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
