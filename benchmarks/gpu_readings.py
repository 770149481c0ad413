"""A GPU's clock and power while it works."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch


@dataclass
class Readings:
    """Of the device's state, while it works."""

    mhz: list[int]
    watts: list[float]

    def text(self) -> str:
        return f"  {self.mhz_from(1 / 3):5.0f} MHz {self.watts_from(1 / 3):4.0f} W" if self.mhz else ""

    def mhz_from(self, share: float) -> float:
        """The mean, but for the first so many of them."""
        return float(np.mean(self.mhz[int(share * len(self.mhz)) :]))

    def watts_from(self, share: float) -> float:
        return float(np.mean(self.watts[int(share * len(self.watts)) :]))


@contextmanager
def watched(device: torch.device) -> Iterator[Readings]:
    """Nothing is read where there is no such GPU, or NVIDIA's library is not installed."""
    readings, is_over = Readings([], []), threading.Event()

    def read() -> None:
        while not is_over.wait(0.02):
            readings.mhz.append(torch.cuda.clock_rate(device))
            readings.watts.append(torch.cuda.power_draw(device) / 1e3)

    try:
        is_readable = device.type == "cuda" and min(torch.cuda.clock_rate(device), torch.cuda.power_draw(device)) > 0
    except Exception:
        is_readable = False
    thread = threading.Thread(target=read, daemon=True)
    if is_readable:
        thread.start()
    try:
        yield readings
    finally:
        is_over.set()
        if is_readable:
            thread.join()
