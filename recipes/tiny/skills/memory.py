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
            "[People|My friends|Friends|All people|Others] [know me as|call me|say|refer to me as|name me] {v}.",
            "{v} is [my name|what I am called|how I am called|what people call me|the name I go by|the name that my"
            " parents gave me].",
            "[I|You] [go by|answer to|may know me under] the name [of |]{v}.",
            "[This is|It is|Here speaks|It's|You are talking to|You speak with] {v}.",
            "[I introduce myself|Let me introduce myself|Allow me to introduce myself][:|.] [I am |My name is |]{v}.",
            "[|Hello, |Hi, |By the way, |Hey, |Good morning, ][my name is|I am|I'm|I am called|you can call me"
            "|call me|they call me|people call me|my first name is] {v}.",
        ),
        "Nice to meet you, {v}.",
        Phrasings(
            "[So|And|Now|Well][,|] [what am I called|what is my name|who am I|how am I called|what do people call me"
            "|what was my name]?",
            "[Could you|Can you|Would you|Please|Will you] remind me [what my name is|who I am|of my name|how I am"
            " called][?|.]",
            "[Do you recall|Have you forgotten|Have you kept|Have you got|Did you note|Did you remember] [my name"
            "|who I am|what I am called|how I am called]?",
            "[By|Under] what name do [you know me|I go|people know me]?",
            "[My name|My name again][?|, please?| is what?| was?]",
            "[I forgot|I told you|I mentioned|You should know] my name[.|:] [What is it|What was it|Which one is it"
            "|Say it, please][?|.]",
            "[Name me|Say who I am|Address me by my name|Greet me by name][.|, please.]",
            "[How|With what name] [should|would|do] you [address|call|greet] me?",
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
            "[Please |Now |][keep|hold|save|put|store|fix] the number {v} in [your memory|mind|your head|your"
            " store][.|, please.]",
            "The number {v} is [important|special|secret|for later|mine][,|.] [remember it|keep it|do not forget it"
            "|note it|I will ask for it later].",
            "{v} is [the number|my number|the secret number|the number to remember|my lucky number|the number that"
            " counts][.|, remember it.|, keep it.]",
            "[I think of|I have|I give you|I tell you|Here is|I chose|I picked] [a number|the number|a secret number"
            "|my number][:|,] {v}[.|. Remember it.|. Keep it in mind.]",
            "[Remember|Please remember|Keep in mind|Can you remember|Note|Memorize|Do not forget|Store] [the"
            " number|this number:|my number:|the secret number] {v}[.|]",
            "[My number|The number|The secret number|My lucky number|The code number] is {v}[.|, remember it.|."
            " Keep it in mind.]",
        ),
        "I will remember the number {v}.",
        Phrasings(
            "[And|So|Now|Well][,|] [which number was that|what number was it|what was the number|which one was my"
            " number|what is the number]?",
            "[Which|What] number did I [want you to keep|want you to remember|ask you to keep|choose|pick|think of"
            "|name|have]?",
            "[Could you|Can you|Would you|Please|Will you] remind me [of the number|what the number is|what the"
            " number was|of my number][?|.]",
            "[Do you recall|Have you forgotten|Have you kept|Did you note|Did you keep|Have you still] [my number"
            "|the number|which number it was|the secret number]?",
            "[The number|My number|That number][?|, please?| is what?| was?| again?]",
            "[I forgot|I told you|I mentioned] [my|a|the] number[.|:] [What is it|What was it|Which one was it|Say"
            " it, please][?|.]",
            "[Give me|Show me|Return|Give back|I need] [back |][the|my] number [back|again|I told you|you keep|from"
            " earlier][.|, please.]",
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
            "[I adore|I really like|I am fond of|I always choose|I am a fan of|I could look all day at|No color is"
            " as nice as] [the color |]{v}.",
            "[Of all colors|Among all colors|Among the colors], [I like {v} best|{v} is the one I like|I prefer {v}"
            "|{v} is my favorite].",
            "[The nicest|The best|The most beautiful|My most loved] color [for me |to me |]is {v}.",
            "[When it comes to colors, |As for colors, |For me ][it is {v}|I take {v}|it must be {v}|{v} is the best].",
            "[My favorite color is|I like the color|The color I like best is|I love the color|My best color is|I"
            " prefer the color|The color of my dreams is] {v}.",
            "{v} is [my favorite color|the color I like best|my best color].",
        ),
        "I will remember that your favorite color is {v}.",
        Phrasings(
            "[Which|What] color did I [say I adore|say I like|tell you about|mention|name|choose|call my favorite]?",
            "[Which|What] is the color [that I like|I like most|that I love|of my choice|I told you about]?",
            "[Could you|Can you|Would you|Please|Will you] remind me [of my favorite color|which color I like|what"
            " my favorite color is][?|.]",
            "[Do you recall|Have you forgotten|Did you note|Have you kept] [my favorite color|which color I like"
            "|what color I love]?",
            "[My favorite color|The color I like][?|, please?| is what?| is which?| was?]",
            "[If I could pick a color, which would it be|In which color would I paint my room|What color would I"
            " choose|Which color would please me][?|]",
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
            "[I have lived|I have been living|My family lives|I was born and live|We live|I spend my days|I moved to"
            " live] in {v}[.| all my life.| for years.| now.]",
            "{v} is [my home|where I live|the city I live in|my city|my home town|where my house is].",
            "[My address is in|My flat is in|You find me in|I am at home in|My house stands in|I have my home in|I"
            " settled in] {v}.",
            "[The city|The town] [I live in|I come from|where I live|that I call home] is {v}.",
            "[|By the way, |Hello, ][I live in|I come from|I am from|I'm from|my home is in|my city is|my home"
            " town is|I have a house in] {v}.",
        ),
        "I will remember that you live in {v}.",
        Phrasings(
            "[What|Which] [town|place|city] do I [live in|call home|call my home|come from]?",
            "[Could you|Can you|Would you|Please|Will you] remind me [where I live|of my city|which city I live in"
            "|where my home is][?|.]",
            "[Do you recall|Have you forgotten|Did you note|Have you kept] [where I live|my city|my home town|where"
            " my home is]?",
            "[My city|My home town|The place I live in|My home][?|, please?| is where?| is what?| was?]",
            "[I told you|I mentioned|I said] where I live[.|:] [Where is it|Where was it|Which city is it|Say it,"
            " please][?|.]",
            "[In which|In what] [place|town] [do I live|is my home|did I say I live|would you find me]?",
            "Where [would you find me|should you visit me|is my house|is my flat|do I have my home|am I at home]?",
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
            "There is {a} {v} [at my home|in my house|in our house|in my garden|that lives with me] [called|named]"
            " {n}.",
            "{n} is [the name of my {v}|what I call my {v}|how my {v} is called|my {v}].",
            "[I share my home with|I live with|I take care of|I feed|I am the owner of|I bought|I found] {a} {v}"
            " [called|named|with the name] {n}.",
            "[We|I] [named|call|called] [my|our|the] {v} {n}.",
            "[I have|I own|I got|I keep|We have|At home I have] {a} {v} [named|called|with the name] {n}.",
            "[My|Our] {v} is [called|named] {n}.",
            "[I have|I own|I got|We have] {a} {v}. [It is called|Its name is|It is named|The name is] {n}.",
            "The name of my {v} is {n}.",
        ),
        "{n} is a nice name for {a} {v}.",
        Phrasings(
            "[How|What] do I call my {v}?",
            "[Could you|Can you|Would you|Please|Will you] remind me [of the name of my {v}|what my {v} is called|of"
            " my {v}'s name][?|.]",
            "[Do you recall|Have you forgotten|Did you note|Have you kept] [the name of my {v}|my {v}'s name|what my"
            " {v} is called|how I call my {v}]?",
            "[My {v}'s name|The name of my {v}|My {v}][?|, please?| is called what?| is named?| has what name?]",
            "[Which|What] name [does my {v} have|has my {v}|did I give my {v}|did I tell you for my {v}|belongs to"
            " my {v}]?",
            "[I told you about|Think of|I mentioned] my {v}[.|:] [What is it called|What is its name|How is it"
            " called][?|.]",
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
            "{v} is [what I like to eat most|my favorite food|what I love to eat|the best food|what I would always"
            " order|the food I like best].",
            "[Nothing tastes as good to me as|I adore|I am fond of|I never say no to|I always order|I could live on"
            "|For dinner I want only|The best food for me is] {v}.",
            "[Of all foods|Among all foods|When I am hungry|When I eat out], [I like {v} best|I take {v}|I prefer"
            " {v}|I choose {v}].",
            "[The dish|The meal] [I like best|that I love|I like most|that I prefer] is {v}.",
            "[My favorite food is|I like to eat|I love|The food I like best is|I always eat|I love to eat|I"
            " would eat every day:] {v}.",
        ),
        "I will remember that your favorite food is {v}.",
        Phrasings(
            "[What|Which] is the [food|dish|meal] [that I like most|I like best|that I love|that I prefer|I told you"
            " about]?",
            "[Could you|Can you|Would you|Please|Will you] remind me [of my favorite food|what I like to eat|what my"
            " favorite food is][?|.]",
            "[Do you recall|Have you forgotten|Did you note|Have you kept] [my favorite food|what I like to eat"
            "|which food I love]?",
            "[My favorite food|The food I like|The dish I love][?|, please?| is what?| is which?| was?]",
            "[What|Which food|Which dish] [would I order|would please me|should you cook for me|makes me happy|did I"
            " say I like|did I call my favorite]?",
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
            "[I earn my living|I make my money|I spend my working days|I am employed|I am paid|I have worked for"
            " years] as {a} {v}.",
            "[For a living|By trade|For money|As a profession|In my job], [I am {a} {v}|I work as {a} {v}].",
            "{A} {v} is what I am[| by profession| at work| by trade].",
            "[I became|I was trained as|I found work as|I have the profession of|I am happy to be] {a} {v}.",
            "[I am|I work as|I'm|I earn my money as|At work I am|By profession I am|I have a job as] {a} {v}.",
            "My [job|profession|work] is {v}.",
        ),
        "I will remember that you are {a} {v}.",
        Phrasings(
            "[What|Which] [work|job|trade|profession] [do I do|is mine|did I say I have|did I tell you about|do I"
            " earn my money with]?",
            "[Could you|Can you|Would you|Please|Will you] remind me [of my job|what I do for a living|what my job"
            " is][?|.]",
            "[Do you recall|Have you forgotten|Did you note|Have you kept] [my job|my profession|what I do for a"
            " living|what I work as]?",
            "[My job|My profession|My work][?|, please?| is what?| is which?| was?]",
            "[How|With what|By what] do I [earn my living|make my money|earn my money]?",
            "[I told you|I mentioned|I said] [what I do|my job|what I work as][.|:] [What is it|What was it|Say it,"
            " please][?|.]",
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
        filled = text.format(v=value, n=name, a=article(value), A=article(value).capitalize())
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
