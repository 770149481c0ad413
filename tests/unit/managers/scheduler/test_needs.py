"""A request that needs an adapter and a grammar gets them one after the other, so that no two requests wait for each other."""

from __future__ import annotations

import numpy as np
import pytest

from srt.managers.scheduler.needs import Needs
from srt.managers.scheduler.request import Request, expand
from srt.protocol.messages import (
    GenerateRequest,
    LogprobSpec,
    Prepare,
    Prepared,
    Release,
    Resource,
    SamplingSpec,
    int32_array,
)
from tests.support.wire import request_at_scheduler


def request(number: int, adapter: str = "", grammar: str = "") -> Request:
    message = GenerateRequest(
        rid=number,
        label=str(number),
        prompt_ids=int32_array([1]),
        choices=np.zeros(1, np.int32),
        output_ids=[int32_array()],
        sampling=SamplingSpec(4),
        logprobs=LogprobSpec(),
        seed=0,
        resource=Resource("grammar", grammar, b"") if grammar else None,
        adapter=Resource("adapter", adapter, b"") if adapter else None,
    )
    (one,) = expand(0, request_at_scheduler(message), number)
    return one


class World:
    """Two ranks, room for one adapter and one grammar, and the requests that have not ended."""

    def __init__(self) -> None:
        self.needs = Needs(2, 1, 1)
        self.live: list[Request] = []
        self.now = 0.0

    def enter(self, one: Request) -> bool:
        self.live.append(one)
        return self.needs.enter(one)

    def leave(self, one: Request) -> None:
        self.live.remove(one)
        self.needs.leave(one)
        self.needs.check(self.live)

    def told(self) -> list[str]:
        """What the workers are told now."""
        found = []
        for message in self.needs.pop_messages(self.now):
            match message:
                case Prepare(resource):
                    found.append(f"+{resource.key}")
                case Release(key):
                    found.append(f"-{key}")
        self.needs.check(self.live)
        return found

    def answer(self, key: str, reason: str = "") -> list[Request]:
        assert self.needs.answered(0, Prepared(key)) == []
        done = self.needs.answered(1, Prepared(key, reason))
        self.needs.check(self.live)
        return done


def test_the_grammar_is_asked_for_when_the_adapter_is_there() -> None:
    world = World()
    both = request(1, "red", "json")
    assert not world.enter(both)
    assert world.told() == ["+red"]
    assert world.answer("red") == []
    assert world.told() == ["+json"]
    assert world.answer("json") == [both]
    assert world.needs.failure(both) is None
    assert world.enter(request(2, "red")) and world.enter(request(3, "red", "json")) and world.enter(request(4))
    assert world.needs.num_held == 2


def test_requests_that_need_what_others_hold_get_it_in_the_end() -> None:
    """One holds the adapter, another one the grammar, and each needs what the other one holds."""
    world = World()
    first, second, third = request(1, "red", "json"), request(2, "", "regex"), request(3, "blue", "regex")
    for one in (first, second, third):
        assert not world.enter(one)
    assert world.told() == ["+red", "+regex"]
    assert world.answer("regex") == [second]
    assert world.answer("red") == []
    assert world.told() == []
    world.leave(second)
    assert world.told() == ["-regex", "+json"]
    assert world.answer("json") == [first]
    world.leave(first)
    assert world.told() == ["-red", "+blue"]
    assert world.answer("blue") == []
    assert world.told() == ["-json", "+regex"]
    assert world.answer("regex") == [third]


@pytest.mark.parametrize("which", ["red", "json"])
def test_a_request_fails_with_either(which: str) -> None:
    world = World()
    both = request(1, "red", "json")
    world.enter(both)
    world.told()
    if which == "json":
        world.answer("red")
        world.told()
    assert world.answer(which, "There is none.") == [both]
    assert world.needs.failure(both) == (400, "There is none.")
    world.leave(both)
    assert world.told() == [f"-{which}"]
    assert world.needs.num_held == (which == "json")


def test_what_takes_too_long_ends_the_request_and_its_place_is_free() -> None:
    world = World()
    late, other = request(1, "red", "json"), request(2, "blue")
    world.enter(late)
    world.enter(other)
    assert world.told() == ["+red"]
    assert world.needs.next_overdue_s() == 60.0
    world.now = 61.0
    assert world.needs.overdue(world.now) == [late]
    failure = world.needs.failure(late)
    assert failure is not None and failure[0] == 503
    world.leave(late)
    assert world.told() == ["+blue"]
