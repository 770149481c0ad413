"""Replay recorded answers against a server, and say whether they are the same, to the bit: for audits, and for training loops.

A record is a line of JSON: {"request": a body of /generate, "answer": what it returned}.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from srt.cli.terminal import API_KEY_VARIABLE, FAILED, AnswerError, Client, exit_code_of, make_parser

EXAMPLES = """\
examples:
  srt verify --record answers.jsonl --url http://localhost:30000 requests.jsonl
  srt verify --url http://localhost:30000 answers.jsonl
  srt verify --rescore --url http://localhost:30000 answers.jsonl

exit codes: 0 all are the same, 1 one differs or cannot be replayed, 2 wrong
options, 130 stopped by Ctrl-C"""
LOGPROBS = ("input_token_logprobs", "output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each record, and return the exit code."""
    parser = make_parser(
        "srt verify [options] FILE",
        "Replay recorded answers, each with its seed, and compare ids and logprobs. The server should run with"
        " --enable-deterministic-inference, the same model and the same --tp.",
        EXAMPLES,
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="file with a record in each line")
    parser.add_argument("--url", default="http://localhost:30000", help="the server (default: http://localhost:30000)")
    parser.add_argument("--api-key", metavar="KEY", help=f"API key of the server (default: ${API_KEY_VARIABLE})")
    parser.add_argument(
        "--record", metavar="ANSWERS", type=Path, help="send the bodies of /generate in FILE, and write records there"
    )
    parser.add_argument(
        "--rescore",
        action="store_true",
        help="also send prompt and answer as a prompt, whose logprobs must be those of the answer",
    )
    options = parser.parse_args(argv)
    differing: list[int] = []

    def work() -> None:
        client = Client(options.url, options.api_key or os.environ.get(API_KEY_VARIABLE))
        if options.record is not None:
            _record(client, options.file, options.record)
        else:
            differing.extend(_verify(client, options))

    return exit_code_of(work) or (FAILED if differing else 0)


def _record(client: Client, requests: Path, answers: Path) -> None:
    """Write a record of each request. Logprobs and the prompt's ids are asked for in any case."""
    with _open(answers, "w") as out:
        for _, body in _lines(requests):
            asked = {**body, "return_logprob": True, "return_prompt_token_ids": True, "stream": False}
            out.write(json.dumps({"request": asked, "answer": client.post("/generate", asked)}) + "\n")


def _verify(client: Client, options: argparse.Namespace) -> Iterator[int]:
    """Print the outcome of each record, and yield the numbers of those that differ."""
    for number, record in _lines(options.file):
        request, answer = record.get("request"), record.get("answer")
        if not isinstance(request, dict) or not isinstance(answer, dict) or "meta_info" not in answer:
            raise AnswerError(
                f'Line {number} of {options.file} is no record: it needs the members "request" and "answer", and the answer must'
                " be one object of /generate, not a list."
            )
        again = client.post("/generate", replay_of(request, answer))
        difference = first_difference(answer, again)
        if difference is None and options.rescore:
            difference = _rescored(client, answer)
        hint = "" if "deterministic" in again["meta_info"] else " (the server is not deterministic)"
        sys.stdout.write(f"{number}: {difference or 'the same'}{hint if difference else ''}\n")
        if difference is not None:
            yield number


def replay_of(request: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """Return the request with the seed of its answer, whole and not as a stream."""
    sampling = {**(request.get("sampling_params") or {}), "sampling_seed": answer["meta_info"]["seed"]}
    return {**{k: v for k, v in request.items() if k != "rid"}, "sampling_params": sampling, "stream": False}


def first_difference(recorded: dict[str, Any], again: dict[str, Any]) -> str | None:
    """Return where the answers differ first: in ids, then in logprobs, of which all that were recorded are compared."""
    ids, others = recorded["output_ids"], again["output_ids"]
    if ids != others:
        place = next((i for i, pair in enumerate(zip(ids, others, strict=False)) if pair[0] != pair[1]), None)
        if place is None:
            return f"{len(ids)} ids were recorded, and {len(others)} came now"
        return f"output token {place} is {others[place]}, not {ids[place]}"
    for name in LOGPROBS:
        rows, new_rows = recorded["meta_info"].get(name), again["meta_info"].get(name)
        if rows is None:
            continue
        for place, (row, new) in enumerate(zip(rows, new_rows or [None] * len(rows), strict=True)):
            if row != new:
                return f"{name}[{place}] is {new}, not {row}"
    return None


def _rescored(client: Client, answer: dict[str, Any]) -> str | None:
    """Return how the answer's logprobs differ from those of its text as a prompt; None if they do not."""
    prompt, sampled = answer.get("prompt_token_ids"), answer["meta_info"].get("output_token_logprobs")
    if prompt is None or sampled is None:
        raise AnswerError(
            "--rescore needs records with return_prompt_token_ids and return_logprob: make them with --record."
        )
    body = {
        "input_ids": prompt + answer["output_ids"],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    scored = client.post("/generate", body)["meta_info"]["input_token_logprobs"][len(prompt) :]
    for place, (row, new) in enumerate(zip(sampled, scored, strict=True)):
        if row[:2] != new[:2]:
            return f"output token {place} has the logprob {new[0]} as part of a prompt, not {row[0]}"
    return None


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the object of each line that is not blank."""
    with _open(path, "r") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except ValueError as error:
                raise AnswerError(f"Line {number} of {path} is not JSON: {error}.") from error
            if not isinstance(found, dict):
                raise AnswerError(f"Line {number} of {path} is not a JSON object.")
            yield number, found


def _open(path: Path, mode: str) -> Any:
    try:
        return path.open(mode, encoding="utf-8")
    except OSError as error:
        raise AnswerError(f"{path} cannot be opened: {error.strerror}.") from error


if __name__ == "__main__":
    sys.exit(main())
