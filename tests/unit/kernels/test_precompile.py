"""Kernels are compiled at the same time, once each, and then found by those who launch them. For sm_90, without a GPU."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

from srt.kernels.attention.gather_pages import gather_pages
from srt.kernels.build import hopper
from srt.kernels.build import precompile as precompile_module
from srt.kernels.build.jit import kernel
from srt.kernels.build.precompile import Compilers, is_precompiled, precompiling
from srt.kernels.elementwise.silu_and_mul import silu_and_mul
from srt.kernels.gemm.stream_gemm import SMALLEST
from srt.kernels.sampling.draw_rows import DrawRows
from srt.kernels.sampling.sample import draw
from srt.layers.sampler import Draws
from srt.model_executor.step.draw_store import RING, DrawStore, cuda_launch
from tests.support.fake_gpu import FakeGpu
from tests.support.server_process import END_S


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    fake = FakeGpu()
    monkeypatch.setattr(driver, "_active", fake)
    return fake


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were compiled, in the order in which they were done."""
    names: list[str] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, src, **rest: names.append(src.name))
    return names


@contextmanager
def waited_for() -> Iterator[None]:
    """A precompiling whose kernels are all compiled at its end."""
    compilers = Compilers(2)
    with precompiling(compilers):
        yield
    compilers.wait(compilers.pop_asked())


def numbers(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(count, dtype=dtype)


def gather() -> None:
    gather_pages(numbers(8).view(2, 4), numbers(2, torch.int64), numbers(3), 4, numbers(8))


def gate(dtype: torch.dtype = torch.bfloat16) -> None:
    silu_and_mul(torch.ones(2, 64, dtype=dtype))


def test_a_kernel_is_compiled_once_and_launched_afterwards(gpu: FakeGpu, compiled: list[str]) -> None:
    with waited_for():
        for _ in range(3):
            gather()
            gate()
    assert gpu.launched == []
    assert sorted(compiled) == ["gather_pages_kernel", "silu_and_mul_kernel"]
    assert gpu.num_launchers == 2, "a C compiler may have to make these"
    gather()
    gate()
    assert gpu.launched == ["gather_pages_kernel", "silu_and_mul_kernel"]
    assert len(compiled) == 2
    gate(torch.float16)
    assert len(compiled) == 3, "what was not precompiled is compiled when it is launched"


def test_precompiling_ends_before_its_kernels_are_there_and_says_who_needs_which(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_compile, hits = threading.Event(), list[bool]()

    def compile_late(*, cache_hit: bool, **rest: object) -> None:
        may_compile.wait(END_S)
        hits.append(cache_hit)

    monkeypatch.setattr(knobs.compilation, "listener", compile_late)
    compilers = Compilers(3)
    with precompiling(compilers):
        silu_and_mul(torch.ones(2, 320))  # sizes that no other test has
        first = compilers.pop_asked()
        silu_and_mul(torch.ones(2, 320))
        silu_and_mul(torch.ones(2, 448))
        both = compilers.pop_asked()
        is_precompiled("not of Triton's", lambda: None)
        (other,) = compilers.pop_asked()
    assert len(first) == 1
    assert len(both) == 2
    assert first < both
    other.result(END_S)
    assert not any(future.done() for future in both)
    may_compile.set()
    for future in both:
        future.result(END_S)
    assert hits == [False, False]
    silu_and_mul(torch.ones(2, 320))
    assert gpu.launched == ["silu_and_mul_kernel"]
    assert hits == [False, False, True], "it lay on the disk"


def test_compilers_that_nobody_has_any_more_compile_nothing_that_they_have_not_begun() -> None:
    has_begun, may_end, compiled = threading.Event(), threading.Event(), list[int]()

    def compile_first() -> None:
        has_begun.set()
        may_end.wait(END_S)
        compiled.append(1)

    compilers = Compilers(1)
    first = compilers.compile("first", compile_first)
    second = compilers.compile("second", partial(compiled.append, 2))
    assert has_begun.wait(END_S)
    del compilers
    may_end.set()
    first.result(END_S)
    assert second.cancelled()
    assert compiled == [1]


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_all_kernels_is_told_or_why_there_is_none(fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    gate, told = threading.Event(), list[bool]()

    def compile_it() -> None:
        if fails:
            raise OSError("No space left on device")

    compilers = Compilers(1, gate)
    asked = [compilers.compile(name, compile_it) for name in ("one", "another", "one")]
    compilers.no_more(lambda: told.append(True))
    gate.set()
    compilers._threads.shutdown()
    assert all(future.done() for future in asked)
    assert told == ([] if fails else [True])
    words = "2 of 2 kernels cannot be compiled ahead, the first because of OSError: No space left on device"
    assert [record.getMessage() for record in caplog.records] == ([words] if fails else [])
    assert not compilers._futures, "they hold what was compiled, and that is on the disk"


def test_a_compilation_that_takes_too_long_is_told_and_may_still_end(monkeypatch: pytest.MonkeyPatch) -> None:
    told, said, is_said = list[bool](), list[str](), threading.Event()

    def say(words: str, *values: object) -> None:
        said.append(words % values)
        is_said.set()

    monkeypatch.setattr(precompile_module, "LONG_S", 0.0)
    monkeypatch.setattr(precompile_module.logger, "warning", say)
    compilers = Compilers(2)
    compilers.compile("one", lambda: None).result(END_S)
    compilers.compile("that hangs until somebody notices", lambda: is_said.wait(END_S))
    compilers.no_more(lambda: told.append(True))
    compilers._threads.shutdown()
    assert [words.split(" after")[0] for words in said] == ["1 of 2 kernels are still being compiled"]
    assert told == [True]


def test_kernels_are_compiled_at_the_same_time(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=END_S)
    monkeypatch.setattr(knobs.compilation, "listener", lambda **rest: both.wait())
    with waited_for():
        gate(torch.float32)
        is_precompiled("not of Triton's", both.wait)
    assert not both.broken


def test_their_sources_are_parsed_one_after_the_other(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's parser counts for all threads at once how deep it is, and now and then it found another count at its end."""
    parse, were_alone = ast.parse, list[bool]()

    def parse_and_note(*args: Any, **options: Any) -> Any:
        were_alone.append(precompile_module._parsing.locked())
        return parse(*args, **options)

    monkeypatch.setattr(ast, "parse", parse_and_note)
    with waited_for():
        silu_and_mul(torch.ones(2, 576))  # a size that no other test has
    assert were_alone
    assert all(were_alone)


def test_what_failed_once_is_compiled_again_when_it_is_launched(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**rest: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(knobs.compilation, "listener", fail)
    with pytest.raises(OSError, match="No space left"), waited_for():
        silu_and_mul(torch.ones(2, 192))  # a size that no other test has
    monkeypatch.setattr(knobs.compilation, "listener", None)
    silu_and_mul(torch.ones(2, 192))
    assert gpu.launched == ["silu_and_mul_kernel"]


@kernel(one_variant_for=())
def broken_kernel(out_ptr: tl.tensor) -> None:
    out_ptr.no_such_method()


def precompile_broken_and_sound() -> None:
    with waited_for():
        broken_kernel[(1,)](numbers(1))
        gate(torch.float64)


def test_what_cannot_be_compiled_is_told_at_the_end_and_harms_no_other(gpu: FakeGpu, compiled: list[str]) -> None:
    with pytest.raises(triton.CompilationError, match="no_such_method"):
        precompile_broken_and_sound()
    assert compiled == ["silu_and_mul_kernel"]
    gate(torch.float64)
    assert gpu.launched == ["silu_and_mul_kernel"]
    with pytest.raises(triton.CompilationError):
        broken_kernel[(1,)](numbers(1))


def test_what_kernels_would_have_written_reads_as_zeros(gpu: FakeGpu) -> None:
    rows = DrawRows(torch.ones(500), numbers(500, torch.int64), numbers(500, torch.int64))
    with waited_for():
        torch.full((500,), 1 << 40)  # which leaves memory that is likely to be given out next
        assert not torch.empty(500, dtype=torch.int64).any()
        torch.full((500,), 1 << 40)
        assert not rows.seeds.new_empty(500).any()
        torch.full((500,), 1 << 40)
        ids, _ = draw(torch.ones(500, 100), rows, 0, 100)
        assert not ids.any()
    assert gpu.launched == []


def test_kernels_in_cuda_are_compiled_once_and_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(hopper, "machine_code", lambda *parts: compiled.append(parts[-1]))
    with waited_for():
        for _ in range(3):
            hopper.launch(SMALLEST, (1, 1, 1), (), ())
    assert compiled == ["sm_90a"]
    assert not is_precompiled(SMALLEST, lambda: compiled.append("afterwards"))
    assert compiled == ["sm_90a"]


def test_of_stores_of_draws_those_count_that_are_launched_and_run(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those that are compiled, whose ids read as zeros, nor those that a graph records."""
    words, tokens, rows = numbers(RING * 3, torch.int64).view(RING, 3), numbers(12).view(3, 4), torch.arange(3)
    store = DrawStore(words, numbers(1, torch.int64), cuda_launch(), lambda: True)
    draws = Draws(torch.tensor([7, 8, 9]), torch.ones(3))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with waited_for():
        store.store(draws, rows, rows, tokens)
        assert store.latest(3).wait().tolist() == [0, 0, 0]
    assert gpu.launched == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    store.store(draws, rows, rows, tokens)
    assert gpu.launched == ["store_draws_kernel"]
    assert store._number == 0
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    store.store(draws, rows, rows, tokens)
    assert gpu.launched == ["store_draws_kernel"] * 2
    assert store._number == 1
