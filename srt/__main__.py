"""`python -m srt` is the console command `srt`."""

from __future__ import annotations

from srt.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
