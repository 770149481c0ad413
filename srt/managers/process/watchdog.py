"""Time that a step may take before its process counts as stuck, from `--watchdog-timeout`."""

from __future__ import annotations

from srt.server_args import ServerArgs

TOKENS_PER_TIMEOUT = 256  # a step of up to this many tokens has one time-out, a larger one more in proportion
UNLIMITED_CHUNK = 32768  # tokens assumed for the largest step if --chunked-prefill-size sets no limit


def longest_step_s(args: ServerArgs) -> float:
    """Return the seconds that the largest possible step may take. The scheduler knows the limit of each single step."""
    chunk = UNLIMITED_CHUNK if args.prefill_chunk == -1 else args.prefill_chunk
    return args.watchdog_timeout * max(1.0, chunk / TOKENS_PER_TIMEOUT)
