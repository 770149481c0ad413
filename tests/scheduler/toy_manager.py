"""The real TokenizerManager of a simulated frontend, between links that are lists. Its clients' texts and tokens are toys."""

from __future__ import annotations

import contextlib
import logging
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from srt.managers.tokenizer_manager import replica_client
from srt.managers.tokenizer_manager.deliveries import Deliveries
from srt.managers.tokenizer_manager.model_facts import ModelFacts
from srt.managers.tokenizer_manager.request_watch import RequestWatch
from srt.managers.tokenizer_manager.scheduler_link import SchedulerLink
from srt.managers.tokenizer_manager.tokenizer_manager import TokenizerManager
from srt.protocol.messages import EngineReplaced, FromFrontend, Message, Rejected, SchedulerHello
from srt.utils.tokenizer import Tokenizer

FACTS = ModelFacts("toy", (), "toy", 1 << 20, 1 << 20, (), {}, False)
HELLO = SchedulerHello(1 << 20, 1 << 20, 1)


class _Link:
    """In the place of a SchedulerLink."""

    def __init__(
        self,
        owner: ToyManager,
        generation: int,
        on_message: Callable[[Message], None],
        on_idle: Callable[[], None],
        on_lost: Callable[[], None],
        on_broken: Callable[[str], None],
    ) -> None:
        self._owner = owner
        self.generation = generation
        self.on_message, self.on_idle, self.on_lost = on_message, on_idle, on_lost
        self.is_open = True

    def send(self, message: FromFrontend) -> None:
        assert self.is_open, f"sent to a scheduler that is gone: {message}"
        assert self._owner.is_greeted, f"sent to a scheduler that has not greeted: {message}"
        self._owner.outgoing.append(message)

    def drop(self) -> None:
        self.is_open = False

    close = drop


class ToyManager:
    """Says what schedulers and the supervisor say. Keeps what is sent."""

    def __init__(self, watch: RequestWatch, rng: random.Random, statistics: Counter[str]) -> None:
        self.outgoing: list[FromFrontend] = []
        self.is_greeted = False
        self._rng = rng
        self._statistics = statistics
        self._links: list[_Link] = []
        self._manager = TokenizerManager(
            model=FACTS,
            tokenizer=cast("Tokenizer", None),
            template=None,
            new_seed=lambda: 0,
            connect=self._connect,
            generations=[1],
            max_held=1 << 20,
            watch=watch,
        )
        self.greet()

    @property
    def deliveries(self) -> Deliveries:
        return self._manager._replicas[0].deliveries

    def hear(self, message: Message) -> None:
        self._link.on_message(message)

    def greet(self) -> None:
        """The scheduler answers the hello: by now it takes requests, and is sent what the last one had."""
        self.is_greeted = True
        self.hear(HELLO)
        assert self._manager.is_ready

    def fall_idle(self) -> None:
        """There is no more message for now."""
        self._link.on_idle()

    def replace(self, *, by_request: bool) -> None:
        """The scheduler has died, perhaps of a request. The supervisor says so before or after the link's end is seen, or again as the
        next one dies, too: which is never greeted, and had nothing of ours."""
        generation = self._link.generation
        words = [EngineReplaced(generation + 1, by_request)]
        if self._rng.random() < 0.3:
            words.append(EngineReplaced(generation + 2, not by_request))
        lost_behind = self._rng.randrange(len(words) + 1)
        old = self._link
        for number, word in enumerate(words):
            if number == lost_behind:
                self._lose(old)
            self._manager.engine_changed(word)
        if lost_behind == len(words):
            self._lose(old)
        self._statistics["rule: frontends go to the next scheduler"] += 1
        still_open = [link.generation for link in self._links if link.is_open]
        assert still_open == [words[-1].generation], f"after {words} there are links to schedulers {still_open}"
        assert not self._manager.is_ready

    def reject(self, reason: str) -> None:
        """The scheduler could not take a message."""
        logger = logging.getLogger(replica_client.__name__)
        logger.disabled = True
        try:
            self.hear(Rejected(reason))
        finally:
            logger.disabled = False

    def die(self, reason: str) -> None:
        """The engine has ended, and no other comes."""
        self._manager.engine_died(reason)
        assert self._manager.is_dead

    def close(self) -> None:
        with contextlib.suppress(StopIteration):
            self._manager.close().send(None)

    def stats(self) -> dict[str, Any]:
        return self._manager.stats()

    @property
    def _link(self) -> _Link:
        return self._links[-1]

    def _lose(self, link: _Link) -> None:
        assert link.is_open, "a link is let go before its end: last words may still come"
        self.is_greeted = False
        link.on_lost()

    def _connect(self, generation: int, address: str, **callbacks: Callable[..., None]) -> SchedulerLink:
        self._links.append(_Link(self, generation, **callbacks))
        return cast("SchedulerLink", self._links[-1])
