"""Servers whose workers are modules of the tests."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from srt.managers.process.child import Child, run_child
from srt.managers.process.child_process import MODULES


def run_or_launch(module: str, work: Callable[[Child], None]) -> None:
    """Run this process as a worker; or, if it is told to `launch`, a server with the rest of the words, whose workers are `module`."""
    if sys.argv[1:2] != ["launch"]:
        run_child(work)
    from srt.launch_server import serve
    from srt.managers.supervisor.preflight import check_and_listen
    from srt.server_args import parse_args

    plan = check_and_listen(parse_args(sys.argv[2:]), http=True)
    sys.exit(serve(plan, time.monotonic(), None, {**MODULES, "worker": module}))
