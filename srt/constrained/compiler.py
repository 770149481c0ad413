"""Check constraints for a frontend, so that workers get only grammars that they can compile safely.

Each constraint is compiled on trial by a process of its own, compile_process.py, which also holds the limits of a trial: time and
memory. This file starts that process, waits for it, replaces it when it hangs or dies, and keeps the results.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import subprocess
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from srt.constrained.constraint import Constraint
from srt.constrained.job_messages import MAX_FRAME_BYTES, Answer, Job, Setup
from srt.sampling.parameter_checks import ParameterError
from srt.utils.python_command import module_path, python_command

MAX_KEPT: Final = 1024
MAX_KEPT_BYTES: Final = 32 << 20
MAX_WAITING: Final = 64
WAIT_S: Final = 5.0  # longest wait for an answer, once the process is up
START_S: Final = 60.0
_END_S: Final = 2.0
_SILENT_S: Final = 10.0  # the process hangs if it owes answers and has sent none for this long
_HAS_ENDED: Final = "The process that compiles constraints has ended: try again."
# The process forks, so it must have one thread only. These variables prevent the thread pools of numpy and of the tokenizer.
_ENVIRONMENT: Final = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}

logger = logging.getLogger(__name__)


class CompilerBusy(Exception):
    """The constraint could not be tried now, but may be accepted later. The message is a sentence."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint that passed its trial, in the form that workers compile."""

    key: str  # the constraint's key
    text: str  # llguidance's grammar


class Compiler:
    """Owner of the compile process and of the results. Use it from one event loop only.

    The compile process is started by the first constraint, or by `start`, and ends when the frontend ends. If it has died, the next
    constraint starts a new one. A constraint that waited for it is tried once more.
    """

    def __init__(self, tokenizer_folder: str, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """Prepare; nothing is started. `vocab_size` is that of the model's logits, as workers have it."""
        self._setup = Setup(tokenizer_folder, vocab_size, list(eos_ids))
        self._kept: OrderedDict[str, Grammar | str] = OrderedDict()  # a refusal's sentence, or the grammar
        self._num_kept_bytes = 0
        self._waiting: dict[str, asyncio.Future[Answer]] = {}
        self._process: _CompileProcess | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Start the process now, so that the first constraint does not wait for it. Raise CompilerBusy if it cannot be started."""
        await self._running()

    async def compile(self, constraint: Constraint) -> Grammar:
        """Return the grammar of a constraint, after its trial.

        Raise ParameterError if the constraint is refused, and CompilerBusy if the client should try again later. This takes no longer
        than WAIT_S, unless the process must be started first.
        """
        key = constraint.key
        kept = self._kept.get(key)
        if kept is None:
            answer = await self._ask(key, constraint)
            if answer.busy == _HAS_ENDED:
                answer = await self._ask(key, constraint)
            if answer.busy:
                raise CompilerBusy(answer.busy)
            kept = _result(key, answer)
        else:
            self._kept.move_to_end(key)
        if isinstance(kept, str):
            raise ParameterError(constraint.source, kept)
        return kept

    def close(self) -> None:
        """End the process. Constraints that wait get CompilerBusy."""
        if self._process is not None:
            self._process.close()
            self._process = None

    async def _ask(self, key: str, constraint: Constraint) -> Answer:
        process = await self._running()
        waiting = self._waiting.get(key)
        if waiting is None:
            if len(self._waiting) >= MAX_WAITING:
                raise CompilerBusy(f"{MAX_WAITING} other constraints, the limit, already wait to be compiled.")
            waiting = process.send(constraint)
            self._waiting[key] = waiting
            waiting.add_done_callback(lambda answered: self._keep(key, answered.result()))
        try:
            return await asyncio.wait_for(asyncio.shield(waiting), WAIT_S)
        except TimeoutError:
            process.check()
            raise CompilerBusy(f"The constraint was not compiled within {WAIT_S:g} s: try again.") from None

    def _keep(self, key: str, answer: Answer) -> None:
        """Keep an answer, unless it is `busy`, even if nobody waits for it any more. Beyond the limits drop those unused for longest."""
        del self._waiting[key]
        if answer.busy:
            return
        self._kept[key] = _result(key, answer)
        self._num_kept_bytes += _size(self._kept[key])
        while len(self._kept) > MAX_KEPT or self._num_kept_bytes > MAX_KEPT_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._num_kept_bytes -= _size(oldest)

    async def _running(self) -> _CompileProcess:
        async with self._starting:
            if self._process is None or self._process.has_ended:
                self._process = await _CompileProcess.start(self._setup)
            return self._process


class _CompileProcess:
    """One process, the socket to it, and the answers that it owes."""

    def __init__(
        self, popen: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._popen = popen
        self._reader = reader
        self._writer = writer
        self._owed: dict[int, asyncio.Future[Answer]] = {}
        self._num_sent = 0
        self._heard_s = time.monotonic()
        self._task: asyncio.Task[None] | None = None
        self.has_ended = False

    @classmethod
    async def start(cls, setup: Setup) -> _CompileProcess:
        popen, ours = _spawn()
        reader, writer = await asyncio.open_connection(sock=ours)
        process = cls(popen, reader, writer)
        process._write(setup)
        try:
            answer = await asyncio.wait_for(process._receive(), START_S)
        except (TimeoutError, asyncio.IncompleteReadError, OSError) as error:
            process.close()
            raise CompilerBusy("The process that compiles constraints did not start.") from error
        except asyncio.CancelledError:
            process.close()
            raise
        if answer.refusal:
            process.close()
            raise CompilerBusy(f"Constraints cannot be compiled: {answer.refusal}")
        process._task = asyncio.create_task(process._serve())
        return process

    def send(self, constraint: Constraint) -> asyncio.Future[Answer]:
        """Send a job and return the promise of its answer."""
        self._num_sent += 1
        if not self._owed:
            self._heard_s = time.monotonic()
        owed = self._owed[self._num_sent] = asyncio.get_running_loop().create_future()
        self._write(Job(self._num_sent, constraint.kind, constraint.content))
        return owed

    def check(self) -> None:
        """Kill the process if it owes answers and has sent none for _SILENT_S."""
        if self._owed and time.monotonic() - self._heard_s > _SILENT_S:
            logger.error("The process that compiles constraints hangs and is replaced.")
            self._popen.kill()

    def close(self) -> None:
        """Close the socket. The process ends when it notices that."""
        self.has_ended = True
        self._writer.close()
        if self._task is None:  # its start failed, so no task waits for its end
            self._popen.kill()
            self._popen.wait()

    def _write(self, message: Setup | Job) -> None:
        data = msgspec.msgpack.encode(message)
        self._writer.write(struct.pack("<I", len(data)) + data)

    async def _receive(self) -> Answer:
        (size,) = struct.unpack("<I", await self._reader.readexactly(4))
        if size > MAX_FRAME_BYTES:
            raise OSError(f"an answer of {size} bytes")
        return msgspec.msgpack.decode(await self._reader.readexactly(size), type=Answer)

    async def _serve(self) -> None:
        try:
            while True:
                answer = await self._receive()
                self._heard_s = time.monotonic()
                owed = self._owed.pop(answer.number, None)
                if owed is not None and not owed.done():
                    owed.set_result(answer)
        except (asyncio.IncompleteReadError, OSError, msgspec.DecodeError):
            pass
        finally:
            self.has_ended = True
            for owed in self._owed.values():
                if not owed.done():
                    owed.set_result(Answer(0, busy=_HAS_ENDED))
            self._owed.clear()
            self._writer.close()
            try:
                await asyncio.to_thread(self._collect)
            except RuntimeError:  # the program is at its end, and starts no work in threads any more
                self._collect()

    def _collect(self) -> None:
        """Wait for the end of the process, which comes by itself unless it hangs."""
        try:
            self._popen.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


def _spawn() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the process with one end of a socket as its standard input. Return the process and the other end."""
    ours, theirs = socket.socketpair()
    with theirs:
        popen = subprocess.Popen(
            python_command("srt.constrained.compile_process"),
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            env={**os.environ, **module_path(), **_ENVIRONMENT},
            start_new_session=True,  # a terminal's Ctrl-C must reach only the server, which then ends this process
        )
    return popen, ours


def _result(key: str, answer: Answer) -> Grammar | str:
    return answer.refusal or Grammar(key, answer.grammar)


def _size(kept: Grammar | str) -> int:
    return len(kept if isinstance(kept, str) else kept.text)
