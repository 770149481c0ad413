"""`python -m srt.chat`: hold a conversation in the terminal. The same as `srt chat`."""

import sys

from srt.cli.chat import main

if __name__ == "__main__":
    sys.exit(main())
