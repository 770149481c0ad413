"""What the evaluation asks, training has not seen."""

from __future__ import annotations

import itertools
import random

import pytest

from recipes.tiny.corpus import SKILL_NAMES, draw_conversation, held_out_case
from recipes.tiny.evaluate import MANY_PATTERNS, MODELS, REPOSITORY, Case, count_overlap, draw_cases, fingerprint
from recipes.tiny.holdout import Phrasings, Split, draw_operands, expand, is_held_out, phrasing_key
from recipes.tiny.skills.unknown import normalise, out_of_scope_prompts


def test_a_pattern_expands_to_all_of_its_texts() -> None:
    assert expand("[Add|Sum up] {a}[| now].") == ["Add {a}.", "Add {a} now.", "Sum up {a}.", "Sum up {a} now."]
    assert expand("a[b|c[d|e]]") == ["ab", "acd", "ab", "ace"]


def test_training_and_evaluation_share_no_phrasing_and_miss_none() -> None:
    phrasings = Phrasings("[Add|Sum|Count] {a} [and|to|with] {b}[.|?| now.]", "{a} plus {b}")
    training, held_out = set(phrasings.of(Split.TRAINING)), set(phrasings.of(Split.HELD_OUT))
    assert len(training | held_out) == 28
    assert not set(map(phrasing_key, training)) & set(map(phrasing_key, held_out))
    assert training and held_out


def test_careless_speech_never_falls_into_a_phrasing_that_is_held_out() -> None:
    phrasings = Phrasings("[Please |]add [the |a |]{a} [now |please |]to [the |]{b}", share=0.5)
    rng = random.Random(0)
    said = {phrasing_key(phrasings.pick(rng, Split.TRAINING)) for _ in range(5000)}
    assert len(said) > len(phrasings.of(Split.TRAINING))
    assert not said & phrasings.held_out_keys


def test_where_patterns_are_many_training_never_sees_some_of_them() -> None:
    phrasings = Phrasings(
        *(f"[Please |Now |]{verb} {{a}}" for verb in "add sum count join total unite merge tally".split())
    )
    new = set(phrasings.of(Split.UNSEEN))
    assert len(new) == 3 and len({text.split()[-2] for text in new}) == 1
    verb = min(new).split()[-2]
    others = [*phrasings.of(Split.TRAINING), *phrasings.of(Split.HELD_OUT)]
    assert len(others) == 21 and not any(verb in text for text in others)
    rng = random.Random(0)
    assert not any(verb in phrasings.pick(rng, Split.TRAINING) for _ in range(1000))


def test_phrasings_need_something_to_learn_from() -> None:
    with pytest.raises(ValueError, match="No phrasing is left"):
        Phrasings("only this")


def test_operands_fall_on_the_side_that_was_asked_for() -> None:
    rng = random.Random(0)
    for split in Split:
        drawn = [draw_operands(rng, split, lambda rng: rng.randrange(100), str, share=0.3) for _ in range(50)]
        assert {is_held_out(str(number), 0.3) for number in drawn} == {split is not Split.TRAINING}


def test_the_evaluation_overlaps_with_training_in_nothing() -> None:
    cases = [case for skill in SKILL_NAMES for case in draw_cases(skill, 200)]
    cases += [case for skill in MANY_PATTERNS for case in draw_cases(skill, 100, split=Split.UNSEEN)]
    assert count_overlap(cases, num_conversations=10_000) == {"prompts": 0, "phrasings": 0, "operands": 0}


def test_an_overlap_would_be_counted() -> None:
    rng = random.Random(0)
    conversations = [draw_conversation(rng) for _ in range(300)]
    asked = [Case(conversation) for conversation in conversations if conversation.exchanges]
    overlap = count_overlap(asked, num_conversations=300, seed=0)
    assert all(overlap.values())


def test_every_skill_has_enough_cases_to_be_judged_by() -> None:
    counts = {skill: len(draw_cases(skill, 500)) for skill in SKILL_NAMES}
    assert counts == dict.fromkeys(SKILL_NAMES, 500)


def test_the_prompts_written_by_hand_are_many_different_and_never_trained_on() -> None:
    prompts = out_of_scope_prompts()
    assert len(set(map(normalise, prompts))) == len(prompts) >= 500
    rng, trained = random.Random(0), set()
    for _ in range(5000):
        trained |= {normalise(exchange.messages[0].content) for exchange in draw_conversation(rng).exchanges}
    assert not trained & set(map(normalise, prompts))


def test_cases_of_new_patterns_have_no_wording_of_a_pattern_that_is_trained_on() -> None:
    rng, trained = random.Random(0), set()
    for _ in range(5000):
        trained |= {phrasing_key(exchange.phrasing) for exchange in draw_conversation(rng).exchanges}
    for skill in MANY_PATTERNS:
        known = {phrasing_key(case.exchange.phrasing) for case in draw_cases(skill, 200)}
        new = {phrasing_key(case.exchange.phrasing) for case in draw_cases(skill, 200, split=Split.UNSEEN)}
        assert new and not new & (known | trained)


@pytest.mark.parametrize(("model", "file"), [("tiny", "evaluation.md"), ("tiny-moe", "moe-evaluation.md")])
def test_the_table_is_of_the_weights_that_are_shipped(model: str, file: str) -> None:
    table = (REPOSITORY / "recipes/tiny/results" / file).read_text("utf-8")
    assert f"Weights {fingerprint(MODELS / model)}, draft {fingerprint(MODELS / 'tiny-draft')}." in table


def test_the_same_seed_gives_the_same_cases() -> None:
    def prompts(seed: int) -> list[str]:
        rng = random.Random(seed)
        return [Case(held_out_case(rng, skill)).prompt() for skill, _ in itertools.product(SKILL_NAMES, range(3))]

    assert prompts(1) == prompts(1) != prompts(2)
