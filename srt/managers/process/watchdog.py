"""Limits of time by which processes count as stuck or as paused from outside. Other files watch the processes:

- `supervisor/replacer.py` ends a process that sends no heartbeats for SILENT_S, or makes no progress for `longest_step_s`.
- `scheduler/step_deadline.py` ends the engine if its ranks do not answer a step in time.
- `heartbeats.py` ends nothing: it tells /health of a process that is silent or stuck, and has shorter limits.

A process that wakes OVERSLEPT_S too late was paused, and the others may have been paused with it. So the supervisor and the scheduler
then count anew (`Replacer.excuse`, `StepDeadline.excuse`), and a child does not count the pause as its own lack of progress (`AwakeTime`
in child.py).
"""

from __future__ import annotations

from srt.server_args import ServerArgs

OVERSLEPT_S = 2.0  # waking later than planned by this much means that this process was stopped from outside
TOKENS_PER_TIMEOUT = 256  # a step of up to this many tokens has one time-out, a larger one more in proportion
UNLIMITED_CHUNK = 32768  # tokens assumed for the largest step if --chunked-prefill-size sets no limit


def longest_step_s(args: ServerArgs) -> float:
    """Return the seconds that the largest possible step may take. The scheduler knows the limit of each single step."""
    chunk = UNLIMITED_CHUNK if args.prefill_chunk == -1 else args.prefill_chunk
    return args.watchdog_timeout * max(1.0, chunk / TOKENS_PER_TIMEOUT)


def least_step_s(args: ServerArgs) -> float:
    """Return the seconds that the smallest step may take. With attention groups it lasts as long as the largest one of another group."""
    return longest_step_s(args) if args.enable_dp_attention else args.watchdog_timeout
