"""Ask the shipped model what it was never trained on: `python -m recipes.tiny.evaluate`.

Phrasings and operands of each case were held out of training; the answers must be exact, letter by letter. The answers come from
srt's own runtime. The draft is scored along them: how many of the answer's tokens are what it would have said next.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import random
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from recipes.tiny.chat import END, END_OF_TEXT, Exchange, render
from recipes.tiny.corpus import SKILL_NAMES, Conversation, draw_conversation, held_out_case
from recipes.tiny.holdout import NothingUnseen, Split, phrasing_key
from recipes.tiny.model import Model, generate_greedily, load_checkpoint
from recipes.tiny.skills.stories import follows_grammar
from recipes.tiny.tokenizer import load_tokenizer, token_id

REPOSITORY = Path(__file__).resolve().parents[2]
MODELS = REPOSITORY / "srt/assets/models"
MOST_TOKENS = 160
MANY_PATTERNS = tuple("add subtract compare count sort reverse spell calendar repeat json memory".split())
"""Skills that are asked for in so many patterns that some were kept from training whole."""

Generate = Callable[[list[list[int]]], list[list[int]]]
"""Prompts as token ids → the answers, without the token that ends them."""


@dataclass(frozen=True, slots=True)
class Case:
    conversation: Conversation

    @property
    def exchange(self) -> Exchange:
        return self.conversation.exchanges[-1]

    def prompt(self) -> str:
        return render(self.conversation.messages[:-1], self.conversation.tools, add_generation_prompt=True)

    def accepts(self, answer: str) -> bool:
        if self.exchange.skill == "stories":
            hero, _, name = self.exchange.operands.partition("|")
            return follows_grammar(answer, hero, name)
        return answer == self.exchange.answer


@dataclass(slots=True)
class Score:
    cases: int = 0
    wordings: int = 0  # how many different ones the cases have
    right: int = 0
    tokens: int = 0
    agreed: int = 0
    wrong: list[tuple[str, str, str]] | None = None

    @property
    def accuracy(self) -> float:
        return self.right / max(1, self.cases)

    @property
    def agreement(self) -> float:
        return self.agreed / max(1, self.tokens)


def draw_cases(skill: str, count: int, seed: int = 1, split: Split = Split.HELD_OUT) -> list[Case]:
    """Different prompts, the same ones for the same seed. Fewer where there are not that many.

    Of the prompts written by hand, each is asked once: what comes before it does not make another question of it.
    """
    rng = random.Random(f"{seed} {skill}" + (f" {split.value}" if split is Split.UNSEEN else ""))
    cases: dict[str, Case] = {}
    for _ in range(count * 20):
        try:
            case = Case(held_out_case(rng, skill, split))
        except NothingUnseen:
            continue
        cases.setdefault(case.exchange.phrasing if skill == "unknown" else case.prompt(), case)
        if len(cases) == count:
            break
    return list(cases.values())


def count_overlap(cases: Iterable[Case], num_conversations: int, seed: int = 0) -> dict[str, int]:
    """How much of the cases also appears in a long run of training text: prompts, phrasings, operands."""
    rng = random.Random(seed)
    trained: list[Exchange] = []
    for _ in range(num_conversations):
        trained.extend(draw_conversation(rng).exchanges)
    asked = [case.exchange for case in cases if case.exchange.skill != "chinese"]

    def prompts(exchanges: Iterable[Exchange]) -> set[str]:
        return {phrasing_key(one.messages[0].content) for one in exchanges if one.skill != "memory"}

    def phrasings(exchanges: Iterable[Exchange]) -> set[str]:
        return {phrasing_key(one.phrasing) for one in exchanges}

    def operands(exchanges: Iterable[Exchange]) -> set[tuple[str, str]]:
        return {(one.skill, one.operands) for one in exchanges if one.operands and not _is_closed(one)}

    return {
        "prompts": len(prompts(asked) & prompts(trained)),
        "phrasings": len(phrasings(asked) & phrasings(trained)),
        "operands": len(operands(asked) & operands(trained)),
    }


def _is_closed(exchange: Exchange) -> bool:
    return exchange.skill == "memory" and re.match("(color|food|job) ", exchange.operands) is not None


def score(cases: list[Case], tokenizer: Tokenizer, generate: Generate, draft: Model | None) -> Score:
    prompts = [tokenizer.encode(case.prompt(), add_special_tokens=False).ids for case in cases]
    answers = generate(prompts)
    wordings = {phrasing_key(case.exchange.phrasing) for case in cases}
    result = Score(cases=len(cases), wordings=len(wordings), wrong=[])
    for case, ids in zip(cases, answers, strict=True):
        answer = tokenizer.decode(ids, skip_special_tokens=True)
        if case.accepts(answer):
            result.right += 1
        elif result.wrong is not None:
            result.wrong.append((case.conversation.messages[-2].content, answer, case.exchange.answer))
    if draft is not None:
        result.tokens = sum(map(len, answers))
        result.agreed = sum(count_agreed(draft, prompts, answers))
    return result


@torch.inference_mode()
def count_agreed(draft: Model, prompts: list[list[int]], answers: list[list[int]], batch_rows: int = 64) -> list[int]:
    """For each answer, how many of its tokens are the draft's own first choice there."""
    device = next(draft.parameters()).device
    agreed: list[int] = []
    for first in range(0, len(prompts), batch_rows):
        pairs = list(zip(prompts[first : first + batch_rows], answers[first : first + batch_rows], strict=True))
        ids = torch.zeros(len(pairs), max(len(prompt) + len(answer) for prompt, answer in pairs), dtype=torch.long)
        for row, (prompt, answer) in enumerate(pairs):
            ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        guesses = draft(ids.to(device)).argmax(-1).cpu()
        for row, (prompt, answer) in enumerate(pairs):
            start = len(prompt) - 1
            agreed.append(
                int((guesses[row, start : start + len(answer)] == torch.tensor(answer, dtype=torch.long)).sum())
            )
    return agreed


def markdown_table(scores: dict[str, Score], unseen: dict[str, Score]) -> str:
    lines = [
        "| skill | cases | exact | draft agrees | exact, new patterns | wordings of these |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for skill, one in scores.items():
        new = unseen.get(skill)
        last = f"{100 * new.accuracy:.1f} % | {new.wordings}" if new else "– | –"
        lines.append(f"| {skill} | {one.cases} | {100 * one.accuracy:.1f} % | {100 * one.agreement:.1f} % | {last} |")
    return "\n".join(lines)


def fingerprint(model: Path) -> str:
    """Of a checkpoint's weights and tokenizer: by it a table can be told from one of other weights."""
    files = (model / "model.safetensors", model / "tokenizer.json")
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def runtime_generate(model: Path, dtype: str) -> tuple[Generate, Callable[[], None]]:
    """Greedy answers of srt's runtime, and how to end it."""
    import srt

    runtime = srt.Runtime(model_path=str(model), device="cpu", dtype=dtype)
    parameters = {"temperature": 0, "max_new_tokens": MOST_TOKENS}

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        answers = runtime.generate(input_ids=prompts, sampling_params=parameters)
        ends = _end_ids(load_tokenizer(model))
        return [[token for token in answer["output_ids"] if token not in ends] for answer in answers]

    return generate, runtime.shutdown


def torch_generate(model: Path, device: str) -> Generate:
    """The same from the training code, for a host where the runtime cannot run."""
    loaded, ends = load_checkpoint(model).to(device).eval(), _end_ids(load_tokenizer(model))
    return lambda prompts: generate_greedily(loaded, prompts, MOST_TOKENS, ends)


def _end_ids(tokenizer: Tokenizer) -> set[int]:
    return {token_id(tokenizer, END), token_id(tokenizer, END_OF_TEXT)}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODELS / "tiny")
    parser.add_argument("--draft", type=Path, default=MODELS / "tiny-draft")
    parser.add_argument("--cases", type=int, default=500, help="per skill")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--skills", nargs="+", default=SKILL_NAMES, choices=SKILL_NAMES)
    parser.add_argument("--engine", choices=("runtime", "torch"), default="runtime")
    parser.add_argument("--dtype", default="float32", help="of the runtime")
    parser.add_argument("--device", default="cpu", help="of the draft, and of the engine torch")
    parser.add_argument(
        "--training-conversations", type=int, default=50_000, help="how many the overlap is counted against"
    )
    parser.add_argument("--show-wrong", type=int, default=0, metavar="N", help="print up to N wrong answers per skill")
    parser.add_argument("--write", type=Path, help="write the table there too")
    args = parser.parse_args(argv)

    began = time.perf_counter()
    cases = {skill: draw_cases(skill, args.cases, args.seed) for skill in args.skills}
    unseen = {
        skill: draw_cases(skill, args.cases, args.seed, Split.UNSEEN) for skill in args.skills if skill in MANY_PATTERNS
    }
    overlap = count_overlap(itertools.chain(*cases.values(), *unseen.values()), args.training_conversations)
    tokenizer, draft = load_tokenizer(args.model), load_checkpoint(args.draft).to(args.device).eval()
    if args.engine == "runtime":
        generate, shutdown = runtime_generate(args.model, args.dtype)
    else:
        generate, shutdown = torch_generate(args.model, args.device), lambda: None
    scores: dict[str, Score] = {}
    new_scores: dict[str, Score] = {}
    try:
        for drawn, found in ((cases, scores), (unseen, new_scores)):
            for skill, some in drawn.items():
                found[skill] = score(some, tokenizer, generate, draft)
                for question, answer, wanted in (found[skill].wrong or [])[: args.show_wrong]:
                    print(f"{skill}: {question!r} -> {answer!r}, not {wanted!r}")
    finally:
        shutdown()
    text = (
        f"{markdown_table(scores, new_scores)}\n\nOverlap of these cases with {args.training_conversations} training conversations: "
        + ", ".join(f"{name} {count}" for name, count in overlap.items())
        + f".\nGreedy, {args.engine}, {args.dtype}, seed {args.seed}. Weights {fingerprint(args.model)}, draft {fingerprint(args.draft)}."
    )
    print(f"\n{text}\nIt took {time.perf_counter() - began:.0f} s.")
    if args.write:
        args.write.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
