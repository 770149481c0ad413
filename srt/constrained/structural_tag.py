"""Structural tags: an answer of free text and of parts that follow a grammar, as a grammar of the library.

Two spellings are read: SGLang's older one, `structures` with `triggers`, and the one with a `format`, a tree of these types:

| type | members | allows |
|---|---|---|
| `const_string` | value | this text |
| `json_schema` | json_schema | JSON that the schema allows |
| `regex` | pattern, excludes | what the expression matches, and all of them if it is a list; without any of the texts in excludes |
| `grammar` | grammar | what the EBNF allows |
| `any_text` | | any text; only as the last part, or in a tag with an end |
| `sequence`, `or` | elements | all of them in order; any one of them |
| `tag` | begin, content, end | the content between two texts |
| `triggered_tags` | triggers, tags, at_least_one, stop_after_first | free text; after a trigger, one of the tags that begin with it |
| `tags_with_separator` | tags, separator, at_least_one, stop_after_first | the tags, with the separator between them |
| `members` | elements, required, separator | the elements in order, less some for which the list `required` says false |
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from srt.constrained.json_schema import SchemaRefusal

_ANY: Final = "/(?s:.*)/"
_SLASH: Final = re.compile(r"\\(?s:.)|/|\n")
_SPECIAL: Final = re.compile(r"[\\.+*?()|\[\]{}^$/]")
Node = Mapping[str, Any]


class TagRefusal(Exception):
    """A structural tag that cannot be enforced, as the rest of a sentence."""


class StructuralTag:
    """Builds the grammar of one structural tag, as text in the library's variant of Lark with grammars beside it."""

    def __init__(
        self,
        special_ids: Mapping[str, int],
        schema_text: Callable[[Any, str], str],
        side_grammar: Callable[[str, str], Mapping[str, Any]],
    ) -> None:
        """Prepare for one run of `build`.

        special_ids: ids of the tokens that texts may hold but bytes cannot spell.
        schema_text: makes the library's JSON from a schema and its place in the tag; raises SchemaRefusal.
        side_grammar: makes a grammar object from a kind (regex or ebnf) and its content.
        """
        self._special_ids = special_ids
        self._schema_text = schema_text
        self._side_grammar = side_grammar
        self._rules: list[str] = []
        self._beside: list[Mapping[str, Any]] = []

    def build(self, tag: Node) -> str:
        start = self._node(_format_of(tag), "format", is_last=True)
        lark = "\n".join(["%llguidance {}", f"start: {start}", *self._rules, ""])
        return json.dumps({"grammars": [{"name": "tag", "lark_grammar": lark}, *self._beside]}, ensure_ascii=False)

    def _node(self, node: Any, place: str, is_last: bool) -> str:
        """Return the name of a new rule for this part. `is_last`: nothing follows it."""
        kind = node.get("type") if isinstance(node, dict) else None
        match kind:
            case "const_string":
                return self._rule(self._literal(_text(node, "value", place)))
            case "json_schema":
                return self._rule(f"%json {self._schema(node, place)}")
            case "regex" if isinstance(node.get("pattern"), list) or node.get("excludes"):
                return self._rule_of_terminal(_all_of(_expressions(node, place), node.get("excludes") or [], place))
            case "regex":
                return self._beside_rule("regex", _text(node, "pattern", place))
            case "grammar":
                return self._beside_rule("ebnf", _text(node, "grammar", place))
            case "any_text" if is_last:
                return self._rule(_ANY)
            case "any_text":
                raise TagRefusal(f"has free text at {place} with something behind it: put it into a tag with an end")
            case "sequence":
                parts = _list(node, "elements", place)
                last = len(parts) - 1
                names = [self._node(one, f"{place}/{i}", is_last and i == last) for i, one in enumerate(parts)]
                return self._rule(" ".join(names))
            case "or":
                parts = _list(node, "elements", place)
                return self._rule(" | ".join(self._node(one, f"{place}/{i}", is_last) for i, one in enumerate(parts)))
            case "tag":
                return self._tag(node, place, is_last)
            case "triggered_tags":
                return self._triggered(node, place, is_last)
            case "tags_with_separator":
                return self._separated(node, place)
            case "members":
                return self._members(node, place, is_last)
        raise TagRefusal(f"has the type {kind!r} at {place}, which is not supported")

    def _schema(self, node: Node, place: str) -> str:
        try:
            return self._schema_text(node.get("json_schema", True), f"{place}/json_schema")
        except SchemaRefusal as refusal:
            raise TagRefusal(f"{refusal} (within {place}/json_schema)") from refusal

    # ---- Tags

    def _tag(self, node: Node, place: str, is_last: bool, begun: str = "") -> str:
        """Return a rule for a tag, less the text `begun` that has come already."""
        begin = _text(node, "begin", place, may_be_empty=True)[len(begun) :]
        ends = node.get("end", "")
        ends = [ends] if isinstance(ends, str) else ends
        if not isinstance(ends, list) or not ends or not all(isinstance(end, str) for end in ends):
            raise TagRefusal(f"needs a string in end, at {place}")
        content = node.get("content")
        known = content if isinstance(content, dict) else {}
        if known.get("type") == "any_text" and any(ends):
            inner, end = self._free_text(ends), ""
        elif known.get("type") == "regex" and known.get("excludes") and len(ends) == 1 and ends[0]:
            inner, end = self._text_with_end(known, ends[0], f"{place}/content"), ""
        else:
            inner = self._node(content, f"{place}/content", is_last and not any(ends))
            end = self._rule(" | ".join(self._literal(one) for one in ends)) if any(ends) else ""
        return self._rule(" ".join(filter(None, [self._literal(begin) if begin else "", inner, end])))

    def _free_text(self, ends: Sequence[str]) -> str:
        """Return a rule for free text up to and with the first of these ends."""
        plain = [end for end in ends if self._pieces(end) == [end] and end not in self._special_ids]
        options = [self._rule(f"{_ANY} ({' | '.join(map(_quoted, plain))})", options="[lazy]")] if plain else []
        for end in ends:
            if end not in plain:  # free text cannot hold a special token, so it ends before one by itself
                text, rest = self._before_special(end)
                options.append(f"{self._rule_of_terminal(f'{_ANY} {_quoted(text)}' if text else _ANY)} {rest}")
        return self._rule(" | ".join(options))

    def _text_with_end(self, content: Node, end: str, place: str) -> str:
        """Return a rule for text that matches expressions, and the end behind it, at its first place in the text."""
        text = _all_of(_expressions(content, place), content["excludes"], place)
        if self._pieces(end) == [end] and end not in self._special_ids:
            # One terminal: as two, the first would go on into the end.
            return self._rule_of_terminal(f"(({text}) {_quoted(end)}) & ~/(?s:.*){_escaped(end)}(?s:.+)/")
        before, rest = self._before_special(end)
        return self._rule(f"{self._rule_of_terminal(f'({text}) {_quoted(before)}' if before else text)} {rest}")

    def _before_special(self, end: str) -> tuple[str, str]:
        """Return the text before the first special token in `end`, and the rest of it as Lark."""
        first, *others = self._pieces(end)
        if first in self._special_ids:
            return "", self._literal(end)
        return first, self._literal("".join(others))

    def _triggered(self, node: Node, place: str, is_last: bool) -> str:
        triggers = _list(node, "triggers", place)
        tags = _list(node, "tags", place)
        groups = []
        for trigger in triggers:
            if not isinstance(trigger, str) or not trigger:
                raise TagRefusal(f"needs strings in triggers, at {place}")
            mine = [(index, tag) for index, tag in enumerate(tags) if _begin_of(tag).startswith(trigger)]
            if not mine:
                raise TagRefusal(f"has the trigger {trigger!r} at {place}, with which none of its tags begins")
            bodies = [self._tag(tag, f"{place}/tags/{index}", False, begun=trigger) for index, tag in mine]
            groups.append(self._rule(f"{self._free_text([trigger])} ({' | '.join(bodies)})"))
        for index, tag in enumerate(tags):
            if not any(_begin_of(tag).startswith(trigger) for trigger in triggers):
                raise TagRefusal(f"has a tag at {place}/tags/{index} that begins with none of its triggers")
        one = f"({' | '.join(groups)})"
        at_least_one, only_first = node.get("at_least_one") is True, node.get("stop_after_first") is True
        text = self._rule(_ANY) if is_last else ""
        if only_first:
            without = text or _quoted("")
            return self._rule(one if at_least_one else f"{one} | {without}")
        if not text:
            raise TagRefusal(f"has triggered tags at {place} with something behind them: set stop_after_first")
        return self._rule(f"{one}{'+' if at_least_one else '*'} {text}")

    def _separated(self, node: Node, place: str) -> str:
        tags = _list(node, "tags", place)
        names = [self._tag(tag, f"{place}/tags/{index}", False) for index, tag in enumerate(tags)]
        one = self._rule(" | ".join(names))
        separator = _text(node, "separator", place, may_be_empty=True)
        rest = f"({self._literal(separator) if separator else ''} {one})*"
        whole = one if node.get("stop_after_first") is True else f"{one} {rest}"
        return self._rule(whole if node.get("at_least_one") is True else f"({whole})?")

    def _members(self, node: Node, place: str, is_last: bool) -> str:
        elements = node.get("elements")
        required = node.get("required")
        if not isinstance(elements, list) or not isinstance(required, list) or len(required) != len(elements):
            raise TagRefusal(f"needs lists of one length in elements and required, at {place}")
        separator = _text(node, "separator", place, may_be_empty=True)
        between = f"{self._literal(separator)} " if separator else ""
        # What may follow, from the last element to the first: behind an element, and where there is none yet.
        following = beginning = self._rule('""')
        for index in reversed(range(len(elements))):
            one = self._node(elements[index], f"{place}/elements/{index}", is_last and index == len(elements) - 1)
            without = [] if required[index] else [following]
            begun = " | ".join([f"{between}{one} {following}", *without])
            without = [] if required[index] else [beginning]
            beginning = self._rule(" | ".join([f"{one} {following}", *without]))
            following = self._rule(begun)
        return beginning

    # ---- Lark

    def _rule_of_terminal(self, body: str) -> str:
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return self._rule(name)

    def _rule(self, body: str, options: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _beside_rule(self, kind: str, content: str) -> str:
        name = f"g{len(self._beside)}"
        self._beside.append({**self._side_grammar(kind, content), "name": name})
        return self._rule(f"@{name}")

    def _literal(self, text: str) -> str:
        """Return text in which special tokens are named by their ids: their bytes alone would be other tokens."""
        pieces = self._pieces(text)
        return " ".join(f"<[{self._special_ids[one]}]>" if one in self._special_ids else _quoted(one) for one in pieces)

    def _pieces(self, text: str) -> list[str]:
        if not self._special_ids:
            return [text]
        special = "|".join(sorted(map(re.escape, self._special_ids), key=len, reverse=True))
        return [piece for piece in re.split(f"({special})", text) if piece]


def format_of(kind: str, content: str) -> Node:
    """Return a constraint of any kind as a part of a structural tag; raise TagRefusal."""
    match kind:
        case "structural_tag":
            return _format_of(json.loads(content))
        case "json_schema":
            return {"type": "json_schema", "json_schema": json.loads(content)}
        case "regex":
            return {"type": "regex", "pattern": content}
        case "choice":
            texts = " | ".join(map(_quoted, json.loads(content)))
            return {"type": "grammar", "grammar": f"start: CHOICE\nCHOICE: {texts}"}
    return {"type": "grammar", "grammar": content}


def _format_of(tag: Node) -> Node:
    """Return the tree of a tag in either spelling."""
    if "format" in tag:
        unknown = [name for name in tag if name != "format"]
        if unknown:
            raise TagRefusal(f"has the member {unknown[0]}, which is not known beside format")
        format_: Node = tag["format"]
        return format_
    structures = tag.get("structures")
    if not isinstance(structures, list) or not structures or not all(isinstance(one, dict) for one in structures):
        raise TagRefusal(
            "needs either format, or structures (a list of objects with begin, schema and end) and triggers"
        )
    tags = [
        {
            "type": "tag",
            "begin": one.get("begin"),
            "content": {"type": "json_schema", "json_schema": one.get("schema", True)},
            "end": one.get("end", ""),
        }
        for one in structures
    ]
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


def _begin_of(tag: Any) -> str:
    begin = tag.get("begin") if isinstance(tag, dict) else None
    return begin if isinstance(begin, str) else ""


def _text(node: Node, member: str, place: str, may_be_empty: bool = False) -> str:
    value = node.get(member) if isinstance(node, dict) else None
    if not isinstance(value, str) or not (value or may_be_empty):
        raise TagRefusal(f"needs a string in {member}, at {place}")
    return value


def _list(node: Node, member: str, place: str) -> list[Any]:
    value = node.get(member)
    if not isinstance(value, list) or not value:
        raise TagRefusal(f"needs a list of at least one entry in {member}, at {place}")
    return value


def _expressions(node: Node, place: str) -> list[str]:
    found: Any = node.get("pattern")
    expressions: list[Any] = found if isinstance(found, list) else [found]
    if not expressions or not all(isinstance(one, str) and one for one in expressions):
        raise TagRefusal(f"needs an expression, or a list of expressions, in pattern, at {place}")
    return expressions


def _all_of(expressions: Sequence[str], excludes: Any, place: str) -> str:
    """Return a terminal for text that matches all expressions and holds none of the texts in `excludes`."""
    if not isinstance(excludes, list) or not all(isinstance(one, str) and one for one in excludes):
        raise TagRefusal(f"needs a list of texts in excludes, at {place}")
    terms = [f"/{_SLASH.sub(_with_escaped_slash, one)}/" for one in expressions]
    terms += [f"~/(?s:.*){_escaped(one)}(?s:.*)/" for one in excludes]
    return " & ".join(terms)


def _with_escaped_slash(found: re.Match[str]) -> str:
    """Return a piece of an expression as it is written between slashes in Lark."""
    return {"/": r"\/", "\n": r"\n"}.get(found[0], found[0])


def _escaped(text: str) -> str:
    """Return text as an expression that matches it, as it is written between slashes in Lark."""
    return _SPECIAL.sub(r"\\\g<0>", text).replace("\n", r"\n")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
