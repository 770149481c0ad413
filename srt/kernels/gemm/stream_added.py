"""What LoRA adapters add to a streamed product: when programs compute it, and the shared memory that it takes beside their ring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_MOST_ROWS_AHEAD: Final = 32
"""Up to this many rows, programs add while weights are multiplied; more would need too much shared memory."""
_MOST_BYTES_AHEAD: Final = 46 << 10
_MOST_STAGES_AHEAD: Final = 16
"""x comes later by the time of A x, so more weights are requested before it."""
_SHRINK_BYTES: Final = 6 << 10
"""Left free for two programs of `shared_shrink` beside one of the product."""


@dataclass(frozen=True, slots=True)
class AddedSums:
    """B (A x) in a program, computed from A x by threads that do not multiply, or by each thread for its own sums."""

    rows: int  # of x, padding included
    own_rows: int  # of the result: other programs of the cluster compute the rest
    low: int  # rows of A
    w_rows: int

    @property
    def is_ahead(self) -> bool:
        """Whether the product is computed while weights are multiplied."""
        return self.rows <= _MOST_ROWS_AHEAD and self._bytes_ahead <= _MOST_BYTES_AHEAD

    @property
    def num_bytes(self) -> int:
        """Bytes for the numbers of rows' adapters, for A x, and for the sums that are computed ahead."""
        return self._bytes_ahead if self.is_ahead else 4 * self.rows * (self.low + 1) + 16

    def most_stages(self, most: int) -> int:
        """Return the most stages of the ring, of which there are `most` without adapters."""
        return _MOST_STAGES_AHEAD if self.is_ahead else most

    @property
    def num_spare(self) -> int:
        """Bytes that the ring leaves free."""
        return _SHRINK_BYTES if self.is_ahead else 0

    @property
    def _bytes_ahead(self) -> int:
        return 4 * self.own_rows * (self.low + self.w_rows) + 4 * self.rows + 32
