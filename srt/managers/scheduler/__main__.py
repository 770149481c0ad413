"""`python -m srt.managers.scheduler`: the scheduler, as the supervisor starts it."""

from srt.managers.process.child import run_child
from srt.managers.scheduler.process import main

if __name__ == "__main__":
    run_child(main)
