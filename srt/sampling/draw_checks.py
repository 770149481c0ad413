"""Ranges of the drawing parameters, for requests and for a model's defaults. Free of numpy, since start-up checks the defaults here."""

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
