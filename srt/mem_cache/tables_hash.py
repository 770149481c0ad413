"""The digest by which a scheduler and its workers verify that they hold the same page table."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray


def tables_hash(pages_of_slots: Mapping[int, Sequence[int] | NDArray[np.int32]]) -> str:
    """Return 16 hexadecimal digits over the slots admitted since the last reset, each with the pages of its latest admission in order.

    A worker does not learn that a request has ended, so a slot counts until it is admitted again. The scheduler's record of what it
    sent, with which this is compared, counts in the same way. The order of the map does not matter; an empty map has a digest too.
    """
    digest = hashlib.blake2b(digest_size=8)
    for slot in sorted(pages_of_slots):
        pages = pages_of_slots[slot]
        digest.update(np.asarray([slot, len(pages), *pages], "<i4").tobytes())
    return digest.hexdigest()
