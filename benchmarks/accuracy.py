"""How far a model with quantised weights is from the one that it was made of: two servers, asked for the logprobs of the same tokens.

    python -m benchmarks.accuracy --reference http://127.0.0.1:30000 --candidate http://127.0.0.1:30001 [--texts FILE]

Both must serve the same model, one of them quantised. Each text is read by both, token by token as it stands, and at each position is
compared what they expect next: how often the likeliest token is the same, the Kullback-Leibler divergence of the candidate from the
reference in nats (over the likeliest tokens that both list and all others as one, so never more than the true one), and the perplexity
of the text for each. A file holds texts with empty lines between them.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from benchmarks import limits

LISTED = 64  # likeliest tokens at each position
LEAST_REST = 1e-9  # of the probability of all other tokens

TEXTS = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or twice she had"
    " peeped into the book her sister was reading, but it had no pictures or conversations in it.",
    "When in the Course of human events, it becomes necessary for one people to dissolve the political bands which have connected them"
    " with another, a decent respect to the opinions of mankind requires that they should declare the causes.",
    "def quicksort(items):\n    if len(items) < 2:\n        return items\n    pivot, *rest = items\n    smaller = [x for x in rest if x <"
    " pivot]\n    larger = [x for x in rest if x >= pivot]\n    return quicksort(smaller) + [pivot] + quicksort(larger)\n",
    "Question: A train leaves at 9:40 and travels 150 km at 60 km/h. When does it arrive? Answer: It travels for 150 / 60 = 2.5 hours,"
    " which is 2 hours and 30 minutes, so it arrives at 12:10.",
    '{"name": "Ada Lovelace", "born": 1815, "fields": ["mathematics", "computing"], "known_for": {"work": "Notes on the Analytical'
    ' Engine", "year": 1843}}',
    "Wenn ein Körper keine äußere Kraft erfährt, so bleibt er in Ruhe oder bewegt sich geradlinig mit gleichförmiger Geschwindigkeit.",
)


@dataclass(frozen=True, slots=True)
class Position:
    """What a server expects at one position of a text."""

    token: int  # the token that stands there
    logprob: float  # of that token
    likeliest: dict[int, float]  # logprobs by token


@dataclass(frozen=True, slots=True)
class Comparison:
    """The candidate against the reference, over all positions of all texts."""

    positions: int
    agreement: float
    divergence: float
    reference_perplexity: float
    candidate_perplexity: float


def read_text(url: str, content: dict[str, Any]) -> list[Position]:
    """Return what the server at `url` expects at each position but the first of a text, given as `text` or `input_ids`."""
    body = {
        **content,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": LISTED,
    }
    request = Request(f"{url.rstrip('/')}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=600) as response:
        info = json.load(response)["meta_info"]
    found = []
    for (logprob, token, *_), listed in zip(info["input_token_logprobs"], info["input_top_logprobs"], strict=True):
        if logprob is not None:
            found.append(Position(token, logprob, {one[1]: one[0] for one in listed}))
        else:
            first = token
    return [Position(first, 0.0, {}), *found]


def compare(reference: Sequence[Position], candidate: Sequence[Position]) -> Comparison:
    """Compare what two servers expect at the same positions."""
    pairs = list(zip(reference, candidate, strict=True))
    assert all(one.token == other.token for one, other in pairs), "the servers read different tokens"
    same = sum(_best(one) == _best(other) for one, other in pairs)
    return Comparison(
        len(pairs),
        same / len(pairs),
        sum(divergence_of(one.likeliest, other.likeliest) for one, other in pairs) / len(pairs),
        math.exp(-sum(one.logprob for one in reference) / len(pairs)),
        math.exp(-sum(one.logprob for one in candidate) / len(pairs)),
    )


def divergence_of(reference: dict[int, float], candidate: dict[int, float]) -> float:
    """Return the Kullback-Leibler divergence over the tokens that both list, and all others as one."""
    common = reference.keys() & candidate.keys()
    total = sum(math.exp(reference[token]) * (reference[token] - candidate[token]) for token in common)
    rest, other_rest = (max(LEAST_REST, 1 - sum(math.exp(of[t]) for t in common)) for of in (reference, candidate))
    return total + rest * math.log(rest / other_rest)


def _best(position: Position) -> int:
    return max(position.likeliest, key=lambda token: position.likeliest[token])


def measure(reference_url: str, candidate_url: str, texts: Sequence[str]) -> Comparison:
    """Let both servers read the texts, the candidate by the reference's tokens."""
    reference: list[Position] = []
    candidate: list[Position] = []
    for text in texts:
        read = read_text(reference_url, {"text": text})
        ids = [position.token for position in read]
        reference += read[1:]
        candidate += read_text(candidate_url, {"input_ids": ids})[1:]
    return compare(reference, candidate)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", required=True, help="URL of the server of the unquantised model")
    parser.add_argument("--candidate", required=True, help="URL of the server of the quantised model")
    parser.add_argument("--texts", type=Path, help="a file of texts, instead of six short ones")
    parser.add_argument("--jsonl", help="append the result to this file")
    options = parser.parse_args(argv)
    texts: Sequence[str] = TEXTS
    if options.texts is not None:
        texts = [text for text in options.texts.read_text("utf-8").split("\n\n") if text.strip()]
    try:
        found = measure(options.reference, options.candidate, texts)
    except HTTPError as error:
        parser.error(f"{error.url} answered {error.code}: {error.read().decode(errors='replace')[:300]}")
    except URLError as error:
        parser.error(f"a server cannot be reached ({error.reason}): start both, and give their URLs")
    print(f"{found.positions} positions of {len(texts)} texts")
    print(f"the same likeliest token     {found.agreement:8.2%}")
    print(f"divergence, nats             {found.divergence:8.5f}")
    print(f"perplexity of the reference  {found.reference_perplexity:8.3f}")
    print(f"perplexity of the candidate  {found.candidate_perplexity:8.3f}")
    record = {"benchmark": "accuracy", "positions": found.positions, "agreement": found.agreement}
    record |= {"divergence": found.divergence, "reference_perplexity": found.reference_perplexity}
    record |= {"candidate_perplexity": found.candidate_perplexity, "versions": limits.versions()}
    limits.write_jsonl(options.jsonl, record)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
