"""What the parameters of the draw may be, of a request and of a model's defaults alike. No numpy: start-up checks the defaults with it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from srt.sampling.parameter_checks import Check, Number, TopK

DRAW_CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "temperature": Number(0, 1000),
        "top_k": TopK(),
        "top_p": Number(0, 1, open_low=True),
        "min_p": Number(0, 1),
        "repetition_penalty": Number(0.01, 2),
    }
)
