"""What filters are set to where a request asked for none."""

from __future__ import annotations

from typing import Final

NO_TOP_K: Final = 1 << 62
NO_TOP_P: Final = 2.0  # above every sum of probabilities, rounding included: the filter leaves everything
