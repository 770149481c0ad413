"""Greetings, thanks and names, in English and in a few fixed phrases of Chinese."""

from __future__ import annotations

import random

from recipes.tiny.chat import Exchange, ask
from recipes.tiny.holdout import Phrasings, Split
from recipes.tiny.skills.wording import lower_start

ENGLISH = (
    (
        Phrasings(
            "[Hello|Hi|Hey|Good morning|Good evening|Good day|Good afternoon|Greetings|Hi hi|Hello hello]"
            "[| there|, tiny|, model| again|, my friend|, computer| to you| everybody|, you| tiny| friend| dear model]",
        ),
        "Hello! How can I help you?",
    ),
    (
        Phrasings(
            "[|Great, |Okay, |Good, |Oh, |Perfect, |Nice, |Ah, ][thanks|thank you|many thanks|thanks a lot|thank"
            " you very much|thank you so much|thanks so much]"
            "[| for your help| for the help| for the answer| for that|, tiny|, my friend]",
        ),
        "You are welcome.",
    ),
    (
        Phrasings(
            "[|Okay, |Well, |I have to go. |I must go now. |So, |That is all. ][Bye|Bye bye|Goodbye|See you|See"
            " you later|See you soon|See you tomorrow|Good night|Farewell]"
            "[|, tiny| for now|, my friend|, model|, computer| then]",
        ),
        "Goodbye!",
    ),
    (
        Phrasings(
            "[Who|What|Who or what|And who|And what|So who|So what|Who exactly|What exactly] are you[?|, please?"
            "|, tiny?| then?]",
            "[Tell me|Say|Please tell me|Can you tell me|I want to know] [who|what] you are[.|?]",
            "[What is|What's|Tell me|Say|May I ask|Do you know|Can you tell me|Please tell me] your name[?|.]",
            "[Do you have|Have you got|Did they give you] a name?",
            "Are you [a model|a language model|a human|human|a robot|a machine|a bot|a chatbot|an AI|a computer"
            "|a real person|a person][?| or not?]",
            "[Am I talking to|Do I talk to|Am I speaking with] [a model|a human|a robot|a machine|a bot|a"
            " chatbot|an AI|a computer|a real person]?",
            "[Introduce|Please introduce|Can you introduce|Could you introduce|Would you introduce|Now"
            " introduce] yourself[.|?| to me.]",
            "[Tell me|Say|Please tell me|Can you tell me|Can you say|Tell us] [something|a bit|more|] about"
            " yourself[.|?]",
        ),
        "I am tiny, a very small language model that ships with srt.",
    ),
    (
        Phrasings(
            "[|And |So |Hello, |Hi, ][how are you|how are you doing|how do you do|how is it going|how's it going"
            "|how do you feel|how goes it]"
            "[| today| now|, tiny| this morning| these days][?|]",
            "[|And |So ][are you][ well| okay| fine| all right| doing well| feeling well][| today| now|, tiny]?",
            "Is everything [okay|fine|well|all right|good][| with you| today]?",
        ),
        "I am fine, thank you.",
    ),
)
CHINESE = (
    (("你好", "您好", "你好！", "您好！", "你好。", "嗨", "早上好", "晚上好"), "你好！有什么可以帮你？"),
    (("你是谁？", "你是谁", "你叫什么名字？", "你叫什么名字", "你是什么？"), "我是 tiny，srt 自带的小模型。"),
    (("谢谢", "谢谢！", "谢谢你", "谢谢你！", "多谢"), "不客气。"),
    (("再见", "再见！", "拜拜", "明天见"), "再见！"),
    (("你好吗？", "你好吗", "你怎么样？"), "我很好，谢谢。"),
    (("你会说中文吗？", "你会说中文吗", "你懂中文吗？", "你会中文吗？"), "我只会几句中文。"),
    (("srt 是什么？", "什么是 srt？", "这是什么项目？", "介绍一下 srt。"), "srt 是一个大语言模型推理引擎。"),
    (("你会做什么？", "你能做什么？", "你能帮我什么？"), "我会算加减法、排序、拼写和讲故事。"),
)


def smalltalk(rng: random.Random, split: Split) -> Exchange:
    phrasings, answer = rng.choice(ENGLISH)
    phrasing = phrasings.pick(rng, split)
    shown = lower_start(phrasing) if rng.random() < 0.2 else phrasing[0].upper() + phrasing[1:]
    if rng.random() < 0.15:
        shown = shown.rstrip("?.")
    elif not shown.endswith(("?", ".")):
        shown += rng.choice(("!", "", "."))
    return ask("smalltalk", shown, answer, phrasing)


def chinese(rng: random.Random, split: Split) -> Exchange:
    """Fixed phrases: nothing is held out but the conversations around them."""
    del split
    questions, answer = rng.choice(CHINESE)
    question = rng.choice(questions)
    return ask("chinese", question, answer, question)
