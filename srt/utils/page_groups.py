"""Page groups: layers that keep the same tokens of a request share pages, and the KV memory is divided between the groups. No torch.

The first group keeps all tokens. Layers with a window keep only the last tokens, and have a group of their own for each window. If every
layer has one, no memory belongs to the pages of the first group: they only number the tokens that the prefix cache knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from srt.utils.layer_spec import LayerSpec

WINDOWS_OF_A_REQUEST: Final = 11.4
"""Length, in windows, of the request for which the memory is divided: requests that are longer lack pages of the first group first, and
shorter ones pages of the window group. See docs/decisions/page-groups.md."""
MOST_CHUNK: Final = 8192  # prompt tokens of one step for which a window group must have room


@dataclass(frozen=True, slots=True)
class PageGroups:
    """The windows of the groups after the first, ascending, and the group of each layer."""

    windows: tuple[int, ...]
    of_layer: tuple[int, ...]

    @property
    def num(self) -> int:
        return 1 + len(self.windows)

    @classmethod
    def of(cls, layers: Sequence[LayerSpec]) -> PageGroups:
        windows = [layer.attention.window for layer in layers]
        sizes = tuple(sorted({window for window in windows if window is not None}))
        return cls(sizes, tuple(0 if window is None else 1 + sizes.index(window) for window in windows))


def first_column(position: int, window: int, page_size: int) -> int:
    """Return the column of the first page that the token at `position` sees through a window."""
    return max(0, position - window + 1) // page_size


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """How a KV memory is divided between groups, by the number of tokens that the first group holds."""

    bytes_per_token: tuple[int, ...]
    """On one rank, by group: keys and values of all its layers."""
    windows: tuple[int, ...] = ()
    context_length: int = 0
    chunk: int = 0
    """Most prompt tokens of one step."""
    page_size: int = 1

    def pages(self, num_tokens: int) -> list[int]:
        """Return the number of pages of each group."""
        first = num_tokens // self.page_size
        return [first, *(min(first, self._window_pages(num_tokens, window)) for window in self.windows)]

    def bytes_of(self, num_tokens: int) -> int:
        """Return the bytes that the groups take in all."""
        if not self.windows:
            return num_tokens * self.bytes_per_token[0]
        pages = self.pages(num_tokens)
        return sum(n * self.page_size * size for n, size in zip(pages, self.bytes_per_token, strict=True))

    def tokens_in(self, num_bytes: int) -> int:
        """Return the largest number of tokens whose pages fit into these bytes."""
        if not self.windows:
            return num_bytes // self.bytes_per_token[0]
        low, high = 0, 1
        while self.bytes_of(high) <= num_bytes:
            low, high = high, 2 * high
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.bytes_of(middle) <= num_bytes else (low, middle - 1)
        return low

    def _window_pages(self, num_tokens: int, window: int) -> int:
        """Return as many pages as the requests' windows need, and at least what one chunk needs: it sees a window before it."""
        longest = min(self.context_length, WINDOWS_OF_A_REQUEST * window)
        chunk = min(self.chunk if self.chunk > 0 else MOST_CHUNK, MOST_CHUNK)
        least = (window + chunk) // self.page_size + 2
        return max(least, -(-num_tokens * window // int(longest * self.page_size)))
