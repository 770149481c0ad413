"""Conversion of logprobs from the messages' form (arrays over many tokens) to the APIs' form (a row for each token)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from srt.managers.tokenizer_manager.api_types import TokenLogprob
from srt.protocol.messages import LogprobSpec, TokenLogprobs


def logprob_rows(message: TokenLogprobs, token_ids: Sequence[int], spec: LogprobSpec) -> list[TokenLogprob]:
    """Return one row for each of `token_ids`, which are the first tokens of the message. The prompt's first token has no logprobs: its
    row holds None and no alternatives."""
    chosen = message.chosen.tolist()
    top_ids, top = message.top_ids.tolist(), message.top.tolist()
    of_ids, asked_ids = message.of_ids.tolist(), spec.ids.tolist()
    vector = message.vector if len(message.vector) else None
    rows = []
    for i, token_id in enumerate(token_ids):
        if math.isnan(chosen[i]):
            rows.append(TokenLogprob(None, token_id))
            continue
        best = zip(top[i * spec.top : (i + 1) * spec.top], top_ids[i * spec.top : (i + 1) * spec.top], strict=True)
        of_these = zip(of_ids[i * len(asked_ids) : (i + 1) * len(asked_ids)], asked_ids, strict=True)
        rows.append(TokenLogprob(chosen[i], token_id, tuple(best), tuple(of_these), vector))
    return rows
