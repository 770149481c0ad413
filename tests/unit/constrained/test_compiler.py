"""The compile process: hostile constraints end in it, answers are kept, and it ends with its frontend."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from srt.constrained import compiler as compiler_module
from srt.constrained.compiler import Compiler, CompilerBusy, Grammar
from srt.constrained.constraint import Constraint, read_constraint
from srt.constrained.job_messages import Answer
from srt.constrained.matcher import Grammars
from srt.constrained.vocabulary import Vocabulary
from srt.sampling.parameter_checks import ParameterError
from tests.support.hostile_constraints import HOSTILE, chain
from tests.support.server_process import END_S, ROOT
from tests.unit.constrained.conftest import EOS_IDS, PADDED_SIZE, TINY

PLAIN = Constraint("regex", "[0-9]{3}")


@contextlib.asynccontextmanager
async def started() -> AsyncIterator[Compiler]:
    compiler = Compiler(str(TINY), PADDED_SIZE, EOS_IDS)
    await compiler.start()
    try:
        yield compiler
    finally:
        compiler.close()


def process_of(compiler: Compiler) -> subprocess.Popen[bytes]:
    assert compiler._process is not None
    return compiler._process._popen


async def outcome(compiler: Compiler, constraint: Constraint) -> str:
    try:
        grammar = await compiler.compile(constraint)
    except ParameterError as error:
        return str(error)
    except CompilerBusy as error:
        return str(error)
    return f"fine {grammar.key}"


async def wait_until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(END_S):
        while not is_so():  # noqa: ASYNC110 - another process' state, which sets no event
            await asyncio.sleep(0.005)


def test_a_constraint_becomes_a_grammar_that_compiles_elsewhere(vocabulary: Vocabulary) -> None:
    async def run() -> Grammar:
        async with started() as compiler:
            return await compiler.compile(PLAIN)

    grammar = asyncio.run(run())
    assert grammar.key == PLAIN.key
    grammars = Grammars(vocabulary)
    grammars.compile(grammar.key, grammar.text)
    assert len(grammars.matcher(PLAIN.key).allowed_ids()) == 10


def test_answers_and_refusals_are_kept() -> None:
    async def run() -> None:
        async with started() as compiler:
            bad = Constraint("regex", "(", source="structured_outputs.regex")
            first = [await outcome(compiler, one) for one in (PLAIN, bad)]
            os.kill(process_of(compiler).pid, signal.SIGSTOP)  # so that it cannot be asked
            try:
                assert [await outcome(compiler, one) for one in (PLAIN, bad)] == first
                same = Constraint("regex", "(", source="regex")
                assert (await outcome(compiler, same)).startswith("regex cannot be compiled: ")
            finally:
                os.kill(process_of(compiler).pid, signal.SIGCONT)

    asyncio.run(run())


def test_the_oldest_results_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_KEPT", 2)

    async def run() -> None:
        async with started() as compiler:
            texts = ["a", "b", "a", "c"]
            for text in texts:
                await compiler.compile(Constraint("regex", text))
            assert list(compiler._kept) == [Constraint("regex", text).key for text in ("a", "c")]
            assert compiler._num_kept_bytes == sum(map(compiler_module._size, compiler._kept.values()))

    asyncio.run(run())


def test_hostile_constraints_end_and_the_next_one_compiles() -> None:
    async def run() -> None:
        async with started() as compiler:
            for name, fields in HOSTILE.items():
                try:
                    constraint = read_constraint(fields)
                except ParameterError as error:
                    said = str(error)
                else:
                    assert constraint is not None
                    said = await outcome(compiler, constraint)
                print(f"{name}: {said[:150]}")
                assert "was not compiled within" not in said, (
                    f"{name} was given up by the one who waits, not by the process"
                )
                pid = process_of(compiler).pid
                fresh = Constraint("regex", f"[0-9]{{3}}{len(name)}")
                assert await outcome(compiler, fresh) == f"fine {fresh.key}", name
                assert process_of(compiler).pid == pid, f"{name} has ended the process"

    asyncio.run(run())


def test_a_constraint_that_takes_longer_than_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is 0.2 s here, and the library takes seconds for this grammar."""
    script = "from srt.constrained import compile_process as process; process.LIMIT_S = 0.2; process.main()"
    monkeypatch.setattr(compiler_module, "python_command", lambda module: [sys.executable, "-c", script])
    constraint = read_constraint(HOSTILE["3,300 rules in the other language"])
    assert constraint is not None

    async def run() -> str:
        async with started() as compiler:
            return await outcome(compiler, constraint)

    refusal = "ebnf takes more than 0.2 s to compile: make it smaller"
    too_busy = "The server is too busy to compile the constraint."  # if it had little of a core meanwhile
    assert asyncio.run(run()) in (refusal, too_busy)


def test_a_native_crash_is_a_refusal() -> None:
    async def run() -> str:
        async with started() as compiler:
            return await outcome(compiler, Constraint("ebnf", chain(4999), source="ebnf"))

    assert asyncio.run(run()) == "ebnf is too complex: it ends the grammar compiler (SIGSEGV)"


def test_hostile_constraints_do_not_delay_others() -> None:
    slow = [Constraint("regex", f"(((a{{100}}){{100}}){{100}}){{10{i}}}") for i in range(3)]

    async def run() -> None:
        async with started() as compiler:
            hostile = [asyncio.create_task(outcome(compiler, one)) for one in slow]
            await wait_until(lambda: len(compiler._waiting) == len(slow))
            await compiler.compile(PLAIN)
            assert not any(task.done() for task in hostile)
            # How each is refused depends on what it exceeds first, its time or the library's limits.
            assert not any(said.startswith("fine") for said in await asyncio.gather(*hostile))

    asyncio.run(run())


def test_waiting_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "WAIT_S", 0.2)
    monkeypatch.setattr(compiler_module, "MAX_WAITING", 3)

    async def run() -> None:
        async with started() as compiler:
            os.kill(process_of(compiler).pid, signal.SIGSTOP)
            waiting = [asyncio.create_task(outcome(compiler, Constraint("regex", f"a{i}"))) for i in range(4)]
            said = await asyncio.gather(*waiting)
            assert sorted(one[:30] for one in said)[0].startswith("3 other constraints, the limit")
            assert sum("was not compiled within" in one for one in said) == 3
            os.kill(process_of(compiler).pid, signal.SIGCONT)
            await wait_until(lambda: not compiler._waiting)
            # Nobody waited for the answers any more, and they were kept all the same.
            assert len(compiler._kept) == 3

    asyncio.run(run())


def test_one_who_leaves_does_not_take_the_answer_from_others() -> None:
    async def run() -> None:
        async with started() as compiler:
            first, second = (asyncio.create_task(compiler.compile(PLAIN)) for _ in range(2))
            await asyncio.sleep(0)
            first.cancel()
            assert (await second).key == PLAIN.key

    asyncio.run(run())


def test_a_process_that_died_is_replaced() -> None:
    async def run() -> None:
        async with started() as compiler:
            first = process_of(compiler)
            os.kill(first.pid, signal.SIGSTOP)
            asked = asyncio.create_task(outcome(compiler, PLAIN))
            await wait_until(lambda: bool(compiler._waiting))
            os.kill(first.pid, signal.SIGKILL)
            assert (await asked).startswith("fine")
            assert process_of(compiler).pid != first.pid and first.poll() == -signal.SIGKILL

    asyncio.run(run())


class DyingProcess:
    """Ends whenever it is sent a constraint."""

    def __init__(self) -> None:
        self.num_sent = 0

    def send(self, constraint: Constraint) -> asyncio.Future[Answer]:
        self.num_sent += 1
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        answer.set_result(Answer(0, busy=compiler_module._HAS_ENDED))
        return answer


def test_a_constraint_is_not_tried_a_third_time(monkeypatch: pytest.MonkeyPatch) -> None:
    dying = DyingProcess()

    async def running() -> DyingProcess:
        return dying

    async def run() -> str:
        compiler = Compiler(str(TINY), PADDED_SIZE, EOS_IDS)
        monkeypatch.setattr(compiler, "_running", running)
        return await outcome(compiler, PLAIN)

    assert asyncio.run(run()) == "The process that compiles constraints has ended: try again."
    assert dying.num_sent == 2


def test_a_start_that_is_given_up_leaves_no_process() -> None:
    async def run() -> set[int]:
        compiler = Compiler(str(TINY), PADDED_SIZE, EOS_IDS)
        starting = asyncio.create_task(compiler.start())
        children: set[int] = set()

        def has_begun() -> bool:
            """Children that were there before may end meanwhile."""
            children.update(set(children_of(os.getpid())) - set(before))
            return bool(children)

        await wait_until(has_begun)
        starting.cancel()
        await asyncio.wait((starting,))
        return children

    before = children_of(os.getpid())
    assert not any(map(is_alive, asyncio.run(run())))


def test_a_process_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "WAIT_S", 0.3)
    monkeypatch.setattr(compiler_module, "_SILENT_S", 0.1)

    async def run() -> None:
        async with started() as compiler:
            first = process_of(compiler)
            os.kill(first.pid, signal.SIGSTOP)
            assert "was not compiled within" in await outcome(compiler, PLAIN)
            await wait_until(lambda: first.poll() is not None)

    asyncio.run(run())


def test_a_model_without_a_tokenizer_refuses_all(tmp_path: Path) -> None:
    compiler = Compiler(str(tmp_path), PADDED_SIZE, EOS_IDS)
    said = asyncio.run(outcome(compiler, PLAIN))
    assert said.startswith("Constraints cannot be compiled: ") and str(tmp_path) in said


def test_it_ends_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "_END_S", END_S)  # after which it is killed

    async def run() -> subprocess.Popen[bytes]:
        async with started() as compiler:
            process = process_of(compiler)
        await wait_until(lambda: process.poll() is not None)
        return process

    assert asyncio.run(run()).returncode == 0


PARENT = f"""
import asyncio, sys
from srt.constrained.compiler import Compiler
from srt.constrained.constraint import Constraint

async def run():
    compiler = Compiler({str(TINY)!r}, 2048, [2])
    await compiler.start()
    print(compiler._process._popen.pid, flush=True)
    task = asyncio.create_task(compiler.compile(Constraint("regex", "(((a{{100}}){{100}}){{100}}){{100}}")))
    await asyncio.sleep(60)

asyncio.run(run())
"""


def test_it_ends_with_a_parent_that_is_killed_while_it_works() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        forks: list[int] = []

        def has_forked() -> bool:
            forks[:] = children_of(pid)
            return bool(forks)

        asyncio.run(wait_until(has_forked))
        parent.kill()
        asyncio.run(wait_until(lambda: not any(map(is_alive, [pid, *forks]))))


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
