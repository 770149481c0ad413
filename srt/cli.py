"""The console command `srt`: `srt serve ...` starts a server, `srt --version` says what is installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import srt

USAGE = """\
usage: srt serve --model-path MODEL [options]    start a server; the same as python -m srt.launch_server
       srt serve --help                          list the options
       srt --version                             print the version"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    command, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    match command:
        case "serve":
            from srt.launch_server import main as launch

            return launch(rest)
        case "--version" | "-V":
            print(f"srt {srt.__version__}")
            return 0
        case "--help" | "-h":
            print(USAGE)
            return 0
        case _:
            print(f"srt: unknown command {command!r}\n{USAGE}", file=sys.stderr)
            return 2


if __name__ == "__main__":
    raise SystemExit(main())
