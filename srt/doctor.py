"""`python -m srt.doctor`: say what a bug report needs to know about this machine. The same as `srt doctor`."""

import sys

from srt.cli.doctor import main

if __name__ == "__main__":
    sys.exit(main())
