"""EleutherAI's lm-eval: its `local-completions` model, which asks our server, against its own `hf` model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

QUESTIONS = [
    ("What is 12 + 30? ", ["12 + 30 = 42", "12 + 30 = 41", "a king"]),
    ("Once upon a time there was", [" a king", " 42", " nobody, and the rest was a very long silence"]),
    ("Sort: pear, fig, apple\n", ["apple, fig, pear", "pear, fig, apple", "Ärger 🙂"]),
]
TASK = """
task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
ROLLING = """
task: rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: word_perplexity}}]
"""
UNTIL = """
task: until
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["\\n\\n", "."], max_gen_toks: 24, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def answers(url: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[Any]]]:
    """Per model and task the responses, in the order of the questions."""
    tmp = tmp_path_factory.mktemp("lm-eval")
    data = tmp / "data.jsonl"
    rows = [{"question": question, "choices": choices, "answer": 0} for question, choices in QUESTIONS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    tasks = {"choices": TASK, "rolling": ROLLING, "until": UNTIL}
    for name, text in tasks.items():
        (tmp / f"{name}.yaml").write_text(text.format(data=data), "utf-8")
    models = {
        "local-completions": f"model=tiny,base_url={url}/v1/completions,tokenizer={folder},num_concurrent=2,max_length=1024",
        "hf": f"pretrained={folder},dtype=float32",
    }
    return {model: evaluate(model, words, list(tasks), tmp) for model, words in models.items()}


def evaluate(model: str, words: str, tasks: list[str], tmp: Path) -> dict[str, list[Any]]:
    command = [sys.executable, "-m", "lm_eval", "--model", model, "--model_args", words, "--tasks", ",".join(tasks)]
    command += ["--device", "cpu", "--include_path", str(tmp), "--log_samples", "--output_path", str(tmp / model)]
    environment = {**os.environ, "HF_HOME": str(tmp / "hub")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment, cwd=tmp)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = {}
    for task in tasks:
        (path,) = (tmp / model).rglob(f"samples_{task}_*.jsonl")
        samples = sorted(map(json.loads, path.read_text("utf-8").splitlines()), key=lambda sample: sample["doc_id"])
        found[task] = [sample["resps"] for sample in samples]
    return found


def test_lm_eval_reads_the_loglikelihoods_of_choices(answers: dict[str, dict[str, list[Any]]]) -> None:
    ours, theirs = answers["local-completions"]["choices"], answers["hf"]["choices"]
    assert [len(row) for row in ours] == [len(row) for row in theirs] == [3, 3, 3]
    for (our,), (their,) in zip(chain(*ours), chain(*theirs), strict=True):
        assert float(our[0]) == pytest.approx(float(their[0]), abs=1e-4)
        assert our[1] == their[1]


def test_lm_eval_reads_the_loglikelihoods_of_whole_texts(answers: dict[str, dict[str, list[Any]]]) -> None:
    ours, theirs = ([float(row[0][0]) for row in answers[model]["rolling"]] for model in ("local-completions", "hf"))
    assert len(ours) == len(QUESTIONS)
    assert ours == pytest.approx(theirs, abs=1e-4)


def test_lm_eval_generates_what_the_checkpoint_does(answers: dict[str, dict[str, list[Any]]]) -> None:
    assert answers["local-completions"]["until"] == answers["hf"]["until"]
