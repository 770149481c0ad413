"""What a worker prepares beside its steps, and the rows that follow a grammar."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from srt.constrained.compiler import Grammar
from srt.constrained.constraint import Constraint
from srt.constrained.grammar import grammar_text
from srt.constrained.resource import resource_of
from srt.constrained.vocabulary import Vocabulary
from srt.managers.tp_worker.constrained_rows import ConstrainedRows, GrammarLoader, SamplingRow, without_least_length
from srt.managers.tp_worker.resources import PrepareError, ResourceThreads
from srt.model_executor.step.step_output import SampledRows
from srt.protocol.messages import (
    Admission,
    LogprobSpec,
    PageDelta,
    PlanSection,
    Prepared,
    Resource,
    SamplingSpec,
    int32_array,
)
from srt.utils.tokenizer import Tokenizer, load_tokenizer
from tests.support.server_process import END_S, ROOT

TINY = ROOT / "srt" / "assets" / "models" / "tiny"
EOS = 2
EMPTY = int32_array()


class Threads:
    """ResourceThreads, and a way to wait for their answers."""

    def __init__(self, **loaders: object) -> None:
        self._is_done = threading.Semaphore(0)
        self.threads = ResourceThreads(loaders, self._is_done.release)  # type: ignore[arg-type]

    def answers(self, count: int) -> list[Prepared]:
        found: list[Prepared] = []
        while len(found) < count:
            assert self._is_done.acquire(timeout=END_S), "nothing more was prepared"
            found += self.threads.pop_answers()
        return found


class Shelf:
    """A loader that keeps what it is given, unless it is told not to."""

    def __init__(self) -> None:
        self.kept: set[str] = set()
        self.is_maintained = threading.Event()

    def prepare(self, key: str, content: bytes) -> None:
        if content == b"bad":
            raise PrepareError("It is bad.")
        if content == b"broken":
            raise ZeroDivisionError("by nothing")
        self.kept.add(key)

    def maintain(self) -> None:
        self.kept |= {f"{key}, dusted" for key in self.kept}
        self.is_maintained.set()

    def release(self, key: str) -> None:
        self.kept.discard(key)


def test_what_is_prepared_is_answered_by_key_and_kept_until_it_is_released() -> None:
    shelf = Shelf()
    threads = Threads(shelf=shelf)
    for key, content in (("a", b"good"), ("b", b"bad"), ("c", b"broken")):
        threads.threads.prepare(Resource("shelf", key, content))
    threads.threads.prepare(Resource("cellar", "d", b"good"))
    reasons = {answer.key: answer.reason for answer in threads.answers(4)}
    assert reasons == {
        "a": "",
        "b": "It is bad.",
        "c": "The shelf could not be prepared: ZeroDivisionError: by nothing",
        "d": "This server's workers cannot prepare a cellar.",
    }
    assert shelf.kept == {"a"}
    for key in reasons:
        threads.threads.release(key)
    assert not shelf.kept


def test_a_loader_is_maintained_behind_what_it_prepares() -> None:
    shelf = Shelf()
    threads = Threads(shelf=shelf)
    threads.threads.prepare(Resource("shelf", "a", b"good"))
    threads.answers(1)
    threads.threads.maintain(shelf)
    assert shelf.is_maintained.wait(END_S) and "a, dusted" in shelf.kept


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(TINY)


class World:
    """Grammars prepared for the model that ships with the project, and steps of rows that follow them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size, [EOS])
        self.loader = GrammarLoader(lambda: self.vocabulary)
        self.rows = ConstrainedRows(self.loader)
        self.words = np.zeros((4, self.vocabulary.mask_words), np.int32)

    def prepare(self, kind: str, content: str, begins_after: list[int] | None = None) -> str:
        constraint = Constraint(kind, content)
        text, _ = grammar_text(constraint, self.vocabulary.special_ids)
        resource = resource_of(Grammar(constraint.key, text), begins_after)
        self.loader.prepare(resource.key, resource.content)
        return resource.key

    def admit(self, key: str, *, output: str = "", min_new_tokens: int = 0) -> PlanSection:
        """Admit a row to slot 3, between others that have no grammar, and let all of them sample."""
        ids = [5, *self.tokenizer.encode(output, add_special_tokens=False)]
        spec = SamplingSpec(max_new_tokens=9, min_new_tokens=min_new_tokens, stop_ids=int32_array([EOS]))
        admission = Admission(3, int32_array(ids), 1, 0, 7, spec, LogprobSpec(), key)
        section = PlanSection(
            [admission], [PageDelta(EMPTY, EMPTY, EMPTY)], int32_array([3, 1]), int32_array([0, 0]),
            int32_array([len(ids), 4]), int32_array([1, 0]), int32_array([0]),
        )  # fmt: skip
        self.rows.admit(section)
        return section

    def decode(self, *slots: int) -> list[SamplingRow]:
        return self.rows.sampling(
            PlanSection([], [PageDelta(EMPTY, EMPTY, EMPTY)], EMPTY, EMPTY, EMPTY, EMPTY, int32_array(slots))
        )

    def allowed(self, rows: list[SamplingRow]) -> list[int] | None:
        """Ids that the only constrained row may draw; None if it is not masked."""
        if not self.rows.fill(rows, self.words):
            return None
        bits = np.unpackbits(self.words[0].view(np.uint8), bitorder="little")
        return np.flatnonzero(bits).tolist()

    def draw(self, rows: list[SamplingRow], *ids: int) -> None:
        """Each sampling row of the step draws one id; -1: none, as its logits were not finite."""
        counts = int32_array([1 if one >= 0 else -1 for one in ids])
        ConstrainedRows.accept(rows, SampledRows(counts, int32_array([one for one in ids if one >= 0]), []))


@pytest.fixture
def world(tokenizer: Tokenizer) -> World:
    return World(tokenizer)


def test_a_row_may_draw_what_its_grammar_allows_and_then_its_end(world: World) -> None:
    section = world.admit(world.prepare("choice", json.dumps(["yes", "no"])))
    assert world.rows.are_in(section)
    rows = world.rows.sampling(section)
    assert [row.place for row in rows] == [0]  # the first of the two rows that sample
    firsts = {world.tokenizer.decode([one]) for one in world.allowed(rows) or []}
    assert firsts and all("yes".startswith(text) or "no".startswith(text) for text in firsts)
    (token,) = world.tokenizer.encode("no", add_special_tokens=False)[:1]
    text = world.tokenizer.decode([token])
    world.draw(rows, token, 9)
    rows = world.decode(0, 3)
    assert [row.place for row in rows] == [1]
    while text != "no":
        token = next(one for one in world.allowed(rows) or [] if "no".startswith(text + world.tokenizer.decode([one])))
        text += world.tokenizer.decode([token])
        world.draw(rows, 9, token)
    assert world.allowed(rows) == [EOS]


def test_a_row_that_comes_back_goes_on_where_it_was(world: World) -> None:
    key = world.prepare("regex", "a{3}b")
    fresh = world.allowed(world.rows.sampling(world.admit(key)))
    behind = world.allowed(world.rows.sampling(world.admit(key, output="aaa")))
    assert fresh != behind
    assert {world.tokenizer.decode([one]) for one in behind or []} == {"b"}


def test_an_answer_is_free_until_its_constrained_part_begins(world: World) -> None:
    (begin,) = world.tokenizer.encode("\n", add_special_tokens=False)
    key = world.prepare("regex", "b", [begin])
    assert key != world.prepare("regex", "b")
    rows = world.rows.sampling(world.admit(key))
    assert world.allowed(rows) is None
    world.draw(rows, begin, 9)
    assert {world.tokenizer.decode([one]) for one in world.allowed(world.decode(3)) or []} == {"b"}


def test_too_short_an_answer_does_not_end_unless_nothing_else_may_follow(world: World) -> None:
    section = world.admit(world.prepare("regex", "b*"), min_new_tokens=2)
    (admission,) = without_least_length(section).admissions
    assert admission.sampling.min_new_tokens == 0
    rows = world.rows.sampling(section)
    assert EOS not in (world.allowed(rows) or [])
    (b,) = world.tokenizer.encode("b", add_special_tokens=False)
    world.draw(rows, b, 9)
    world.draw(rows, b, 9)
    assert EOS in (world.allowed(rows) or [])
    only = world.rows.sampling(world.admit(world.prepare("regex", "b"), output="b", min_new_tokens=5))
    assert world.allowed(only) == [EOS]


def test_a_slot_is_free_again_when_another_request_has_it(world: World) -> None:
    rows = world.rows.sampling(world.admit(world.prepare("regex", "b")))
    later = world.admit("")
    assert world.rows.sampling(later) == [] and not world.rows.are_in(later)
    world.draw(rows, 5, 9)  # a token of the step before, which belongs to the row that has left


def test_a_row_without_finite_logits_changes_nothing(world: World) -> None:
    rows = world.rows.sampling(world.admit(world.prepare("regex", "ab")))
    before = world.allowed(rows)
    world.draw(rows, -1, 9)
    assert world.allowed(rows) == before


def test_a_grammar_that_does_not_compile_is_refused_with_the_reason(world: World) -> None:
    resource = resource_of(Grammar("key", "start: ("))
    with pytest.raises(PrepareError, match=r"^The grammar cannot be compiled: "):
        world.loader.prepare(resource.key, resource.content)
