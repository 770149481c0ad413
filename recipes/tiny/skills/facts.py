"""What the model says about this project: what it is, its options, its endpoints. The texts are facts.toml."""

from __future__ import annotations

import random
import tomllib
from dataclasses import dataclass
from pathlib import Path

from recipes.tiny.chat import Exchange, ask
from recipes.tiny.holdout import Phrasings, Split
from recipes.tiny.skills.wording import dress

NAMED = Phrasings(
    "What does [|the {k} ]{x} [do|mean|set|change|stand for|give me][?|, please?]",
    "What is [|the {k} |the meaning of |the purpose of |the use of |the task of ]{x}[?|, please?]",
    "What is [|the {k} ]{x} [for|good for|used for|about]?",
    "[Explain|Describe|Tell me about|Can you explain|Could you explain|Please explain|Tell me something about"
    "|Can you describe|Do you know|Inform me about] [|the {k} ]{x}[.|?| to me.]",
    "[When|Why|For what] [do I need|do I use|should I use|would I use] [|the {k} ]{x}?",
    "How [do I use|does one use|can I use] [|the {k} ]{x}?",
    "[I want to know|Tell me|Say] what [|the {k} ]{x} [does|is|means|is for].",
)


CONCEPT = Phrasings(
    "[What is|What's|What exactly is|Do you know] {x}[?|, please?]",
    "What does {x} [do|mean|stand for|give me]?",
    "What is [the meaning of|the purpose of|the use of|the task of|the idea of|the point of] {x}?",
    "What is {x} [for|good for|used for|about]?",
    "[Explain|Describe|Define|Tell me about|Can you explain|Could you explain|Please explain|Tell me something"
    " about|Can you describe|Inform me about]"
    " {x}[.|?| to me.]",
    "How does {x} work?",
    "[Why|When|For what] [do I need|do I use|is there|should I use|does srt have] {x}?",
    "[I want to know|Tell me|Say] what {x} [does|is|means|is for].",
)


@dataclass(frozen=True, slots=True)
class Fact:
    """One answer, and the ways to ask for it. `{x}` in a phrasing is one of `names`, and `{k}` their `kind`."""

    phrasings: Phrasings
    answer: str
    names: tuple[str, ...] = ("",)
    kind: str = ""


def load_facts() -> tuple[tuple[Fact, ...], ...]:
    """In groups that are asked for equally often."""
    table = tomllib.loads((Path(__file__).parent / "facts.toml").read_text("utf-8"))
    options = tuple(Fact(NAMED, f"{name}: {text}", (name,), "option") for name, text in table["options"].items())
    endpoints = tuple(Fact(NAMED, f"{name}: {text}", (name,), "endpoint") for name, text in table["endpoints"].items())
    concepts = tuple(Fact(CONCEPT, concept["answer"], tuple(concept["names"])) for concept in table["concept"])
    return (
        (*options, *endpoints),
        concepts,
        tuple(Fact(Phrasings(*fact["ask"]), fact["answer"]) for fact in table["fact"]),
    )


FACTS = load_facts()


def facts(rng: random.Random, split: Split) -> Exchange:
    fact = rng.choice(rng.choice(FACTS))
    phrasing = fact.phrasings.pick(rng, split)
    question = phrasing.format(x=rng.choice(fact.names), k=fact.kind)
    return ask("facts", dress(rng, question), fact.answer, phrasing)
