"""Whatever a model draws under a schema, a finished answer validates by two validators that know nothing of the grammar library."""

from __future__ import annotations

import json
import random

import jsonschema
import jsonschema_rs
import pytest

from srt.constrained.compile_process import try_constraint
from srt.constrained.constraint import read_constraint
from srt.constrained.matcher import Grammars
from srt.constrained.vocabulary import Vocabulary
from srt.utils.tokenizer import Tokenizer
from tests.support.random_schemas import SchemaGenerator, draw_answer

NUM_SCHEMAS, ANSWERS_EACH, IN_A_TEST = 400, 2, 50
_finished: dict[int, int] = {}  # answers of each group of schemas, once they were drawn


def finished_in(vocabulary: Vocabulary, tokenizer: Tokenizer, first: int) -> int:
    """Draw the answers of a group of schemas, check them, and return how many of them have finished."""
    if first in _finished:
        return _finished[first]
    num_finished = 0
    for seed in range(first, first + IN_A_TEST):
        schema = SchemaGenerator(seed).schema()
        constraint = read_constraint({"json_schema": schema})
        assert constraint is not None
        grammars = Grammars(vocabulary)
        grammars.compile("key", try_constraint(constraint, vocabulary))
        format_checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        by_python = jsonschema.Draft202012Validator(schema, format_checker=format_checker)
        by_rust = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
        for answer in range(ANSWERS_EACH):
            drawn = draw_answer(grammars.matcher("key"), random.Random(seed * ANSWERS_EACH + answer))
            assert drawn.error is None, (seed, drawn.error)
            num_finished += drawn.is_finished
            if drawn.is_finished:
                value = json.loads(tokenizer.decode(drawn.ids, skip_special_tokens=False))
                by_python.validate(value)
                by_rust.validate(value)
            else:
                assert grammars.matcher("key").accept_all(drawn.ids) == len(drawn.ids) == 300
    _finished[first] = num_finished
    return num_finished


GROUPS = range(0, NUM_SCHEMAS, IN_A_TEST)


@pytest.mark.parametrize("first", GROUPS)
def test_finished_answers_validate(vocabulary: Vocabulary, tokenizer: Tokenizer, first: int) -> None:
    assert finished_in(vocabulary, tokenizer, first)


def test_nine_of_ten_answers_finish(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    assert sum(finished_in(vocabulary, tokenizer, first) for first in GROUPS) >= 0.9 * NUM_SCHEMAS * ANSWERS_EACH
