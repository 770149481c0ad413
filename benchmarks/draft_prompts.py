"""Print prompts for `python -m benchmarks.cpu_drafts --prompts`, one JSON object a line, always the same.

    python -m benchmarks.draft_prompts [--sharegpt FILE] > prompts.jsonl

Kinds: quotes: repeat a text, or sum it up in its own sentences; edits: rename a variable of a function; random: draws of a temperature at
which no draft is right; and of a file in ShareGPT's format the first messages of some conversations. Other texts and functions are the
project's.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import cpu_drafts, real_checkpoints
from srt.managers.process.child_process import environment_of
from srt.speculative.ngram import NgramDrafter, find_repetition

DECISIONS = Path(__file__).parents[1] / "docs" / "decisions"
QUOTED = ("drafts-by-measured-gain", "drafts-equal-draws", "drafts-as-decode-rows", "cpu-steps-in-one-call")
EDITED: tuple[tuple[Callable[..., Any], str, str], ...] = (
    (find_repetition, "found", "places"),
    (NgramDrafter.draft, "counts", "numbers"),
    (environment_of, "wanted", "variables"),
    (cpu_drafts.answer, "whole_s", "seconds"),
    (real_checkpoints.reference_perplexity, "count", "num_tokens"),
    (real_checkpoints.convert, "plain", "model"),
)
NUM_CONVERSATIONS = 24
NUM_RANDOM = 4
SEED = 34
SHORTEST, LONGEST = 40, 2000  # characters of a first message
WORDS = "apple river seven under green walk quickly stone paper often music train below winter".split()


def quotes() -> Iterator[str]:
    for name in QUOTED:
        parts = (DECISIONS / f"{name}.md").read_text().split("\n## ")  # the title, the context, the decision, ...
        text = "\n".join(part.partition("\n")[2].split("|")[0].split("\n- ")[0].strip() for part in parts[1:3])
        yield f"Repeat the following text word for word.\n\n{text}"
        yield f"Summarize the following text. Quote its most important sentences exactly as they are.\n\n{text}"


def edits() -> Iterator[str]:
    for function, old, new in EDITED:
        code = textwrap.dedent(inspect.getsource(function))
        yield (
            f"Rename the variable `{old}` to `{new}` in this Python function. Answer with the whole function.\n\n"
            f"```python\n{code}```"
        )


def first_messages(file: Path) -> Iterator[str]:
    """Yield the first messages of some conversations, in ASCII and of moderate length."""
    conversations = [entry["conversations"] for entry in read_entries(file.read_text())]
    texts = [turns[0]["value"] for turns in conversations if turns and turns[0]["from"] == "human"]
    fitting = [text for text in texts if text.isascii() and SHORTEST <= len(text) <= LONGEST]
    yield from random.Random(SEED).sample(fitting, NUM_CONVERSATIONS)


def read_entries(text: str) -> Iterator[dict[str, Any]]:
    """Yield the whole objects of a JSON list, which may be cut off within one, as that of a registry is."""
    decoder = json.JSONDecoder()
    begin = text.find("{")
    while begin >= 0:
        try:
            entry, end = decoder.raw_decode(text, begin)
        except json.JSONDecodeError:
            return
        yield entry
        begin = text.find("{", end)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sharegpt", type=Path, metavar="FILE")
    options = parser.parse_args()
    for text in quotes():
        print_prompt("quotes", text)
    for text in edits():
        print_prompt("edits", text)
    draw = random.Random(SEED)
    for seed in range(NUM_RANDOM):
        text = " ".join(draw.choice(WORDS) for _ in range(64))
        print_prompt("random", text, temperature=2, sampling_seed=seed, ignore_eos=True)
    for text in first_messages(options.sharegpt) if options.sharegpt else ():
        print_prompt("ShareGPT", text)
    return 0


def print_prompt(kind: str, text: str, **sampling: Any) -> None:
    print(json.dumps({"kind": kind, "prompt": text, "sampling_params": sampling}))


if __name__ == "__main__":
    raise SystemExit(main())
