"""What a worker runs before its first request."""

from __future__ import annotations

import pytest

from srt.model_executor.warm_up import BATCHES, GPU_TOKENS, SHORT_TOKENS, batches, warm_up_requests


@pytest.mark.parametrize(("room", "chunks"), [(100, [GPU_TOKENS, SHORT_TOKENS]), (70, [64, 5]), (20, [19]), (1, [])])
def test_a_gpu_is_warmed_up_by_a_prompt_in_two_chunks_where_there_is_room(room: int, chunks: list[int]) -> None:
    requests = list(warm_up_requests("cuda", room, 16))
    assert len(requests) == (2 if chunks else 0)
    for sections in requests:
        assert [int(section.extend_counts[0]) for section in sections[:-1]] == chunks
        assert [int(section.extend_samples[0]) for section in sections[:-1]] == [0] * (len(chunks) - 1) + [1]
        assert sections[-1].decode_slots.tolist() == [0]


@pytest.mark.parametrize(("num_slots", "counts"), [(256, list(BATCHES)), (40, [2, 8, 32, 40]), (3, [2, 3])])
def test_batches_of_each_kind_are_as_large_as_there_are_slots(num_slots: int, counts: list[int]) -> None:
    found = list(batches(num_slots, 100))
    for (prompts, decodes), count in zip(found, counts, strict=True):
        assert [admission.slot for admission in prompts.admissions] == list(range(count))
        assert prompts.extend_samples.tolist() == [1] * count
        assert decodes.decode_slots.tolist() == list(range(count))
        assert not prompts.pages[0].pages.any(), "there is one page"
    assert not list(batches(num_slots, 1)), "a second token has no room"
