"""Replies to control calls: each goes to the process that asked, and to no other of its number."""

from __future__ import annotations

from srt.protocol.messages import ControlReply, FrontendHello, GetState, PauseGeneration
from tests.unit.managers.scheduler.scheduler_host import PROTOCOL, Host, request

PROMPT = list(range(10))


def test_a_successor_gets_no_reply_that_its_predecessor_asked_for() -> None:
    """Calls are numbered from 0 in each process: the successor would take it for the answer to its own first."""
    host = Host(tp_size=2)
    host.say(FrontendHello(1, PROTOCOL), 1)
    host.say(request(1, PROMPT, max_new=50))
    host.say(GetState(0, deep=True), 1)
    host.tick()  # the workers are asked
    host.say(GetState(1, deep=True), 1)
    host.say(PauseGeneration(2, "in_place"), 1)
    host.say(FrontendHello(1, PROTOCOL), 1)
    host.inbox[1].clear()
    host.run()
    assert host.of_type(ControlReply, 1) == []
    host.say(GetState(0, deep=True), 1)
    host.say(PauseGeneration(1, "in_place"), 1)
    host.run()
    replies = host.of_type(ControlReply, 1)
    assert sorted((reply.call, "num_running" in reply.values) for reply in replies) == [(0, True), (1, False)]
