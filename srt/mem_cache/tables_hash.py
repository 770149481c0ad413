"""The digest by which a scheduler and its workers find out whether they hold the same page table."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray


def tables_hash(pages_of_slots: Mapping[int, Sequence[int] | NDArray[np.int32]]) -> str:
    """16 hexadecimal digits over every slot admitted since the last reset and the pages given to its latest admission, in order.

    A worker does not learn that a request ended: a slot counts until it is admitted anew. So does the scheduler's own record
    of what it sent, which is what this is compared with. Slots in any order; the empty map has a digest too.
    """
    digest = hashlib.blake2b(digest_size=8)
    for slot in sorted(pages_of_slots):
        pages = pages_of_slots[slot]
        digest.update(np.asarray([slot, len(pages), *pages], "<i4").tobytes())
    return digest.hexdigest()
