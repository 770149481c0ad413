"""Continue a prompt, for scripts: the text goes to standard output as it comes, and nothing else does.

python -m srt.generate --model-path FOLDER "Once upon a time"
python -m srt.generate --url http://localhost:30000 - < prompt.txt
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from srt.managers.io_struct import RequestError
from srt.server_args import ArgumentError
from srt.terminal import AnswerError, Client, add_options, engine, sampling_of
from srt.utils.errors import StartError


def generate(client: Client, prompt: str, options: argparse.Namespace) -> None:
    body = {"prompt": prompt, **sampling_of(options)}
    if options.stop:
        body["stop"] = options.stop
    for event in client.stream("/v1/completions", body):
        for choice in event["choices"]:
            sys.stdout.write(choice["text"])
            sys.stdout.flush()
    sys.stdout.write("\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m srt.generate", description="Continue a prompt.")
    parser.add_argument("prompt", help="the text to continue; - reads standard input")
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be given several times"
    )
    add_options(parser)
    options = parser.parse_args(argv)
    try:
        prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
        with engine(options) as client:
            generate(client, prompt, options)
    except (AnswerError, StartError, ArgumentError, RequestError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
