"""Continue a prompt, for scripts: the text goes to standard output as it comes, and nothing else does."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Generator, Sequence
from typing import Any

from srt.cli.terminal import Client, add_options, engine, exit_code_of, make_parser, not_text, sampling_of

EXAMPLES = """\
examples:
  srt generate "Once upon a time"
  srt generate --url http://localhost:30000 --json < prompt.txt

exit codes: 0 done, 1 failed (the reason is on standard error), 2 wrong
options, 130 stopped by Ctrl-C"""


def generate(client: Client, prompt: str, options: argparse.Namespace) -> None:
    """Write the continuation; with --json, one line of JSON with its finish reason and usage."""
    body = {"prompt": prompt, **sampling_of(options), "stream_options": {"include_usage": True}}
    answer: dict[str, Any] = {"text": "", "finish_reason": None}
    with contextlib.closing(_pieces(client, body, answer)) as pieces:
        for piece in pieces:
            answer["text"] += piece
            if not options.json:
                sys.stdout.write(piece)
                sys.stdout.flush()
    if options.json:  # escape characters that standard output could only write as `?`
        sys.stdout.write(json.dumps(answer, ensure_ascii=sys.stdout.encoding != "utf-8"))
    sys.stdout.write("\n")


def _pieces(client: Client, body: dict[str, Any], answer: dict[str, Any]) -> Generator[str, None, None]:
    for event in client.stream("/v1/completions", body):
        for choice in event["choices"]:
            answer["finish_reason"] = choice["finish_reason"] or answer["finish_reason"]
            answer["seed"] = choice.get("seed")
            yield choice["text"]
        if event.get("usage"):
            answer["usage"] = event["usage"]


def _prompt_of(options: argparse.Namespace) -> str:
    if options.prompt not in (None, "-"):
        return str(options.prompt)
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise not_text() from error


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(
        "srt generate [options] [prompt]", "Continue a prompt, and write the text as it comes.", EXAMPLES
    )
    parser.add_argument("prompt", nargs="?", help="the text to continue (default, and -: standard input)")
    parser.add_argument(
        "--json", action="store_true", help="write one line of JSON: text, finish_reason, usage (default: the text)"
    )
    add_options(parser)
    options = parser.parse_args(argv)
    if options.prompt is None and sys.stdin.isatty():
        parser.error("a prompt is missing: give it as an argument or on standard input")

    def work() -> None:
        prompt = _prompt_of(options)
        with engine(options) as client:
            generate(client, prompt, options)

    return exit_code_of(work)
