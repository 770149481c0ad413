"""Children that speak the supervisor's protocol and serve nothing: what one does is said in FAKE_BEHAVIOUR, a JSON object.

`{"worker 1": "fail"}`. Behaviours: `obey` (the default), `fail` (a StartError before it is ready), `crash` (an exception after the
server is ready), `die` (SIGKILL itself before it is ready), `quit` (exit code 3 after ready), `deaf` (never stops), `mute` (never
ready), `garble` (writes bytes that are no message), `helped` (starts a process of its own, which does not end with it), `tidy` (deletes
the folder of logs after the server is ready, and logs a line). The supervisor's own may be `full`: files can hold a few bytes only.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from srt.managers.process.child import Child, run_child
from srt.protocol.engine_work import EngineLedger, Pause
from srt.protocol.messages import EngineReplaced, RecordLedger, ServerReady
from srt.utils.errors import StartError
from srt.utils.log_files import log_folder

MODULE = "tests.support.fake_children"


def fake_child(child: Child) -> None:
    behaviour = json.loads(os.environ.get("FAKE_BEHAVIOUR", "{}")).get(child.name, "obey")
    pids = Path(os.environ["FAKE_PIDS"])
    (pids / child.name.replace(" ", "-")).write_text(f"{os.getpid()} {os.getppid()}")
    note("starts", f"{child.name} {child.start.generation} {child.start.num_tokens}")
    note("ledgers", f"{child.name} {child.start.generation} {[pause.frontend for pause in child.start.ledger.pauses]}")
    child.report_phase("loading", 1, 2)
    if behaviour == "fail":
        raise StartError("The weights are made of cheese.")
    if behaviour == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "helped" and child.start.generation == 1:
        subprocess.Popen(["sleep", "3600"])
    if behaviour == "garble":
        os.write(child.fileno(), b"\xff" * 64)
    if behaviour != "mute":
        child.start_heartbeats()
        child.report_ready({"max_total_num_tokens": 112})
    if child.start.role == "scheduler":  # which every generation is told of the one before
        child.send(RecordLedger(EngineLedger([*child.start.ledger.pauses, Pause(child.start.generation, "p")])))
    serve(child, behaviour)


def serve(child: Child, behaviour: str) -> None:
    while True:
        select.select([child.fileno()], [], [])
        while (message := child.receive()) is not None:
            if isinstance(message, ServerReady):
                begin(behaviour)
            elif isinstance(message, EngineReplaced):
                note("orders", f"{child.name}: EngineReplaced {message.generation}")
            elif behaviour != "deaf":
                note("stops", child.name)
                return


def note(kind: str, line: str) -> None:
    """For the test to read."""
    with (Path(os.environ["FAKE_PIDS"]) / kind).open("a") as log:
        log.write(line + "\n")


def begin(behaviour: str) -> None:
    if behaviour == "crash":
        raise ValueError("a page was lost")
    if behaviour == "quit":
        os._exit(3)
    if behaviour == "tidy":
        shutil.rmtree(log_folder())
        logging.error("The folder of logs is gone.")


def launch() -> int:
    """A real supervisor of fake children: `python -m tests.support.fake_children launch PORT NUM_FRONTENDS TP REPLACEMENTS LOG_LEVEL`."""
    from srt.launch_server import serve as supervise
    from srt.managers.supervisor.preflight import ServerPlan, listen
    from srt.server_args import ServerArgs

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, pytest would have it ignored here too
    port, num_frontends, tp_size, max_replacements = map(int, sys.argv[2:6])
    listener: socket.socket = listen("127.0.0.1", port)
    args = ServerArgs(
        model_path="fake",
        port=listener.getsockname()[1],
        tokenizer_worker_num=num_frontends,
        tp_size=tp_size,
        max_replacements=max_replacements,
        log_level=sys.argv[6],
    )
    modules = dict.fromkeys(("frontend", "scheduler", "worker"), MODULE)
    if json.loads(os.environ["FAKE_BEHAVIOUR"]).get("supervisor") == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
    try:
        return supervise(ServerPlan(args, Path("/nowhere"), listener), time.monotonic(), None, modules)
    except StartError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["launch"]:
        sys.exit(launch())
    run_child(fake_child)
