"""How long a step may take before its process counts as stuck, by `--watchdog-timeout`."""

from __future__ import annotations

from srt.server_args import ServerArgs

TOKENS_PER_TIMEOUT = (
    256  # tokens of a step that the time-out is meant for; a step of more may take longer in proportion
)
UNLIMITED_CHUNK = 32768  # tokens that a step may have where --chunked-prefill-size sets no limit


def longest_step_s(args: ServerArgs) -> float:
    """Seconds that the largest step that can be planned may take. The scheduler knows the limit of each single step."""
    chunk = UNLIMITED_CHUNK if args.prefill_chunk == -1 else args.prefill_chunk
    return args.watchdog_timeout * max(1.0, chunk / TOKENS_PER_TIMEOUT)
