"""`python -m srt.cli` is the console command `srt`."""

from srt.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
