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
    "[I wonder|I ask myself|I forgot|I do not understand|Remind me] what [|the {k} ]{x} [does|is|means|is for|is"
    " good for][.|?]",
    "[Could you|Can you|Would you|Please|Will you] [tell me|say|explain] what [|the {k} ]{x} [does|is|means|is"
    " for][?|.]",
    "{x}[:|,] [what is it|what does it do|what is that|what does it mean|please explain|explain it]?",
    "[Give me|I need|Show me] [help with|an explanation of|a short description of|the description of|information"
    " about] [|the {k} ]{x}[.|, please.]",
    "What happens [if I use|with|when I use|if I call|if I set] [|the {k} ]{x}?",
    "[I found|I see|I read about|There is] [|the {k} ]{x}[.|:] [What is it|What does it do|What is it for|What does"
    " it mean]?",
    "[Help|Usage|Documentation|Meaning|Description][:|, please:| for| of] {x}",
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
    "[I wonder|I ask myself|I forgot|I do not understand|Remind me] what {x} [does|is|means|is for|is good for][.|?]",
    "[Could you|Can you|Would you|Please|Will you] [tell me|say|explain] what {x} [does|is|means|is for][?|.]",
    "{x}[:|,] [what is it|what does it do|what is that|what does it mean|please explain|explain it]?",
    "[Give me|I need|Show me] [an explanation of|a short description of|a definition of|information about] {x}[.|,"
    " please.]",
    "[I read about|I heard of|I hear about|There is] {x}[.|:] [What is it|What does it do|What is it for|What does"
    " it mean]?",
    "[In|With] [one sentence|short|a few words|simple words][,|:] what [is|does one mean by] {x}?",
    "[Why|When|Where] would [I|one|srt] [need|use|want] {x}?",
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
