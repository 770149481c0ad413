"""Medium sums over two or four GPUs, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.test_tensor_parallel import SIZES, run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]

MODULE = "tests.gpu.medium_sum_ranks"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cases", ["sums,row", "graph"])
def test_medium_sums_are_those_of_rank_order_however_late_a_rank_comes(cases: str, size: int, tmp_path: Path) -> None:
    run_ranks(cases, tmp_path, size, MODULE)


def test_a_peer_that_is_gone_ends_the_wait_of_a_medium_sum_with_an_error_that_names_it(tmp_path: Path) -> None:
    run_ranks("gone", tmp_path, 2, MODULE)
