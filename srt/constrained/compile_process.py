"""The process in which constraints are tried before a worker sees them: `python -m srt.constrained.compile_process`.

A frontend starts it with a socket as its standard input (`compiler.py`). It loads the vocabulary once, and tries each constraint in a
fork of itself, which may take LIMIT_S seconds and MEMORY_BYTES. The library cannot be interrupted and can crash, so a fork ends by an
alarm of its own or by the crash, and nothing else is lost. This process has one thread and no torch, so forking it is safe. It ends at
the end of file on its input, which comes when the frontend has ended, however that was; its forks end with it or by their alarms.

One fork is made ahead of its constraint. It tries a small schema of its own meanwhile, so that the pages of memory which every trial
writes to are its own already: otherwise copying them took as long as the trial.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import resource
import select
import selectors
import signal
import socket
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final, NoReturn

import msgspec

from srt.constrained.constraint import Constraint
from srt.constrained.culprit import find_culprit
from srt.constrained.grammar import GrammarRefusal, grammar_text, schema_grammar
from srt.constrained.job_messages import MAX_FRAME_BYTES, Answer, Job, Setup
from srt.constrained.json_schema import Schema
from srt.constrained.matcher import GrammarError, Grammars
from srt.constrained.vocabulary import Vocabulary
from srt.utils.errors import StartError
from srt.utils.tokenizer import load_tokenizer

LIMIT_S: Final = 2.0
MEMORY_BYTES: Final = 512 << 20
# Less than the stack of the threads that fill masks in workers, 2 MiB: deep recursion in the library must end here, not there.
STACK_BYTES: Final = 1 << 20
# Forks at once. The system shares the cores among them, so a constraint of 10 ms waits for little beside hostile ones of 2 s.
AT_ONCE: Final = 4
MAX_GRAMMAR_BYTES: Final = 4 * 65_536
_TRIED_TOKENS: Final = 16
_QUICK_S: Final = 0.05  # most constraints take less; one that takes more gives way to them and to the frontend
_NICENESS: Final = 10
_BUSY_SHARE: Final = 0.25  # a fork that had less of a core than this when its time was over was not at fault
_OUT_OF_MEMORY: Final = 4  # exit code of a fork
_HEAD: Final = struct.Struct("<I?")  # of a fork's answer: bytes of the text, and whether it is a refusal
_SMALL: Final = Constraint("json_schema", '{"type": "object", "properties": {"a": {"type": "string"}}}')
_NO_JOB: Final = -1


def try_constraint(constraint: Constraint, vocabulary: Vocabulary) -> str:
    """Return the grammar's text, once it has compiled and some tokens were drawn by it; raise GrammarRefusal."""
    text, converted = grammar_text(constraint, vocabulary.special_ids)
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise GrammarRefusal(f"makes a grammar of more than {MAX_GRAMMAR_BYTES} bytes")
    grammars = Grammars(vocabulary)
    try:
        grammars.compile(constraint.key, text)
    except GrammarError as error:
        if converted is None:
            raise GrammarRefusal(f"cannot be compiled: {error}") from error

        def complaint(part: Schema) -> str | None:
            return _complaint(grammars, schema_grammar(part, converted))

        raise GrammarRefusal(str(find_culprit(converted, str(error), complaint))) from error
    _draw_some(grammars, constraint.key)
    return text


def _complaint(grammars: Grammars, text: str) -> str | None:
    try:
        grammars.compile("part", text)
    except GrammarError as error:
        return str(error)
    grammars.release("part")
    return None


def _draw_some(grammars: Grammars, key: str) -> None:
    """Draw tokens as a model would, and take them back: some grammars fail only then."""
    matcher = grammars.matcher(key)
    draws = random.Random(key)
    num_drawn = 0
    while num_drawn < _TRIED_TOKENS and not matcher.is_finished and matcher.error is None:
        token = matcher.draw(draws)
        if token is None or not matcher.accept(token):
            break
        num_drawn += 1
    if matcher.error is None:
        with contextlib.suppress(ValueError):  # the reason is the matcher's error
            matcher.rollback(num_drawn)
    if matcher.error is not None:
        if "NoExtensionBias" in matcher.error:  # the library's word for a form that no text can begin
            raise GrammarRefusal("allows no answer: a rule or a $ref leads only to itself")
        raise GrammarRefusal(f"cannot be followed: {matcher.error}")
    if not len(matcher.allowed_ids()):
        raise GrammarRefusal("allows no answer that this model's vocabulary can write")


# ---- Forks


@dataclass(slots=True)
class _Fork:
    pid: int
    job: int  # where its job is written
    output: int  # where its answer is read
    number: int = _NO_JOB
    started_s: float = 0.0
    gives_way: bool = False
    data: bytearray = field(default_factory=bytearray)

    def begin(self, job: Job) -> None:
        self.number, self.started_s = job.number, time.monotonic()
        with contextlib.suppress(BrokenPipeError), os.fdopen(self.job, "wb") as stream:  # its end says how it died
            stream.write(msgspec.msgpack.encode(job))

    def answer(self) -> Answer | None:
        """Return its answer, if that has arrived whole."""
        if len(self.data) < _HEAD.size:
            return None
        size, is_refused = _HEAD.unpack_from(self.data)
        if len(self.data) < _HEAD.size + size:
            return None
        said = self.data[_HEAD.size :].decode()
        return Answer(self.number, refusal=said) if is_refused else Answer(self.number, grammar=said)


def _start_fork(vocabulary: Vocabulary) -> _Fork:
    job_end, job = os.pipe()
    output, output_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(job_end)
        os.close(output_end)
        return _Fork(pid, job, output)
    try:
        os.close(job)
        _run_fork(job_end, vocabulary, output_end)
    except BaseException:
        os._exit(1)


def _run_fork(reading: int, vocabulary: Vocabulary, writing: int) -> NoReturn:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)  # the frontend's end of file must not wait for this process
    os.dup2(null, 2)  # the library writes there when it crashes
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, resource.RLIM_INFINITY))
    if not select.select([reading], [], [], 0)[0]:
        with contextlib.suppress(GrammarRefusal):  # a vocabulary may lack what it needs
            try_constraint(_SMALL, vocabulary)
    with os.fdopen(reading, "rb") as stream:
        data = stream.read()
    if not data:
        os._exit(0)  # the parent has ended
    job = msgspec.msgpack.decode(data, type=Job)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)  # SIGALRM is not handled: the kernel ends this process
    most = _address_space() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    try:
        said, is_refused = try_constraint(Constraint(job.kind, job.content), vocabulary), False
    except GrammarRefusal as refusal:
        said, is_refused = str(refusal), True
    except MemoryError:
        os._exit(_OUT_OF_MEMORY)
    with os.fdopen(writing, "wb") as output:
        output.write(_HEAD.pack(len(said.encode()), is_refused) + said.encode())
    os._exit(0)


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _why_none(fork: _Fork) -> Answer:
    """Collect a fork that has ended without a whole answer, and say why."""
    _, status, usage = os.wait4(fork.pid, 0)
    code = os.waitstatus_to_exitcode(status)
    used_s = usage.ru_utime + usage.ru_stime
    if code == -signal.SIGALRM and used_s >= LIMIT_S * _BUSY_SHARE:
        return Answer(fork.number, refusal=f"takes more than {LIMIT_S:g} s to compile: make it smaller")
    if code in (-signal.SIGALRM, -signal.SIGKILL):  # the machine had no time for it, or somebody killed it
        return Answer(fork.number, busy="The server is too busy to compile the constraint.")
    if code == _OUT_OF_MEMORY:
        return Answer(fork.number, refusal=f"takes more than {MEMORY_BYTES >> 20} MiB to compile: make it smaller")
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return Answer(fork.number, refusal=f"is too complex: it ends the grammar compiler ({how})")


# ---- The process


class CompileServer:
    """Takes jobs from the socket and answers each, in any order."""

    def __init__(self, link: socket.socket, vocabulary: Vocabulary) -> None:
        self._link = link
        self._vocabulary = vocabulary
        self._waiting: deque[Job] = deque()
        self._forks: dict[int, _Fork] = {}  # at work, by where their answers are read
        self._spare: _Fork | None = None  # made ahead, while none is at work: it would take time from that one
        self._received = bytearray()
        self._selector = selectors.DefaultSelector()
        self._selector.register(link, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the end of file on the socket."""
        try:
            while self._step():
                pass
        finally:
            for fork in self._forks.values():
                os.kill(fork.pid, signal.SIGKILL)
            if self._spare is not None:
                os.kill(self._spare.pid, signal.SIGKILL)

    def _step(self) -> bool:
        if self._spare is None and not self._forks:
            self._spare = _start_fork(self._vocabulary)
        for key, _ in self._selector.select(self._demote()):
            if key.fileobj is self._link:
                if not self._receive():
                    return False
            else:
                self._read_fork(self._forks[key.fd])
        while self._waiting and len(self._forks) < AT_ONCE:
            fork, self._spare = self._spare or _start_fork(self._vocabulary), None
            fork.begin(self._waiting.popleft())
            self._forks[fork.output] = fork
            self._selector.register(fork.output, selectors.EVENT_READ)
        return True

    def _demote(self) -> float | None:
        """Let forks that are not quick give way to the others; return the time until the next one is due."""
        quick = [fork for fork in self._forks.values() if not fork.gives_way]
        for fork in quick:
            if time.monotonic() - fork.started_s >= _QUICK_S:
                fork.gives_way = True
                with contextlib.suppress(PermissionError):
                    os.setpriority(os.PRIO_PROCESS, fork.pid, _NICENESS)
        return _QUICK_S if quick else None

    def _receive(self) -> bool:
        data = self._link.recv(1 << 16)
        self._received += data
        while len(self._received) >= 4:
            (size,) = struct.unpack_from("<I", self._received)
            if len(self._received) < 4 + size:
                break
            self._waiting.append(msgspec.msgpack.decode(self._received[4 : 4 + size], type=Job))
            del self._received[: 4 + size]
        return bool(data)

    def _read_fork(self, fork: _Fork) -> None:
        data = os.read(fork.output, 1 << 16)
        fork.data += data
        answer = fork.answer()
        if data and answer is None:
            return
        self._selector.unregister(fork.output)
        os.close(fork.output)
        del self._forks[fork.output]
        send_frame(self._link, answer or _why_none(fork))
        if answer is not None:
            os.waitpid(
                fork.pid, 0
            )  # behind the answer, because giving back its memory takes a while; its alarm bounds that


def send_frame(link: socket.socket, message: Answer) -> None:
    data = msgspec.msgpack.encode(message)
    link.sendall(struct.pack("<I", len(data)) + data)


def _receive_setup(link: socket.socket) -> Setup:
    (size,) = struct.unpack("<I", _exactly(link, 4))
    assert size <= MAX_FRAME_BYTES, f"a message of {size} bytes"
    return msgspec.msgpack.decode(_exactly(link, size), type=Setup)


def _exactly(link: socket.socket, size: int) -> bytes:
    data = link.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        sys.exit(0)  # the frontend has ended
    return data


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the frontend's end is this process' end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = socket.socket(fileno=0)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the frontend has ended
        setup = _receive_setup(link)
        try:
            vocabulary = Vocabulary(load_tokenizer(setup.tokenizer_folder), setup.vocab_size, setup.eos_ids)
        except (StartError, ValueError) as error:
            send_frame(link, Answer(Answer.SETUP, refusal=str(error)))
            return
        send_frame(link, Answer(Answer.SETUP))
        gc.collect()
        gc.freeze()
        gc.disable()
        CompileServer(link, vocabulary).run()


if __name__ == "__main__":
    main()
