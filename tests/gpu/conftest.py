"""Tests that need more GPUs than there are, are deselected as all of these are where there is none."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.device_count() >= 2:
        return
    left_out = [item for item in items if item.get_closest_marker("two_gpus")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
