"""JSON objects for records that are described in words."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from recipes.tiny.chat import Exchange, ask
from recipes.tiny.holdout import Phrasings, Split, draw_operands
from recipes.tiny.skills.wording import dress
from recipes.tiny.words import ANIMALS, COLORS, JOBS, NOUNS, article, pick_city, pick_name, pick_number


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of record: its fields, and how they are told."""

    name: str
    make: Callable[[random.Random], dict[str, Any]]
    tell: Phrasings


KINDS = (
    Kind(
        "person",
        lambda rng: {"name": pick_name(rng), "age": rng.randint(1, 99), "city": pick_city(rng)},
        Phrasings(
            "[a person|someone|a man|a woman|a user|a customer] [named|called|with the name|by the name of]"
            " {name}, [{age} years old|aged {age}|age {age}|who is {age}], [from|living in|who lives in|in] {city}",
            "[a person|someone|a user|a customer] [named|called] {name} who is {age} years old and [lives in"
            "|comes from|is from] {city}",
            "[a person|a user|a customer][:| with] name {name}, age {age}[,| and] city {city}",
            "[|the person |the user ]{name}, [who is|aged|age] {age}[,| and] [living in|from|who lives in|at"
            " home in] {city}",
            "[|the person |the user ]{name} from {city}, [who is {age} years old|aged {age}|age {age}|{age} years old]",
        ),
    ),
    Kind(
        "worker",
        lambda rng: {"name": pick_name(rng), "job": rng.choice(JOBS), "salary": rng.randint(1, 99) * 100},
        Phrasings(
            "[|the worker |a worker named |a person named ]{name}, [{a_job} {job} who earns|who works as {a_job}"
            " {job} and earns|{a_job} {job} with a salary of|job {job}, salary] {salary}",
            "[a worker|an employee|a person] [named|called|with the name] {name} with the job {job} and [a|the]"
            " salary [|of ]{salary}",
            "[a worker|an employee][:| with] name {name}, job {job}[,| and] salary {salary}",
            "the {job} {name}, [whose salary is|who earns|with a salary of|salary] {salary}",
        ),
    ),
    Kind(
        "product",
        lambda rng: {"product": rng.choice(NOUNS), "color": rng.choice(COLORS), "price": pick_number(rng)},
        Phrasings(
            "{a_color} {color} {product} [that costs|for|with a price of|at a price of|which costs|priced at] {price}",
            "[a product|an article|an item][:| with the name] {product}, color {color}[,| and] price {price}",
            "the product {product} [in|with the color|of the color] {color} [for|at|with the price] {price}",
            "[a product|an item] [named|called] {product} with the color {color} and the price {price}",
        ),
    ),
    Kind(
        "pet",
        lambda rng: {
            "name": pick_name(rng),
            "animal": rng.choice(ANIMALS),
            "age": rng.randint(1, 20),
            "tame": rng.random() < 0.5,
        },
        Phrasings(
            "{a_animal} {animal} [named|called|with the name] {name}, [{age} years old|aged {age}|age {age}], {tame}",
            "[a pet|an animal][:| with] name {name}, animal {animal}, age {age}[,| and] {tame}",
            "{a_tame} {tame} {animal} [named|called|with the name] {name} who is {age} years old",
            "{a_tame} {tame} {animal} [named|called] {name}, [aged {age}|age {age}|{age} years old]",
            "the {tame} {animal} {name}, [aged {age}|age {age}|{age} years old]",
            "[a pet|an animal] [named|called] {name}, {a_tame} {tame} {animal} of {age} years",
        ),
    ),
    Kind(
        "trip",
        lambda rng: {"from": pick_city(rng), "to": pick_city(rng), "days": rng.randint(1, 30)},
        Phrasings(
            "[a trip|a journey|a tour|travel] from {from} to {to} [of {days} days|that takes {days} days|in"
            " {days} days|which lasts {days} days]",
            "[a trip|a journey|a tour][:| with] from {from}, to {to}[,| and] days {days}",
            "[a trip|a journey|a tour] [of|that takes|that lasts] {days} days from {from} to {to}",
            "{days} days of travel from {from} to {to}",
            "[a trip|a journey|a tour] that starts in {from}, ends in {to} and [takes|lasts] {days} days",
        ),
    ),
    Kind(
        "basket",
        lambda rng: {"owner": pick_name(rng), "items": rng.sample(NOUNS, rng.randint(1, 4))},
        Phrasings(
            "[a basket|the basket|a bag] [of {name}|that belongs to {name}|owned by {name}] [with|with the items"
            "|that holds|which contains] {items}",
            "[a basket|the basket|a bag][:| with] owner {name}[,| and] items {items}",
            "{name}'s [basket|bag] [with|that holds|which contains|with the items] {items}",
            "[a basket|a bag] with the owner {name} and the items {items}",
        ),
    ),
)
ASK = Phrasings(
    "[Encode|Serialize|Store|Save|Note|Record|Format|Output|Render] [as JSON|as a JSON object|in JSON|to JSON|this"
    " as JSON|this in JSON]: {r}[.|]",
    "[Encode|Serialize|Format|Output|Render|Model] {r} [as JSON|as a JSON object|in JSON|to JSON][.|, please.]",
    "[Build|Construct|Generate|Prepare|Form|Compose] [JSON|a JSON object|the JSON|a JSON record] [out of|from|of|for"
    "|with] [this|the following|what follows]: {r}[.|]",
    "[Build|Construct|Generate|Prepare|Compose] [JSON|a JSON object|the JSON|a JSON record] [for|out of|from|about]"
    " {r}[.|, please.]",
    "[How would|How does|How will] {r} look [in|as] [JSON|a JSON object]?",
    "[What is|What's|What would be] the JSON [for|of|object for] {r}?",
    "[Give|Hand|Send|Show] [this|it] to me [as|in] [JSON|a JSON object][|, please| please]: {r}[.|]",
    "[Can I get|Could I have|May I have|I would like|Let me have|Can I see] [the JSON|a JSON object|JSON] [for|of"
    "|about] {r}[?|.]",
    "[JSON please|JSON, please|I need JSON|I want JSON here|Only JSON][!|:|.] {r}[.|]",
    "I need [a|the] JSON for {r}[.|, please.]",
    "{r}[.|:] [As JSON|In JSON|Give me the JSON|Make that JSON|Write it as JSON|Turn it into JSON|Now as a JSON"
    " object][.|, please.]",
    "[Write|Give me|Make|Create|Return|Produce|Show me|I need|I want|Print|Can you write|Can you make|Please"
    " write|Could you create] [JSON|a JSON object|the JSON|a JSON record|an object in JSON|the JSON object] [for"
    "|of|that describes|about|describing] {r}[.|?]",
    "[Describe|Write|Give me|Return|Express|Represent|Show|Print|Can you write|Please write|Put] {r} [as|as a"
    " piece of|in the form of|in] [JSON|a JSON object][.|?]",
    "[Turn this into|Convert this to|Convert to|Make this|Translate this into|Change this to|Write this as|Put"
    " this into] [JSON|a JSON object]: {r}[.|]",
    "[JSON|A JSON object|As a JSON object|As JSON|In JSON|JSON object][| for][:|,] {r}[.|, please.]",
)


FIELDS: dict[str, Callable[[random.Random], Any]] = {
    "name": pick_name,
    "age": lambda rng: rng.randint(1, 99),
    "city": pick_city,
    "color": lambda rng: rng.choice(COLORS),
    "job": lambda rng: rng.choice(JOBS),
    "animal": lambda rng: rng.choice(ANIMALS),
    "product": lambda rng: rng.choice(NOUNS),
    "price": pick_number,
    "count": lambda rng: rng.randint(0, 99),
    "title": lambda rng: f"The {rng.choice(NOUNS).capitalize()}",
    "year": lambda rng: rng.randint(1000, 2030),
}
WITH_FIELDS = Phrasings(
    "[Build|Construct|Generate|Prepare|Make|Form] [JSON|a JSON object|an object in JSON] [out of|from|with|using]"
    " [this|these fields|the following|the fields]: {f}[.|]",
    "[Encode|Serialize|Store|Format|Output] [as JSON|as a JSON object|in JSON|to JSON]: {f}[.|]",
    "[The fields are|My fields|Fields|These are the fields]: {f}. [Make JSON|Give me the JSON|Make a JSON object|As"
    " JSON, please|Write the JSON object][.|]",
    "[How would|How do] {f} look [in|as] [JSON|a JSON object]?",
    "[Put|Place|Pack|Wrap] {f} [in|into] [JSON|a JSON object][.|, please.]",
    "[Write|Give me|Make|Create|Return|I need|Can you write|Please write] [JSON|a JSON object|the JSON|an object"
    " in JSON] with [|the fields ]{f}[.|?]",
    "[Write|Give me|Make|Create|Return|I need|Please write] a JSON object whose fields are {f}.",
    "[JSON|A JSON object|As a JSON object|As JSON|In JSON|JSON object]: {f}[.|, please.]",
)


def record(rng: random.Random, split: Split) -> Exchange:
    if rng.random() < 0.2:
        return _free_record(rng, split)
    kind = rng.choice(KINDS)
    fields = draw_operands(rng, split, kind.make, lambda fields: f"json {kind.name} {fields}")
    tell, phrasing = kind.tell.pick(rng, split), ASK.pick(rng, split)
    question = dress(rng, phrasing.format(r=tell.format(**_told(fields))))
    return ask("json", question, json.dumps(fields), f"{phrasing} | {tell}", str(fields))


def _free_record(rng: random.Random, split: Split) -> Exchange:
    """Any fields, in any order."""

    def make(rng: random.Random) -> dict[str, Any]:
        return {name: FIELDS[name](rng) for name in rng.sample(sorted(FIELDS), rng.randint(1, 4))}

    fields = draw_operands(rng, split, make, lambda fields: f"json {fields}")
    phrasing, sign = WITH_FIELDS.pick(rng, split), rng.choice((" ", " ", ": ", " = "))
    told = [f"{name}{sign}{value}" for name, value in fields.items()]
    listed = ", ".join(told) if len(told) == 1 or rng.random() < 0.4 else f"{', '.join(told[:-1])} and {told[-1]}"
    return ask("json", dress(rng, phrasing.format(f=listed)), json.dumps(fields), phrasing, str(fields))


def _told(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields as words, with the articles that they need."""
    told = dict(fields)
    if "tame" in told:
        told["tame"] = "tame" if told["tame"] else "wild"
    if "items" in told:
        told |= {"items": ", ".join(told["items"]), "name": told["owner"]}
    return told | {f"a_{name}": article(value) for name, value in told.items() if isinstance(value, str)}
