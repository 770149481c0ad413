"""Many streams of an engine that only talks, through a real frontend: the same peers as in benchmarks/frontend.py, and fewer."""

from __future__ import annotations

import pytest

from benchmarks.frontend import MODEL, count_wrong, measure, ours
from srt.utils.tokenizer import load_tokenizer

pytestmark = pytest.mark.e2e


def test_no_stream_of_many_loses_or_reorders_anything() -> None:
    num_streams, num_tokens, rate = 300, 60, 40.0
    with ours(rate, num_tokens, num_streams) as peer:
        load, streams = measure(peer, num_streams, num_tokens, rate)
    print(load)
    assert len(streams) == num_streams
    assert count_wrong(streams, num_tokens, load_tokenizer(MODEL)) == 0
