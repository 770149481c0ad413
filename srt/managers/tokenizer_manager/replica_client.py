"""A replica as a frontend sees it: the link to its scheduler, the requests that it runs for this frontend, and what it said last."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from srt.lora.adapter_names import AdapterNames
from srt.managers.tokenizer_manager.api_types import RequestError
from srt.managers.tokenizer_manager.control_calls import ControlCalls
from srt.managers.tokenizer_manager.deliveries import Deliveries
from srt.managers.tokenizer_manager.request_ledger import Convictions, RequestLedger
from srt.managers.tokenizer_manager.request_watch import RequestWatch
from srt.managers.tokenizer_manager.scheduler_link import SchedulerLink
from srt.protocol.engine_work import WeightVersion
from srt.protocol.messages import (
    AbortLabel,
    ControlReply,
    EngineLost,
    EngineReplaced,
    FromFrontend,
    LastWord,
    Load,
    Message,
    Refused,
    Rejected,
    SchedulerHello,
    TokenBatch,
)

RETRY_AFTER_S = 1
logger = logging.getLogger(__name__)


class ReplicaOwner(Protocol):
    """What a replica tells the TokenizerManager."""

    def replica_changed(self, changed: ReplicaClient) -> None:
        """This replica has begun or ceased to serve, or more is known of how one ended."""

    def engine_died(self, reason: str) -> None:
        """The engine's messages cannot be relied upon: this frontend must end."""

    def abort_named(self, label: str) -> None:
        """Another frontend's client has aborted what matches this label."""


class ReplicaClient:
    """Owner of the link to one replica's scheduler and, through its parts, of the requests there.

    After the end of a scheduler, its requests wait here for the next one, unless the TokenizerManager moves them to another replica.
    """

    def __init__(
        self,
        number: int,
        generation: int,
        connect: Callable[..., SchedulerLink],
        watch: RequestWatch,
        convictions: Convictions,
        owner: ReplicaOwner,
        adapters: AdapterNames | None = None,
    ) -> None:
        """Link to the scheduler of `generation`. `connect` makes a SchedulerLink from a generation, an address and
        the link's callbacks."""
        self.number = number
        self.deliveries = Deliveries(self._send, watch, RequestLedger(convictions, number))
        self.calls = ControlCalls(self._send)
        self.limits: SchedulerHello | None = None  # of the latest scheduler that has answered
        self.load: Load | None = None  # that the scheduler reported last
        self.num_sent = 0  # requests sent since then
        self.is_greeted = False  # the present scheduler has answered; before that nothing is sent to it
        self.is_final = False  # no scheduler will come any more
        self.num_rejected = 0
        self._next: EngineReplaced | None = None  # how to reach the next scheduler
        self._lost: EngineLost | None = None  # how the present scheduler ended, while the next one is not known
        self._connect = connect
        self._owner = owner
        self._adapters = adapters
        self._link = self._link_to(generation, "")

    # ---- The scheduler's end, and its successor

    def replaced(self, replaced: EngineReplaced) -> None:
        """Move to the next scheduler, because this one has ended. Unanswered requests and calls are sent to the next one when it is
        there; readers only notice a pause."""
        # If two messages come before the link's end is noticed, the first gives the cause of death of this link's scheduler.
        self._next = replaced if self._next is None else replace(replaced, by_request=self._next.by_request)
        if not self.is_greeted:  # otherwise its last messages may still come, and the link's end follows them
            self._go_to_next()

    def lost(self, lost: EngineLost) -> None:
        """Take note of how this scheduler ends. Its requests may go elsewhere when its last messages have come."""
        self._lost = lost
        if not self.is_greeted or lost.is_final or lost.is_cut_off:
            self._go_to_next()

    def fail(self, error: RequestError) -> None:
        """Close the link, and end all requests and calls with `error`."""
        self.is_greeted = False
        self._link.close()
        self.deliveries.fail_all(error)
        self.calls.fail(error)

    def _handle_loss(self) -> None:
        """Handle the end of the link. The supervisor notices the death too, and replaces the engine or ends everything."""
        self.is_greeted = False
        self.load, self.num_sent = None, 0
        self.deliveries.record_lost()
        self._go_to_next()

    def _go_to_next(self) -> None:
        replaced, self._next = self._next, None
        lost, self._lost = self._lost, None
        if lost is not None and (replaced is None or lost.is_final):
            self.is_greeted = False
            self.deliveries.record_lost()
            self.deliveries.record_cause(by_request=(replaced or lost).by_request)
            self.is_final = lost.is_final
            self._link.drop()
        elif replaced is not None:
            self.deliveries.record_death(by_request=replaced.by_request)
            self._link.drop()
            self._link = self._link_to(replaced.generation, replaced.address)
        self._owner.replica_changed(self)

    def _link_to(self, generation: int, address: str) -> SchedulerLink:
        return self._connect(
            generation,
            address=address,
            on_message=self._handle,
            on_idle=self.deliveries.acknowledge,
            on_lost=self._handle_loss,
            on_broken=self._owner.engine_died,
        )

    # ---- What the scheduler says

    def _handle(self, message: Message) -> None:
        match message:
            case TokenBatch() | Refused():
                self.deliveries.handle(message)
            case ControlReply():
                self.calls.handle(message)
            case Load():
                self.load, self.num_sent = message, 0
            case AbortLabel():
                self._owner.abort_named(message.label)
            case SchedulerHello():
                self._greeted(message)
            case WeightVersion(version):
                if self.limits is not None:
                    self.limits = replace(self.limits, weight_version=version)
            case LastWord():
                self.deliveries.record_last_word(message)
            case Rejected():
                self._handle_rejection(message.reason)
            case _:
                logger.error("The scheduler sent a %s message, which frontends do not handle.", type(message).__name__)

    def _greeted(self, hello: SchedulerHello) -> None:
        self.limits = hello
        self.is_greeted = True
        self.pin_adapters()
        self.deliveries.resume()
        self.calls.send_again()
        self._owner.replica_changed(self)

    def being_replaced(self) -> RequestError:
        """Return what clients are told of calls that need this replica now."""
        return RequestError(503, f"Replica {self.number} is being replaced.", retry_after_s=RETRY_AFTER_S)

    def pin_adapters(self) -> None:
        """Tell the scheduler which adapters are pinned."""
        if self._adapters is not None:
            self._send(self._adapters.pinned())

    def _handle_rejection(self, reason: str) -> None:
        """Handle the scheduler's report that it dropped a message of this frontend, which is a defect.

        The message can have been any request without an answer yet, so all of those fail instead of hanging.
        """
        logger.error("The scheduler rejected a message of this frontend: %s.", reason)
        self.num_rejected += 1
        if not self.is_greeted:
            self._owner.engine_died(f"it does not understand this process ({reason})")
            return
        self.deliveries.fail_unbegun(
            RequestError(500, f"The engine rejected a message, perhaps this request: {reason}.")
        )

    def _send(self, message: FromFrontend) -> None:
        """Send a message if the scheduler has answered. Otherwise drop it: a new scheduler is sent all live requests and calls anyway."""
        if self.is_greeted:
            self._link.send(message)
