"""The actor of one replica: it owns the supervisor of a host, which is a process of its own."""

from __future__ import annotations

import os
import select

from srt.entrypoints.engine_process import EngineProcess
from srt.protocol.codec import decode
from srt.protocol.messages import EngineStart, Failed


class SupervisorActor:
    """Owner of a host's supervisor. When the actor ends, so does the supervisor, by its lifeline."""

    def __init__(self, order: bytes) -> None:
        """Take an encoded EngineStart with the secret of the server."""
        message = decode(order).message
        assert isinstance(message, EngineStart) and message.secret is not None
        self._order = message

    def run(self) -> str:
        """Run the host until it ends, and return the reason as a sentence."""
        # Ray sets this for the actor as one process, but its CPUs are for all ranks together.
        num_ranks = self._order.args.num_ranks
        os.environ["OMP_NUM_THREADS"] = str(max(1, (self._order.args.ray_num_cpus or num_ranks) // num_ranks))
        supervisor = EngineProcess(self._order.args, http=False, secret=self._order.secret)
        try:
            while True:
                select.select([supervisor], [], [])
                message = supervisor.receive()
                if isinstance(message, Failed):
                    return message.message
        finally:
            supervisor.stop()
