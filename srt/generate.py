"""`python -m srt.generate`: continue a prompt, for scripts. The same as `srt generate`."""

import sys

from srt.cli.generate import main

if __name__ == "__main__":
    sys.exit(main())
