"""The benchmark of prompt chunks: that it runs the same chunk each time, and which way sums go."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks.prompt_chunks import Chunks, choose_way, main
from tests.support.checkpoints import CheckpointFactory
from tests.support.runners import make_runner


def test_a_chunk_draws_the_same_ids_each_time(checkpoint: CheckpointFactory) -> None:
    runner = make_runner(checkpoint("qwen3"), 16, max_running_requests=3)
    chunks = Chunks(runner, 40, 2)
    (took_s, drawn), (_, again) = chunks.run(2), chunks.run(1)
    assert took_s > 0 and len(drawn) == 2 and drawn == again


@pytest.mark.parametrize("prompts", ["0", "3", "41"])
def test_prompts_that_leave_tokens_over_are_refused(prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens a second are those of all tokens, so a chunk must have them all."""
    with pytest.raises(SystemExit):
        main(["--tokens", "40", "--prompts", prompts])
    assert "prompts have equal numbers of tokens" in capsys.readouterr().err


def test_sums_go_the_way_that_was_chosen_last() -> None:
    class Peers(SimpleNamespace):
        def add_and_norm(self, *_: object) -> str:
            return "fused"

    peers = Peers(_large="boxes", _divisions="halves")
    found = []
    for way in ("nccl", "sums", "divided", "fused", "sums", "nccl"):
        choose_way(peers, "boxes", "halves", way)  # type: ignore[arg-type]  # which has what is changed
        found.append((peers._large, peers.add_and_norm(1, 2), peers._divisions))
    ways = {
        "nccl": (None, "fused", None),
        "sums": ("boxes", None, None),
        "fused": ("boxes", "fused", None),
        "divided": ("boxes", "fused", "halves"),
    }
    assert found == [ways[way] for way in ("nccl", "sums", "divided", "fused", "sums", "nccl")]
