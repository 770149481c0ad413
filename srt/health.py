"""`python -m srt.health`: say whether the servers on this host are well. The same as `srt health`."""

import sys

from srt.cli.health import main

if __name__ == "__main__":
    sys.exit(main())
