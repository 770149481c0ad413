"""A share of the fuzzing; `python -m tests.e2e.fuzz` does all of it."""

from __future__ import annotations

import pytest

from tests.e2e.fuzz import fuzz, tiny_server


@pytest.mark.e2e
def test_no_case_breaks_the_server_and_a_third_is_answered() -> None:
    with tiny_server() as url:
        report = fuzz(url, num_cases=600, seed=7)
    print(report)
    assert report.failures == []
    assert report.num_cases >= 600
    assert report.share_of_200 >= 0.3, report.refusals.most_common(10)
