"""The options of speculative decoding: their choices, defaults, and what cannot be combined."""

from __future__ import annotations

SPECULATIVE_ALGORITHMS = ("NGRAM", "STANDALONE")
DEFAULT_DRAFT_TOKENS = {"NGRAM": 8, "STANDALONE": 5}


def speculation_obstacle(
    algorithm: str | None, draft_path: str | None, steps: int | None, tokens: int | None, least: int, longest: int
) -> str | None:
    """Return a sentence about options that contradict each other; None if they do not. The last two are the match windows."""
    if longest < least:
        windows = ("--speculative-ngram-max-match-window-size", "--speculative-ngram-min-match-window-size")
        return f"{windows[0]} {longest} is less than {windows[1]} {least}."
    if algorithm == "STANDALONE" and draft_path is None:
        return "--speculative-algorithm STANDALONE needs --speculative-draft-model-path."
    if algorithm != "STANDALONE" and draft_path is not None:
        return "--speculative-draft-model-path needs --speculative-algorithm STANDALONE."
    if algorithm != "STANDALONE" and steps is not None:
        return "--speculative-num-steps needs --speculative-algorithm STANDALONE."
    if algorithm is None and tokens is not None:
        return "--speculative-num-draft-tokens needs --speculative-algorithm."
    if steps is not None and tokens not in (None, steps + 1):
        return f"--speculative-num-draft-tokens {tokens} is not --speculative-num-steps {steps} and one more."
    return None
