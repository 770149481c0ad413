"""Count the drafts to keep: those that equal the row's own draws.

A draw depends on nothing but seed, position and logits. So a draft that equals the draw at its position is the token that the row
would have got without drafts, and the logits behind it are those that it would have had. No answer changes, whatever is drafted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def count_accepted(ids: Ints, drafts: Ints, is_finite: NDArray[np.bool_], num_draws: Ints) -> Ints:
    """Return how many draws of each row count: up to the first that differs from the draft at its position, that one included.

    Rows have `num_draws[i]` consecutive entries of the other arrays; the last entry of a row has no draft. A draw that is not finite
    does not count: the row draws it again in its next step. If it is the row's first draw, the result is -1.
    """
    ends = np.cumsum(num_draws)
    breaks = (ids != drafts) | ~is_finite
    breaks[ends - 1] = True
    (places,) = breaks.nonzero()
    firsts = ends - num_draws
    at = places[np.searchsorted(places, firsts)]
    counts: Ints = at - firsts + is_finite[at]
    counts[counts == 0] = -1
    return counts
