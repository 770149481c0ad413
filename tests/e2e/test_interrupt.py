"""Ctrl-C in a program that uses srt: its requests end with the wait for them, and the program goes on if it wants to."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.support.server_process import ROOT

pytestmark = pytest.mark.e2e

PROGRAM = """
import asyncio, sys, threading
import srt

long = {"max_new_tokens": 1500, "ignore_eos": True}


def calls(runtime):
    yield "one", lambda: runtime.generate("Tell me everything", long)
    yield "many", lambda: runtime.generate(["Tell me everything"] * 5, long)
    yield "stream", lambda: [part for part in runtime.generate("Tell me everything", long, stream=True)]
    yield "coroutine", lambda: asyncio.run(runtime.async_generate("Tell me everything", long))


def state(runtime):
    return runtime.get_server_info()["internal_states"][0]


def tell_when_it_runs(runtime, name):
    while not state(runtime)["num_running"]:
        pass
    print(name, flush=True)


with srt.Runtime(model_path="tiny", device="cpu", max_total_tokens=16384) as runtime:
    for name, call in calls(runtime):
        aborted = state(runtime)["num_aborted"]
        threading.Thread(target=tell_when_it_runs, args=(runtime, name)).start()
        try:
            call()
        except KeyboardInterrupt:
            pass
        else:
            sys.exit(f"{name} came to its end")
        while (now := state(runtime))["num_running"] or now["num_waiting"]:
            pass
        assert now["num_aborted"] > aborted, name
        assert now["num_free_slots"] == now["num_slots"]
    assert runtime.generate("Hello", {"max_new_tokens": 3})["meta_info"]["completion_tokens"] == 3
print("done", flush=True)
"""


def test_ctrl_c_ends_what_a_program_waits_for_and_not_its_engine() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as program:
        assert program.stdout is not None
        said = []
        while (line := program.stdout.readline().strip()) and line != "done":
            said.append(line)
            program.send_signal(signal.SIGINT)
        rest = program.communicate(timeout=60)
        assert (program.returncode, line) == (0, "done"), rest
        assert said == ["one", "many", "stream", "coroutine"]
