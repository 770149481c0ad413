"""Which replica a request goes to: by what they have computed and by what they have to do."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from srt.managers.tokenizer_manager.prefix_table import PrefixTable
from srt.managers.tokenizer_manager.replica_client import ReplicaClient
from srt.managers.tokenizer_manager.replica_router import ReplicaRouter
from srt.protocol.messages import GenerateRequest, Load, LogprobSpec, SamplingSpec, int32_array


@dataclass
class Deliveries:
    num_requests: int = 0
    num_tokens: int = 0


@dataclass
class Loaded:
    """In the place of a ReplicaClient."""

    number: int
    load: Load | None = None
    num_sent: int = 0
    deliveries: Deliveries = field(default_factory=Deliveries)


def replicas(*num_requests: int) -> list[Any]:
    return [Loaded(number, deliveries=Deliveries(count)) for number, count in enumerate(num_requests)]


def request(ids: range | list[int], salt: str = "") -> GenerateRequest:
    one = int32_array([0])
    return GenerateRequest(0, "", int32_array(ids), one, [], SamplingSpec(8), LogprobSpec(), 1, cache_salt=salt)


def chosen(router: ReplicaRouter, asked: GenerateRequest, among: list[Any]) -> int:
    return router.choose(asked, cast("list[ReplicaClient]", among)).number


def test_a_prefix_leads_to_the_replica_that_has_it_and_another_namespace_does_not() -> None:
    router = ReplicaRouter("auto", random.Random(1))
    assert chosen(router, request(range(200)), replicas(3, 0)) == 1
    assert chosen(router, request([*range(150), 7, 7]), replicas(3, 4)) == 1  # it shares 144 of them
    assert chosen(router, request(range(200), "other"), replicas(3, 4)) == 0
    assert chosen(router, request([*range(40), *range(900, 1000)]), replicas(3, 4)) == 0  # too few are shared


def test_a_replica_with_much_more_to_do_is_passed_over_and_then_both_have_the_prefix() -> None:
    router = ReplicaRouter("auto", random.Random(1))
    assert chosen(router, request(range(100)), replicas(1, 0)) == 1
    assert chosen(router, request(range(100)), replicas(0, 20)) == 0
    assert {chosen(router, request(range(100)), replicas(*loads)) for loads in ((1, 3), (3, 1))} == {0, 1}


def test_a_replica_that_was_replaced_has_no_prefix_any_more() -> None:
    router = ReplicaRouter("auto", random.Random(1))
    before, after = replicas(1, 0), replicas(0, 1)
    assert chosen(router, request(range(100)), before) == 1
    router.forget(before[1])
    assert chosen(router, request(range(100)), after) == 0


def test_requests_of_other_frontends_count_as_the_scheduler_reports_them() -> None:
    router, (first, second) = ReplicaRouter("total_requests"), replicas(2, 3)
    first.load, first.num_sent = Load(3, 0, 0, 0), 1
    assert chosen(router, request([1]), [first, second]) == 1


@pytest.mark.parametrize(
    ("method", "expected"), [("round_robin", [0, 1, 2, 0]), ("total_requests", [1] * 4), ("total_tokens", [2] * 4)]
)
def test_each_method_chooses_as_its_name_says(method: str, expected: list[int]) -> None:
    router, among = ReplicaRouter(method), replicas(5, 1, 3)
    for replica, tokens in zip(among, (500, 900, 100), strict=True):
        replica.deliveries.num_tokens = tokens
    assert [chosen(router, request([number]), among) for number in range(4)] == expected


def test_requests_with_nothing_in_common_are_spread_evenly() -> None:
    router, among = ReplicaRouter("auto", random.Random(1)), replicas(0, 0)
    for number in range(100):
        among[chosen(router, request(range(1000 * number, 1000 * number + 100)), among)].deliveries.num_requests += 1
    assert [replica.deliveries.num_requests for replica in among] == [50, 50]


def test_the_table_forgets_the_prefixes_used_least_recently() -> None:
    table = PrefixTable(most=4)
    old, new = (table.hashes_of(request(range(start, start + 100))) for start in (0, 1000))
    assert Counter(map(len, (old, new))) == {2: 2}
    table.record(old, 0)
    table.record(new, 1)
    table.record(old, 0)
    table.record(table.hashes_of(request(range(2000, 2100))), 1)
    assert (table.find(old), table.find(new), len(table)) == ({0}, frozenset(), 4)
