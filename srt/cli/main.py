"""The console command `srt`, which runs one of its commands: serve, chat, generate, doctor, health or verify."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from srt.version import __version__

USAGE = """\
usage: srt COMMAND [options]

  srt serve --model-path MODEL    start a server; the same as python -m srt.launch_server
  srt chat                        talk to a model in the terminal
  srt generate "Once upon a time" continue a prompt, for scripts
  srt doctor                      show what a bug report needs, and check whether a server could start
  srt health                      check whether the servers of this user are well, for scripts
  srt verify answers.jsonl        replay recorded answers, and compare ids and logprobs to the bit
  srt --version                   print the version

Each command lists its options with --help."""

COMMANDS = {
    "serve": "srt.launch_server",
    "chat": "srt.cli.chat",
    "generate": "srt.cli.generate",
    "doctor": "srt.cli.doctor",
    "health": "srt.cli.health",
    "verify": "srt.cli.verify",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    command, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    match command:
        case name if name in COMMANDS:
            # Imported by name, so that a command loads only its own modules.
            status: int = importlib.import_module(COMMANDS[name]).main(rest)
            return status
        case "--version" | "-V":
            print(f"srt {__version__}")
            return 0
        case "--help" | "-h":
            print(USAGE)
            return 0
        case _:
            print(f"srt: unknown command {command!r}\n{USAGE}", file=sys.stderr)
            return 2
