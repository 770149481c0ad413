"""What a worker runs before its first request."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from srt.kernels.build.shared_memory import SHARED_BYTES
from srt.model_executor.startup.warm_up import (
    BATCHES,
    GPU_TOKENS,
    SHORT_TOKENS,
    batches,
    short_chunks,
    warm_up_requests,
)


@pytest.mark.parametrize(("room", "chunks"), [(100, [GPU_TOKENS, SHORT_TOKENS]), (70, [64, 5]), (20, [19]), (1, [])])
def test_a_gpu_is_warmed_up_by_a_prompt_in_two_chunks_where_there_is_room(room: int, chunks: list[int]) -> None:
    requests = list(warm_up_requests("cuda", room, 16))
    assert len(requests) == (2 if chunks else 0)
    for sections in requests:
        assert [int(section.extend_counts[0]) for section in sections[:-1]] == chunks
        assert [int(section.extend_samples[0]) for section in sections[:-1]] == [0] * (len(chunks) - 1) + [1]
        assert sections[-1].decode_slots.tolist() == [0]


@pytest.mark.parametrize("group", [1, 2, 4, 5, 8])
def test_short_chunks_have_all_kernels_of_tritons_attention_for_prompts(group: int) -> None:
    pytest.importorskip("triton")
    from srt.kernels.attention.extend_attention import ExtendTiles

    def kernels(tokens: Iterable[int]) -> set[ExtendTiles]:
        return {ExtendTiles.choose(torch.float16, 64, count * group, SHARED_BYTES[90]) for count in tokens}

    assert kernels([4096, *short_chunks("triton")]) == kernels(range(1, 300))
    chunks = [section.extend_counts.tolist() for section in next(warm_up_requests("cuda", 100, 16, (24, 8, 2)))]
    assert chunks == [[GPU_TOKENS], [24], [8], [2], []]


@pytest.mark.parametrize(("num_slots", "counts"), [(256, list(BATCHES)), (40, [2, 8, 32, 40]), (3, [2, 3]), (1, [1])])
@pytest.mark.parametrize("page_size", [1, 16])
def test_batches_of_each_kind_are_as_large_as_there_are_slots(
    num_slots: int, counts: list[int], page_size: int
) -> None:
    found = list(batches(num_slots, 100, page_size))
    for (*prompts, decodes), count in zip(found, counts, strict=True):
        admitted = [[admission.slot for admission in section.admissions] for section in prompts]
        assert admitted == ([[*range(count - 1)], [count - 1]] if count > 1 else [[0]])
        # The last prompt goes beside decodes of all others, then all decode.
        assert [section.decode_slots.tolist() for section in prompts] == [[], [*range(count - 1)]][-len(prompts) :]
        assert decodes.decode_slots.tolist() == list(range(count))
        for section in prompts:
            assert section.extend_samples.tolist() == [1] * len(section.admissions)
            assert not section.pages[0].pages.any(), "there is one page"
            assert (section.pages[0].counts * page_size >= 3).all()
    assert not list(batches(num_slots, 3, page_size)), "a third token has no room"
