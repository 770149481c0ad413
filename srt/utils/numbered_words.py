"""Words of 64 bits in host memory that a device writes and the host polls: the number of the write above, a 32-bit value below.

A word is written in one piece, so its value has arrived when it contains the expected number.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

TAG_BITS: Final = 32
Pairs = NDArray[
    np.int32
]  # [words, 2]: the halves of little-endian words, which are the value and the number's low half


def pairs_of(words: NDArray[np.int64]) -> Pairs:
    """Return the halves of these words: [..., words, 2] int32 of the same memory."""
    return words.view(np.int32).reshape(*words.shape, 2)


def tag_of(number: int) -> int:
    """Return the low half of the number as an int32."""
    low = number & 0xFFFFFFFF
    return low - (low >> 31 << TAG_BITS)


def read_values(pairs: Pairs, number: int, count: int) -> NDArray[np.int32] | None:
    """Return the values of the first `count` words, at least one, if all have this number; else None."""
    tag = tag_of(number)
    if pairs.item(2 * count - 1) != tag:  # most polls end here
        return None
    # All numbers are read before the values. A processor does not keep so many loads in flight, so no value is older than its number.
    # Copying both at once would be wrong, as a copy may move parts of words. Bytes are compared because arrays are slow in cold caches.
    if pairs[:count, 1].tobytes() != tag.to_bytes(4, "little", signed=True) * count:
        return None
    return np.frombuffer(pairs[:count, 0].tobytes(), np.int32)
