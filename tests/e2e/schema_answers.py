"""Asks a real server for answers to random JSON Schemas, and checks them.   python -m tests.e2e.schema_answers --schemas 400

The model is random and draws at temperature 1. Two validators that know nothing of the grammar library judge each answer that has
finished. One that was cut off must be the beginning of a valid one, as a matcher of the same grammar sees it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import jsonschema_rs

from srt.constrained.compile_process import try_constraint
from srt.constrained.constraint import read_constraint
from srt.constrained.matcher import Grammars
from srt.constrained.vocabulary import Vocabulary
from srt.utils.tokenizer import load_tokenizer
from tests.support.random_checkpoint import CheckpointSpec, write_random_checkpoint
from tests.support.random_schemas import SchemaGenerator
from tests.support.server_process import ServerProcess

PATIENCE_S = 600.0
MAX_TOKENS = 400
NUM_CLIENTS = 16


@dataclass(frozen=True, slots=True)
class Report:
    """What became of the answers. `failures` says which were neither valid nor the beginning of a valid one, and why."""

    num_finished: int
    num_cut_off: int
    failures: list[str]

    def __str__(self) -> str:
        count = self.num_finished + self.num_cut_off
        return (
            f"{count} answers: {self.num_finished} finished ({self.num_finished / max(1, count):.1%}),"
            f" {self.num_cut_off} were cut off; {len(self.failures)} failures"
        )


def ask_all(url: str, seeds: Sequence[int]) -> Report:
    """Ask for an answer to the schema of each seed."""
    facts = httpx.get(url + "/model_info", timeout=PATIENCE_S).json()
    config = json.loads(Path(facts["model_path"], "config.json").read_text())
    eos = config["eos_token_id"]
    tokenizer = load_tokenizer(facts["tokenizer_path"])
    vocabulary = Vocabulary(tokenizer, facts["vocab_size"], eos if isinstance(eos, list) else [eos])

    def ask(seed: int) -> dict[str, Any]:
        form = {"name": "answer", "schema": SchemaGenerator(seed).schema(), "strict": True}
        body = {
            "messages": [{"role": "user", "content": "Answer."}],
            "response_format": {"type": "json_schema", "json_schema": form},
            "temperature": 1.0,
            "seed": seed,
            "max_tokens": MAX_TOKENS,
            "return_token_ids": True,
        }
        answer = httpx.post(url + "/v1/chat/completions", json=body, timeout=PATIENCE_S)
        if answer.status_code != 200:
            return {"error": f"{answer.status_code} {answer.text[:300]}"}
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        choices = list(clients.map(ask, seeds))
    failures = [
        f"schema {seed}: {what}"
        for seed, choice in zip(seeds, choices, strict=True)
        if (what := _fault(choice, SchemaGenerator(seed).schema(), vocabulary))
    ]
    reasons = [choice.get("finish_reason") for choice in choices]
    return Report(reasons.count("stop"), reasons.count("length"), failures)


def _fault(choice: dict[str, Any], schema: dict[str, Any], vocabulary: Vocabulary) -> str:
    """Return what is wrong with an answer; empty if nothing is."""
    if "error" in choice:
        return str(choice["error"])
    text, reason = choice["message"]["content"], choice["finish_reason"]
    if reason == "stop":
        try:
            value = json.loads(text)
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.Draft202012Validator(schema, format_checker=checker).validate(value)
            jsonschema_rs.Draft202012Validator(schema, validate_formats=True).validate(value)
        except (ValueError, jsonschema.ValidationError) as error:
            return f"{text!r}: {error}"
        return ""
    if reason != "length":
        return f"it ended with {reason!r}"
    constraint = read_constraint({"json_schema": schema})
    assert constraint is not None
    grammars = Grammars(vocabulary)
    grammars.compile("key", try_constraint(constraint, vocabulary))
    num_accepted = grammars.matcher("key").accept_all(choice["token_ids"])
    if num_accepted != len(choice["token_ids"]):
        return f"only {num_accepted} of {len(choice['token_ids'])} tokens are the beginning of a valid answer: {text!r}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Check answers of a random model to random JSON Schemas.")
    parser.add_argument("--schemas", type=int, default=400, help="how many (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one (default: %(default)s)")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, tmp = Path(folder, "checkpoint"), Path(folder, "tmp")
        tmp.mkdir()
        write_random_checkpoint(checkpoint, CheckpointSpec(num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1))
        server = ["--model-path", str(checkpoint), "--port", "0", "--device", "cpu", "--dtype", "float32"]
        with ServerProcess("srt.launch_server", [*server, "--max-total-tokens", "32768"], tmp) as process:
            report = ask_all(process.wait_ready(), range(words.first, words.first + words.schemas))
    print("\n".join(report.failures[:20]))
    print(report)
    return 1 if report.failures or report.num_finished < 0.9 * words.schemas else 0


if __name__ == "__main__":
    sys.exit(main())
