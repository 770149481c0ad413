"""What benchmarks of steps wait for, as a server that has run for a while has it."""

from __future__ import annotations

import time

from srt.runtime import Runtime


def wait_for_graphs(runtime: Runtime) -> None:
    """They are captured while there is nothing else to do; steps before that run kernel by kernel, or padded to a larger graph."""
    while runtime.get_server_info()["internal_states"][0]["num_graphs_left"]:
        time.sleep(0.1)
