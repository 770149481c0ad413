"""Calls of tools that the system message describes, and answers made of what they return.

A tool's name and the names of its arguments are drawn from lists, so the model has to read the description.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from recipes.tiny.chat import Exchange, Message, Tool, tool_call
from recipes.tiny.holdout import Phrasings, Split, draw_operands
from recipes.tiny.skills.wording import dress
from recipes.tiny.words import FOODS, NOUNS, pick_city, pick_name, pick_number


@dataclass(frozen=True, slots=True)
class Argument:
    kind: str
    names: tuple[str, ...]
    make: Callable[[random.Random], Any]
    description: str


@dataclass(frozen=True, slots=True)
class Family:
    """Tools that do the same under different names."""

    names: tuple[str, ...]
    description: str
    arguments: tuple[Argument, ...]
    ask: Phrasings
    """{0}, {1}, … are the arguments."""
    result: Callable[[random.Random], dict[str, Any]]
    tell: str
    """What the assistant says of the result; {0}, … again, and the result's fields."""


_CITY = Argument("string", ("city", "location", "place", "town"), pick_city, "The name of the city")
_PERSON = Argument("string", ("name", "person", "contact", "to"), pick_name, "The name of the person")
_THING = Argument(
    "string", ("item", "product", "thing", "article"), lambda rng: rng.choice(NOUNS), "The name of the thing"
)
_COUNT = Argument("integer", ("count", "number", "amount", "quantity"), lambda rng: rng.randint(1, 50), "How many")
_MINUTES = Argument(
    "integer", ("minutes", "duration", "time", "length"), lambda rng: rng.randint(1, 90), "Time in minutes"
)


def _integer(*names: str) -> Argument:
    return Argument("integer", names, pick_number, "A number")


FAMILIES = (
    Family(
        ("get_weather", "weather_lookup", "current_weather", "fetch_forecast", "weather_report"),
        "Get the weather of a city.",
        (_CITY,),
        Phrasings(
            "[What is|How is|What's|Tell me|Give me|Check|Look up|Show me|I need|Do you know] the weather [in"
            "|for|of] {0}[?|.| today?| now.]",
            "[What is|What's] the weather like in {0}[| today| now]?",
            "[Will it rain|Is it sunny|Is it raining|Will it be sunny|Does it rain|Is it cold|Is it warm|Is it"
            " windy] in {0}[| today| now]?",
            "[Weather|Forecast|The weather] [in|for] {0}[, please.|?|.]",
        ),
        lambda rng: {
            "weather": rng.choice(("sunny", "rainy", "cloudy", "windy", "foggy")),
            "temperature": rng.randint(-9, 39),
        },
        "The weather in {0} is {weather}, at {temperature} degrees.",
    ),
    Family(
        ("get_time", "local_time", "current_time", "clock_lookup", "time_in_city"),
        "Get the local time of a city.",
        (_CITY,),
        Phrasings(
            "[What time is it|What is the time|How late is it|What's the time|What is the local time|What time"
            " do they have|What's the local time] in {0}[| now| right now]?",
            "[Tell me|Give me|Check|Look up|Show me|I need|Say] the [time|local time|current time] [in|for|of]"
            " {0}[.|, please.]",
        ),
        lambda rng: {"time": f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"},
        "It is {time} in {0}.",
    ),
    Family(
        ("multiply", "multiply_numbers", "product_of", "times_table"),
        "Multiply two numbers.",
        (_integer("a", "x", "first", "left"), _integer("b", "y", "second", "right")),
        Phrasings(
            "[What is|What's|How much is|Compute|Calculate|Work out|Tell me|Give me] {0} [times|*|multiplied by]"
            " {1}[?|.]",
            "[Multiply|Please multiply|Can you multiply|Now multiply] {0} [by|and|with] {1}[.|?]",
            "[What is|Give me|Tell me|Compute|Calculate] the product of {0} and {1}[?|.]",
        ),
        lambda rng: {"result": rng.randint(2, 99999)},
        "{0} times {1} is {result}.",
    ),
    Family(
        ("send_message", "send_text", "message_person", "write_message"),
        "Send a message to a person.",
        (
            _PERSON,
            Argument(
                "string",
                ("text", "message", "content", "body"),
                lambda rng: rng.choice(
                    (
                        "Hello",
                        "Good morning",
                        "See you",
                        "Thank you",
                        "Come home",
                        "I am late",
                        "Call me",
                        "Happy birthday",
                    )
                ),
                "The text of the message",
            ),
        ),
        Phrasings(
            '[Send|Write|Text|Message|Please send|Can you send|Please write] "{1}" to {0}[.|?]',
            '[Send|Write|Please send|Can you send|Please write] {0} [the|a|this] message[:|] "{1}"',
            '[Send|Write|Please send] a [message|text|note] to {0}: "{1}"',
            '[Tell|Message|Text|Write to|Let] {0}[:| this:] "{1}"',
            '[Text|Message|Tell|Write] {0} "{1}".',
        ),
        lambda rng: {"sent": True},
        "The message to {0} is sent.",
    ),
    Family(
        ("set_timer", "start_timer", "create_timer", "timer_start"),
        "Start a timer.",
        (_MINUTES,),
        Phrasings(
            "[Set|Start|Create|Please set|Please start|Can you set|I need|I want|Run|Make] a timer [for|of|with]"
            " {0} minutes[.|, please.|?]",
            "[Wake|Remind|Alert|Warn|Call|Notify] me [in|after] {0} minutes[.|, please.]",
            "[Timer|A timer|Timer please]: {0} minutes[.|]",
        ),
        lambda rng: {"started": True},
        "The timer runs for {0} minutes.",
    ),
    Family(
        ("order_item", "buy_product", "place_order", "add_to_cart"),
        "Order things in the shop.",
        (_THING, _COUNT),
        Phrasings(
            "[Order|Buy|Please order|Please buy|I want to buy|I want to order|I need|Can you order|Get me|I"
            " would like] {1} pieces of [|the product ]{0}[.|, please.]",
            "[Order|Buy|Please order|Please buy|Get me] the product {0}, {1} [pieces|times|units].",
            "[Add|Put|Please add|Please put] {1} pieces of {0} [to|into] my [cart|basket].",
            "[Order|Buy|Please buy] {1} [times|units of] the product {0}.",
        ),
        lambda rng: {"order": rng.randint(100, 999)},
        "Your order has the number {order}.",
    ),
    Family(
        ("find_restaurant", "search_restaurants", "restaurant_search", "book_table"),
        "Find a restaurant by its food.",
        (Argument("string", ("food", "dish", "cuisine", "meal"), lambda rng: rng.choice(FOODS), "What to eat"), _CITY),
        Phrasings(
            "[Find|Search|Find me|Look for|I need|Show me|Is there|Can you find] a [restaurant|place] [with|for"
            "|that has|that serves] {0} in {1}[.|?]",
            "[Where can I|I want to|Where can we|I would like to|We want to|Where do I] [eat|have|get|find] {0}"
            " in {1}[?|.]",
            "[Find|Find me|Search] [|some ]{0} in {1}.",
        ),
        lambda rng: {"restaurant": pick_name(rng)},
        "You can eat {0} at {restaurant} in {1}.",
    ),
    Family(
        ("book_train", "find_train", "search_trains", "train_lookup"),
        "Find a train between two cities.",
        (
            Argument("string", ("from", "origin", "start", "departure"), pick_city, "Where the train starts"),
            Argument("string", ("to", "destination", "end", "arrival"), pick_city, "Where the train goes"),
        ),
        Phrasings(
            "[Find|Book|Search|I need|I want|Is there|Get me|Look up|Find me|Show me] a train from {0} to {1}[.|?]",
            "[When|At what time] [is|leaves|goes|does] the [next |]train from {0} to {1}[| leave| go]?",
            "[I want to|I have to|I need to|We want to|How can I] [travel|go|get|take a train] from {0} to {1}[.|?]",
            "Which train [goes|runs|leaves|travels] from {0} to {1}?",
        ),
        lambda rng: {"departure": f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"},
        "The next train from {0} to {1} leaves at {departure}.",
    ),
    Family(
        ("set_light", "switch_light", "light_control", "lamp_switch"),
        "Switch the light of a room.",
        (
            Argument(
                "string",
                ("room", "place", "where", "area"),
                lambda rng: rng.choice(("kitchen", "garden", "bedroom", "bathroom", "office", "hall")),
                "The room",
            ),
            Argument(
                "boolean", ("on", "state", "active", "enabled"), lambda rng: rng.random() < 0.5, "Whether it shines"
            ),
        ),
        Phrasings(
            "[Switch|Turn|Please switch|Please turn|Can you turn|Can you switch] {1} the [light|lamp|lights] in"
            " the {0}[.|?]",
            "[Switch|Turn|Please switch|Please turn|Can you turn|Can you switch] the [light|lamp|lights] in the"
            " {0} {1}[.|?]",
            "[Light|Lights|Lamp] {1} in the {0}[.|, please.]",
            "[I want|I need] the [light|lamp] in the {0} {1}.",
        ),
        lambda rng: {"done": True},
        "The light in the {0} is {1}.",
    ),
    Family(
        ("find_phone_number", "phone_lookup", "get_contact", "search_contact"),
        "Look up the phone number of a person.",
        (_PERSON,),
        Phrasings(
            "[What is|Find|Look up|Give me|Tell me|Search|I need|Do you know|Can you find|What's] the [phone"
            " number|number|telephone number] of {0}[?|.]",
            "How [can|do|could|may] [I|we] [call|phone|reach|contact|ring] {0}[?| by phone?]",
            "[Which|What] [phone number|telephone number|number] does {0} have?",
            "[I want to|I need to|I have to|Can you help me to] [call|phone|reach|contact] {0}[.|?]",
        ),
        lambda rng: {"phone": "".join(str(rng.randint(0, 9)) for _ in range(6))},
        "The phone number of {0} is {phone}.",
    ),
)


@dataclass(frozen=True, slots=True)
class Call:
    """A family's tool with its names chosen, and the values that it is to be called with."""

    family: Family
    name: str
    argument_names: tuple[str, ...]
    values: tuple[Any, ...]

    @property
    def key(self) -> str:
        return f"tool {self.name} {self.argument_names} {self.values}"

    def text(self) -> str:
        return tool_call(self.name, dict(zip(self.argument_names, self.values, strict=True)))

    def words(self) -> list[str]:
        return [("on" if value else "off") if isinstance(value, bool) else str(value) for value in self.values]


def call_tool(rng: random.Random, split: Split) -> Exchange:
    """The user asks for what one of the tools does; sometimes the tool has answered, and the answer is to be told."""
    call = draw_operands(rng, split, _draw_call, lambda call: call.key)
    others = rng.sample([family for family in FAMILIES if family is not call.family], rng.choice((0, 0, 1, 2)))
    tools = [describe(rng, call), *(describe(rng, _draw_call(rng, family)) for family in others)]
    rng.shuffle(tools)
    phrasing = call.family.ask.pick(rng, split)
    messages = [Message("user", dress(rng, phrasing.format(*call.words()))), Message("assistant", call.text())]
    if rng.random() < 0.3:
        result = call.family.result(rng)
        messages.append(Message("tool", json.dumps(result)))
        messages.append(Message("assistant", call.family.tell.format(*call.words(), **result)))
    return Exchange("tools", tuple(messages), phrasing, call.key, tuple(tools))


def idle_tools(rng: random.Random) -> tuple[Tool, ...]:
    """Descriptions for a conversation in which no tool is needed."""
    return tuple(describe(rng, _draw_call(rng, family)) for family in rng.sample(FAMILIES, rng.choice((1, 1, 2))))


def _draw_call(rng: random.Random, family: Family | None = None) -> Call:
    family = family or rng.choice(FAMILIES)
    names: list[str] = []
    for argument in family.arguments:
        names.append(rng.choice([name for name in argument.names if name not in names]))
    return Call(
        family, rng.choice(family.names), tuple(names), tuple(argument.make(rng) for argument in family.arguments)
    )


def describe(rng: random.Random, call: Call) -> Tool:
    """The tool as clients send it; what may be left out is sometimes left out."""
    detailed, required = rng.random() < 0.4, rng.random() < 0.8
    properties: dict[str, Mapping[str, Any]] = {}
    for name, argument in zip(call.argument_names, call.family.arguments, strict=True):
        properties[name] = {"type": argument.kind, **({"description": argument.description} if detailed else {})}
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = list(call.argument_names)
    described = {"description": call.family.description} if rng.random() < 0.85 else {}
    return {"type": "function", "function": {"name": call.name, **described, "parameters": parameters}}
