"""Values of top_k and top_p that switch these filters off."""

from __future__ import annotations

from typing import Final

NO_TOP_K: Final = 1 << 62
NO_TOP_P: Final = 2.0  # above every sum of probabilities, rounding included, so the filter keeps every token
