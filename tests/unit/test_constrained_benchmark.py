"""The benchmark of schemas: both sides make the same tokens, and what it refuses."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import jsonschema
import pytest

from benchmarks import constrained


def test_it_shows_both_sides_and_what_a_trial_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jsonl = tmp_path / "lines"
    sizes = "--rows 2 --context 8 --answer 6 --requests 3 --least 2 --most 6 --new-schemas 3 --rounds 1"
    words = f"--model-path tiny --device cpu --max-total-tokens 1024 {sizes} --jsonl {jsonl}"
    monkeypatch.setattr(sys, "argv", ["constrained", *words.split()])
    assert constrained.main() == 0
    record = json.loads(jsonl.read_text())
    assert [line["what"] for line in record["lines"]] == [
        "step, 2 rows of 8 + 6",
        "3 requests, 32 schemas",
        "first token, new schema, p50",
        "first token, new schema, p99",
    ]
    said = capsys.readouterr().out
    assert "trial of a new schema" in said and "compilation in a worker" in said


def test_new_schemas_are_valid_and_differ() -> None:
    draws = random.Random(1)
    schemas = {constrained.fresh_schema(draws) for _ in range(20)}
    assert len(schemas) == 20
    for schema in schemas:
        jsonschema.Draft202012Validator.check_schema(json.loads(schema))


@pytest.mark.parametrize(
    "words", ["--only no", "--rows 0", "--answer 1", "--least 9 --most 8", "--most 2000", "--rounds 0"]
)
def test_what_makes_no_run_is_refused_before_a_model_is_loaded(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["constrained", "--model-path", "no-such-model", *words.split()])
    with pytest.raises(SystemExit) as raised:
        constrained.main()
    assert raised.value.code == 2
