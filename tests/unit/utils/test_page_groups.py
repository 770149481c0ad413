"""The division of the KV memory between layers that see everything and layers with a window."""

from __future__ import annotations

from dataclasses import replace

import pytest

from srt.utils.families.windows import windowed_layers
from srt.utils.layer_spec import FeedForward, SelfAttention
from srt.utils.page_groups import MemoryShares, PageGroups, first_column

GEMMA_3_4B = [None if (layer + 1) % 6 == 0 else 1024 for layer in range(34)]
BYTES_PER_LAYER = 2 * 4 * 256 * 2  # keys and values of 4 heads of 256, in bfloat16
MEMORY = 60 << 30


def shares_of(windows: list[int | None], context_length: int = 131_072) -> MemoryShares:
    attention = SelfAttention(8, 4, 256, 256**-0.5, None)
    groups = PageGroups.of(windowed_layers(attention, FeedForward(1), windows))
    sizes = [BYTES_PER_LAYER * groups.of_layer.count(group) for group in range(groups.num)]
    return MemoryShares(tuple(sizes), groups.windows, context_length, chunk=8192, page_size=16)


def test_a_memory_holds_4_5_times_the_tokens_of_gemma_3_4b() -> None:
    without = MEMORY // (len(GEMMA_3_4B) * BYTES_PER_LAYER)
    shares = shares_of(GEMMA_3_4B)
    tokens = shares.tokens_in(MEMORY)
    first, window = shares.pages(tokens)
    assert tokens >= 4.5 * without
    assert 0.99 * MEMORY < shares.bytes_of(tokens) <= MEMORY
    assert window * 12 >= first, "requests of twelve windows fill both groups"
    print(f"\n{tokens / without:.2f} times as many tokens, {16 * window / without:.2f} in the window group")


def test_layers_without_windows_share_one_group() -> None:
    shares = shares_of([None, None])
    assert shares.windows == ()
    assert shares.tokens_in(MEMORY) == MEMORY // (2 * BYTES_PER_LAYER)
    assert shares.pages(1600) == [100]


def test_a_window_group_has_room_for_a_window_and_a_chunk_but_no_more_than_the_first_group() -> None:
    shares = replace(shares_of(GEMMA_3_4B), chunk=256)
    assert shares.pages(8_000) == [500, (1024 + 256) // 16 + 2]
    assert shares.pages(1_000) == [62, 62]


@pytest.mark.parametrize("windows", [[4096] * 32, [512, 1024]])
def test_a_model_with_windows_alone_holds_as_many_windows_as_before_and_longer_requests(
    windows: list[int | None],
) -> None:
    shares, most = shares_of(windows), max(window or 0 for window in windows)
    before = MEMORY // (len(windows) * BYTES_PER_LAYER)
    tokens = shares.tokens_in(MEMORY)
    first, *others = shares.pages(tokens)
    assert tokens > 8 * before
    assert 16 * others[-1] > 0.6 * before
    assert first * most <= 12 * most * others[-1], "requests of twelve windows fill both groups"
    assert 0.99 * MEMORY < shares.bytes_of(tokens) <= MEMORY


def test_groups_are_ordered_by_window() -> None:
    groups = PageGroups.of(windowed_layers(SelfAttention(1, 1, 2, 1.0, None), FeedForward(1), [9, None, 5, 9]))
    assert groups == PageGroups((5, 9), (2, 0, 1, 2))


def test_the_first_column_is_that_of_the_last_position_that_is_seen() -> None:
    assert [first_column(position, 5, 4) for position in (0, 4, 7, 8, 11, 12)] == [0, 0, 0, 1, 1, 2]
