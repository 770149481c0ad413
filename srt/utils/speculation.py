"""The options of speculative decoding: their choices, defaults, and what cannot be combined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SPECULATIVE_ALGORITHMS = ("NGRAM", "STANDALONE", "EAGLE3", "NEXTN")
WITH_CHECKPOINT = ("STANDALONE", "EAGLE3")  # algorithms that load something that drafts from a folder of its own
WITH_STEPS = (*WITH_CHECKPOINT, "NEXTN")  # algorithms that draft in steps of a model or a head
DEFAULT_DRAFT_TOKENS = {"NGRAM": 8, "STANDALONE": 5, "EAGLE3": 4, "NEXTN": 4}


def speculation_obstacle(options: Mapping[str, Any]) -> str | None:
    """Return a sentence about options that contradict each other; None if they do not."""
    algorithm, steps = options["speculative_algorithm"], options["speculative_num_steps"]
    path, tokens = options["speculative_draft_model_path"], options["speculative_num_draft_tokens"]
    least, longest = (options[f"speculative_ngram_{end}_match_window_size"] for end in ("min", "max"))
    if longest < least:
        windows = ("--speculative-ngram-max-match-window-size", "--speculative-ngram-min-match-window-size")
        return f"{windows[0]} {longest} is less than {windows[1]} {least}."
    if algorithm in WITH_CHECKPOINT and path is None:
        return f"--speculative-algorithm {algorithm} needs --speculative-draft-model-path."
    if algorithm not in WITH_CHECKPOINT and path is not None:
        return f"--speculative-draft-model-path needs --speculative-algorithm {' or '.join(WITH_CHECKPOINT)}."
    if algorithm not in WITH_STEPS and steps is not None:
        return f"--speculative-num-steps needs --speculative-algorithm {' or '.join(WITH_STEPS)}."
    if algorithm is None and tokens is not None:
        return "--speculative-num-draft-tokens needs --speculative-algorithm."
    if steps is not None and tokens not in (None, steps + 1):
        return f"--speculative-num-draft-tokens {tokens} is not --speculative-num-steps {steps} and one more."
    return _eagle_obstacle(algorithm, options["speculative_eagle_topk"])


def _eagle_obstacle(algorithm: str | None, topk: int | None) -> str | None:
    if topk is not None and algorithm not in ("EAGLE3", "NEXTN"):
        return "--speculative-eagle-topk needs --speculative-algorithm EAGLE3 or NEXTN."
    if topk not in (None, 1):
        return f"--speculative-eagle-topk {topk} is not supported: drafts are chains, so leave it out or choose 1."
    return None
