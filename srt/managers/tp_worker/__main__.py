"""`python -m srt.managers.tp_worker`: entry point of a worker process; the supervisor starts it."""

from srt.managers.process.child import run_child
from srt.managers.tp_worker.process import main

if __name__ == "__main__":
    run_child(main)
