"""A request that needs an adapter and a grammar gets them one after the other, so that no two requests wait for each other."""

from __future__ import annotations

import numpy as np
import pytest

from srt.managers.scheduler.needs import Needs
from srt.managers.scheduler.request import Request, expand
from srt.protocol.messages import (
    GenerateRequest,
    LogprobSpec,
    PinResources,
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
    """Two ranks, room for one grammar and one adapter or more, and the requests that have not ended."""

    def __init__(self, most_adapters: int = 1) -> None:
        self.needs = Needs(2, 1, most_adapters)
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


def test_an_adapter_with_requests_makes_room_when_another_has_waited_long() -> None:
    world = World()
    first, other = request(1, "red"), request(2, "blue")
    world.enter(first)
    assert world.told() == ["+red"]
    assert world.answer("red") == [first]
    world.enter(other)
    assert world.told() == []
    world.now = 0.2
    assert world.needs.overdue(world.now) == []
    second = request(3, "red")
    assert world.enter(second), "it is not closed yet"
    world.now = 0.25
    assert world.needs.overdue(world.now) == [] and world.told() == []
    later = [request(number, "red") for number in (4, 5)]
    assert not any(world.enter(one) for one in later)
    world.leave(first)
    assert world.told() == []
    world.leave(second)
    assert world.told() == ["-red", "+blue"]
    assert world.answer("blue") == [other]
    world.leave(later[0])
    world.leave(other)
    assert world.told() == ["-blue", "+red"]
    assert world.answer("red") == later[1:]


def test_a_closed_adapter_is_open_again_when_nothing_waits_any_more() -> None:
    world = World()
    first, other, later = request(1, "red"), request(2, "blue"), request(3, "red")
    world.enter(first)
    world.told()
    world.answer("red")
    world.enter(other)
    world.told()
    world.now = 1.0
    world.needs.overdue(world.now)
    assert not world.enter(later)
    world.leave(first)
    world.leave(other)
    assert world.needs.next_overdue_s() == 0.0
    assert world.needs.overdue(world.now) == [later]
    assert world.needs.failure(later) is None and world.told() == []
    assert world.needs.next_overdue_s() is None


def test_a_pinned_adapter_is_held_and_never_makes_room() -> None:
    world = World(most_adapters=2)
    red, blue = Resource("adapter", "red", b""), Resource("adapter", "blue", b"")
    assert world.needs.pin(PinResources(2, [red, blue])) == []
    assert world.told() == ["+red"], "one place is left for others"
    assert world.answer("red") == []
    assert world.needs.pin(PinResources(1, [])) == [], "an older message"
    first = request(1, "red")
    assert world.enter(first)
    world.enter(request(2, "blue"))
    assert world.told() == ["+blue"]
    world.answer("blue")
    world.enter(request(3, "green"))
    assert world.told() == []
    world.now = 5.0
    assert world.needs.overdue(world.now) == []
    assert world.enter(request(4, "red")) and not world.enter(request(5, "blue"))
    for one in [one for one in world.live if one is not first]:
        world.leave(one)
    world.leave(first)
    world.needs.overdue(world.now)
    world.enter(request(6, "green"))
    assert world.told() == ["-blue", "+green"]
    world.needs.pin(PinResources(3, []))
    world.enter(request(7, "blue"))
    assert world.told() == ["-red", "+blue"]


def test_the_adapter_used_longest_ago_makes_room() -> None:
    world = World(most_adapters=2)
    for number, name in enumerate(("red", "blue")):
        use_once(world, number, name)
    world.enter(request(2, "red"))
    world.leave(world.live[0])
    world.enter(request(3, "green"))
    assert world.told() == ["-blue", "+green"]


def test_an_adapter_that_is_pinned_while_nobody_needs_it_stays() -> None:
    world = World(most_adapters=2)
    use_once(world, 0, "red")
    world.needs.pin(PinResources(1, [Resource("adapter", "red", b"")]))
    use_once(world, 1, "blue")
    world.enter(request(2, "green"))
    assert world.told() == ["-blue", "+green"]


def use_once(world: World, number: int, name: str) -> None:
    used = request(number, name)
    world.enter(used)
    world.told()
    world.answer(name)
    world.leave(used)


def test_what_is_pinned_no_more_makes_room_in_the_order_of_its_use() -> None:
    world = World(most_adapters=2)
    for number, name in enumerate(("red", "blue")):
        used = request(number, name)
        world.enter(used)
        world.told()
        world.answer(name)
        if name == "red":
            world.needs.pin(PinResources(1, [Resource("adapter", "red", b"")]))
        world.leave(used)
    world.needs.pin(PinResources(2, []))
    world.enter(request(3, "green"))
    assert world.told() == ["-red", "+green"]


def test_a_closed_adapter_that_is_pinned_takes_requests_again() -> None:
    world = World(most_adapters=2)
    for number, key in enumerate(("red", "blue"), 1):
        world.enter(request(number, key))
        world.told()
        world.answer(key)
    world.enter(request(3, "green"))
    world.told()
    world.now = 2.0
    world.needs.overdue(world.now)
    later = request(4, "red")
    assert not world.enter(later)
    assert world.needs.pin(PinResources(1, [Resource("adapter", "red", b"")])) == [later]
    assert world.needs.overdue(world.now) == []
    assert world.enter(request(5, "red")) and not world.enter(request(6, "blue"))
