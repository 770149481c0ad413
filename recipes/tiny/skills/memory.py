"""What the user said earlier in the same conversation. Other exchanges may come in between: see corpus.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from recipes.tiny.chat import Exchange, Message
from recipes.tiny.holdout import Phrasings, Split, draw_operands
from recipes.tiny.skills.wording import dress
from recipes.tiny.words import ANIMALS, COLORS, FOODS, JOBS, article, pick_city, pick_name, pick_number


@dataclass(frozen=True, slots=True)
class Topic:
    """One thing that a user may tell and ask for again."""

    name: str
    make: Callable[[random.Random], str]
    tell: Phrasings
    acknowledge: str
    ask: Phrasings
    answer: str
    untold: str


TOPICS = (
    Topic(
        "name",
        pick_name,
        Phrasings(
            "[|Hello, |Hi, |By the way, |Hey, |Good morning, ][my name is|I am|I'm|I am called|you can call me"
            "|call me|they call me|people call me|my first name is] {v}.",
        ),
        "Nice to meet you, {v}.",
        Phrasings(
            "[What is|What's|What was|Tell me|Say|Do you remember|Do you know|Do you still know|Can you tell me"
            "|Please tell me|Remind me of|Can you remember] my [name|first name][?|.]",
            "[What did I say|Do you remember what I said|Tell me what|Do you know what] my name [was|is][?|.]",
            "[Who am I|Do you know who I am|Tell me who I am|Do you remember who I am|Can you tell me who I am][?|.]",
            "[How am I called|What am I called|What do you call me|How do people call me]?",
        ),
        "Your name is {v}.",
        "You have not told me your name.",
    ),
    Topic(
        "number",
        lambda rng: str(pick_number(rng)),
        Phrasings(
            "[Remember|Please remember|Keep in mind|Can you remember|Note|Memorize|Do not forget|Store] [the"
            " number|this number:|my number:|the secret number] {v}[.|]",
            "[My number|The number|The secret number|My lucky number|The code number] is {v}[.|, remember it.|."
            " Keep it in mind.]",
        ),
        "I will remember the number {v}.",
        Phrasings(
            "[What was|What is|What's|Tell me|Say|Do you remember|Repeat|Do you know|Can you tell me] [the|my]"
            " [number|secret number][?|.| now.]",
            "[Which|What] number did I [tell you|give you|say|mention|ask you to remember]?",
            "[Which|What] number [should you remember|did you memorize|do you remember|do you have in mind|was it]?",
            "[What was|What is|Tell me|Say|Repeat] the number [that I told you|that I gave you|I told you|I gave"
            " you|from before][?|.]",
        ),
        "The number is {v}.",
        "You have not told me a number.",
    ),
    Topic(
        "color",
        lambda rng: rng.choice(COLORS),
        Phrasings(
            "[My favorite color is|I like the color|The color I like best is|I love the color|My best color is|I"
            " prefer the color|The color of my dreams is] {v}.",
            "{v} is [my favorite color|the color I like best|my best color].",
        ),
        "I will remember that your favorite color is {v}.",
        Phrasings(
            "[What is|What's|Tell me|Do you remember|Do you know|Say|Can you tell me|What was] my favorite color[?|.]",
            "[Which|What] color [do I like|do I like best|do I love|is my favorite|do I prefer|did I say I like]?",
            "[Tell me|Say|Do you remember|Do you know] [which|what] color I like[| best][?|.]",
        ),
        "Your favorite color is {v}.",
        "You have not told me your favorite color.",
    ),
    Topic(
        "city",
        pick_city,
        Phrasings(
            "[|By the way, |Hello, ][I live in|I come from|I am from|I'm from|my home is in|my city is|my home"
            " town is|I have a house in] {v}.",
        ),
        "I will remember that you live in {v}.",
        Phrasings(
            "[Where do I live|Where am I from|Where do I come from|Where is my home|Where did I say I live]?",
            "[In which|In what] city [do I live|is my home|is my house]?",
            "[What|Which] city [do I live in|am I from|do I come from|is my home]?",
            "[Tell me|Say|Do you remember|Do you know|Can you tell me] where [I live|I am from|my home is|I come"
            " from][?|.]",
            "[What is|What's|Tell me|Say] my [city|home town][?|.]",
        ),
        "You live in {v}.",
        "You have not told me where you live.",
    ),
    Topic(
        "pet",
        lambda rng: f"{rng.choice(ANIMALS)}|{pick_name(rng)}",
        Phrasings(
            "[I have|I own|I got|I keep|We have|At home I have] {a} {v} [named|called|with the name] {n}.",
            "[My|Our] {v} is [called|named] {n}.",
            "[I have|I own|I got|We have] {a} {v}. [It is called|Its name is|It is named|The name is] {n}.",
            "The name of my {v} is {n}.",
        ),
        "{n} is a nice name for {a} {v}.",
        Phrasings(
            "[What is|What's|Tell me|Do you remember|Do you know|Say|Can you tell me|What was] the name of my {v}[?|.]",
            "[What is|How is|What was] my {v} called?",
            "[What is|What's|Tell me|Do you remember|Do you know|Say] my {v}'s name[?|.]",
            "[Tell me|Say|Do you remember|Do you know] [how|what] my {v} is called[?|.]",
        ),
        "Your {v} is called {n}.",
        "You have not told me about your {v}.",
    ),
    Topic(
        "food",
        lambda rng: rng.choice(FOODS),
        Phrasings(
            "[My favorite food is|I like to eat|I love|The food I like best is|I always eat|I love to eat|I"
            " would eat every day:] {v}.",
        ),
        "I will remember that your favorite food is {v}.",
        Phrasings(
            "[What is|What's|Tell me|Do you remember|Do you know|Say|Can you tell me|What was] my favorite food[?|.]",
            "[Which|What] food [do I like|do I like best|do I love|is my favorite|do I prefer]?",
            "What do I [like|love|prefer] to eat?",
            "[Tell me|Say|Do you remember|Do you know] what I [like|love] to eat[?|.]",
        ),
        "Your favorite food is {v}.",
        "You have not told me your favorite food.",
    ),
    Topic(
        "job",
        lambda rng: rng.choice(JOBS),
        Phrasings(
            "[I am|I work as|I'm|I earn my money as|At work I am|By profession I am|I have a job as] {a} {v}.",
            "My [job|profession|work] is {v}.",
        ),
        "I will remember that you are {a} {v}.",
        Phrasings(
            "[What is|What's|Tell me|Do you remember|Do you know|Say|Can you tell me|What was] my [job"
            "|profession|work][?|.]",
            "What do I [do for work|do at work|work as|do for a living]?",
            "[Which|What] [job|profession] do I have?",
            "[Tell me|Say|Do you remember|Do you know] [what I work as|what my job is|what I do for work][?|.]",
        ),
        "You are {a} {v}.",
        "You have not told me your job.",
    ),
)


@dataclass(frozen=True, slots=True)
class Memory:
    """A thing to be told, and asked for some turns later."""

    topic: Topic
    value: str

    def fill(self, text: str) -> str:
        value, _, name = self.value.partition("|")
        filled = text.format(v=value, n=name, a=article(value))
        return filled[0].upper() + filled[1:]


def draw_memory(rng: random.Random, split: Split, topic: Topic | None = None) -> Memory:
    """Closed lists (colors, foods, jobs) are too short to hold values out of them; there the phrasing alone is held out."""
    topic = topic or rng.choice(TOPICS)
    if split is Split.TRAINING and topic.name in ("name", "city") and rng.random() < 0.1:
        return Memory(topic, draw_memory(rng, split, topic).value.lower())  # as people type
    if topic.name in ("color", "food", "job"):
        return Memory(topic, topic.make(rng))
    return Memory(
        topic, draw_operands(rng, split, topic.make, lambda value: f"memory {topic.name} {value}", share=0.05)
    )


def tell(rng: random.Random, split: Split, memory: Memory) -> tuple[Message, Message]:
    told = memory.fill(memory.topic.tell.pick(rng, split))
    return Message("user", told), Message("assistant", memory.fill(memory.topic.acknowledge))


def recall(rng: random.Random, split: Split, memory: Memory) -> Exchange:
    phrasing = memory.topic.ask.pick(rng, split)
    messages = (
        Message("user", dress(rng, memory.fill(phrasing))),
        Message("assistant", memory.fill(memory.topic.answer)),
    )
    return Exchange("memory", messages, phrasing, f"{memory.topic.name} {memory.value}")


def tell_and_ask(rng: random.Random, split: Split, memory: Memory) -> Exchange:
    """Both in one message."""
    told, phrasing = memory.fill(memory.topic.tell.pick(rng, split)), memory.topic.ask.pick(rng, split)
    messages = (
        Message("user", f"{told} {memory.fill(phrasing)}"),
        Message("assistant", memory.fill(memory.topic.answer)),
    )
    return Exchange("memory", messages, phrasing, f"{memory.topic.name} {memory.value}")


def untold(rng: random.Random, split: Split, topic: Topic) -> Exchange:
    """Asked for, but never told in this conversation."""
    memory, phrasing = draw_memory(rng, Split.TRAINING, topic), topic.ask.pick(rng, split)
    messages = Message("user", dress(rng, memory.fill(phrasing))), Message("assistant", memory.fill(topic.untold))
    return Exchange("memory", messages, phrasing)
