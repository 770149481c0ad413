"""Request bodies of the routes of embedding models and classifiers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict

from srt.entrypoints.native_shapes import MAX_BATCH
from srt.entrypoints.request_schema import (
    MODEL_NAME,
    NAME,
    NOT_EMPTY,
    PRIORITY,
    TOKEN_ID,
    RequestBody,
    bad_parameter,
    described,
)
from srt.managers.tokenizer_manager.api_types import RequestError
from srt.protocol.labels import numbered
from srt.sampling.parameter_checks import show

Prompt = str | list[int]


class TextsBody(RequestBody):
    """Fields that these routes share."""

    rid: str | None = described("A name for the request, for /abort_request.", string=NAME)
    priority: int = described("Higher runs first, if the server schedules by priority.", 0, integer=PRIORITY)
    no_logs: bool = described("Do not log this request, even if the server logs requests.", False)
    log_metrics: bool = described("Count this request in /metrics.", True)

    def rids(self, count: int, *, is_batch: bool) -> list[str] | list[None]:
        """Return a name for each of `count` texts, as the names of a batch's prompts are made."""
        if self.rid is None:
            return [None] * count
        if not self.rid:
            raise bad_parameter("rid", "must not be empty")
        return numbered(self.rid, count) if is_batch else [self.rid]


class EmbeddingsBody(TextsBody):
    """POST /v1/embeddings."""

    FAMILY: ClassVar[str] = "embeddings"

    input: str | list[str] | list[int] | list[list[int]] = described(
        "A text, or its token ids; or a list of texts, or of lists of token ids.",
        ...,
        integer=TOKEN_ID,
        array=NOT_EMPTY,
    )
    model: str | None = described(
        "One of the server's model names (/v1/models); its first one if absent or `default`.", string=MODEL_NAME
    )
    encoding_format: Literal["float", "base64"] = described(
        "The form of an embedding: numbers, or the base64 of little-endian float32.", "float"
    )
    dimensions: int | None = described(
        "Number of values to keep of each embedding, from the first on. Only models that were trained for it keep their sense.",
        integer={"minimum": 1},
    )
    user: str | None = described("Accepted without effect.")

    def prompts(self) -> list[Prompt]:
        return prompts_of("input", self.input)


class EncodeBody(TextsBody):
    """POST /encode and /classify."""

    FAMILY: ClassVar[str] = "encode"
    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["text"]}, {"required": ["input_ids"]}]})

    text: str | list[str] | None = described(
        "The text, or a list of texts. Either this or input_ids is required.", array=NOT_EMPTY
    )
    input_ids: list[int] | list[list[int]] | None = described(
        "The text as token ids, or a list of such lists.", integer=TOKEN_ID, array=NOT_EMPTY
    )

    def prompts(self) -> tuple[list[Prompt], bool]:
        """Return the prompts, and whether they are a batch, whose answer is a list."""
        if (self.text is None) == (self.input_ids is None):
            raise RequestError(400, "Exactly one of text and input_ids is required.", "text")
        name, given = ("text", self.text) if self.input_ids is None else ("input_ids", self.input_ids)
        prompts = prompts_of(name, given)
        return prompts, isinstance(given, list) and prompts[0] is not given


class DimensionsBody(EncodeBody):
    """POST /encode."""

    dimensions: int | None = described(
        "Number of values to keep of each embedding, from the first on. Only models that were trained for it keep their sense.",
        integer={"minimum": 1},
    )


class RerankBody(TextsBody):
    """POST /v1/rerank."""

    FAMILY: ClassVar[str] = "rerank"

    query: str = described("The query.", ..., string={"minLength": 1})
    documents: list[str] = described("The documents to rank.", ..., array=NOT_EMPTY, string={"minLength": 1})
    model: str | None = described("A name that the server answers to.", string=MODEL_NAME)
    instruct: str | None = described("What fits, in words. Only for models with a reranker's chat template.")
    top_n: int | None = described("Most documents to return.", integer={"minimum": 1})
    return_documents: bool = described("Return the documents' texts.", True)

    def check(self) -> None:
        """Raise RequestError for values that no model can rank by."""
        check_count("documents", self.documents)
        if not self.query.strip():
            raise bad_parameter("query", "must not be empty")
        for index, document in enumerate(self.documents):
            if not document.strip():
                raise bad_parameter(f"documents[{index}]", "must not be empty")
        if self.top_n is not None and self.top_n < 1:
            raise bad_parameter("top_n", f"must be at least 1, not {show(self.top_n)}")


class ScoreBody(TextsBody):
    """POST /v1/score."""

    FAMILY: ClassVar[str] = "score"

    query: str | list[int] | None = described("The text before each item, or its token ids.", integer=TOKEN_ID)
    items: str | list[str] | list[list[int]] = described(
        "The items to score, as texts, or as token ids if the query is given so too.",
        ...,
        integer=TOKEN_ID,
        array=NOT_EMPTY,
    )
    label_token_ids: list[int] | list[list[int]] = described(
        "The tokens whose probability is a score; a list of lists has those of each item.",
        ...,
        integer=TOKEN_ID,
        array=NOT_EMPTY,
    )
    apply_softmax: bool = described("Return shares among the labels, instead of probabilities among all tokens.", False)
    temperature: float = described("Divisor of the log-probabilities before the softmax. Needs apply_softmax.", 1.0)
    item_first: bool = described("Put the query behind each item instead of before it.", False)
    model: str | None = described("A name that the server answers to.", string=MODEL_NAME)

    def prompts(self) -> list[Prompt]:
        """Return each item with its query."""
        if not 0 < self.temperature < math.inf:
            raise bad_parameter("temperature", f"must be above 0 and finite, not {show(self.temperature)}")
        if self.temperature != 1 and not self.apply_softmax:
            raise bad_parameter("temperature", "needs apply_softmax")
        items = [self.items] if isinstance(self.items, str) else self.items
        check_count("items", items)
        are_texts = isinstance(items[0], str)
        query: Any = ("" if are_texts else []) if self.query is None else self.query
        if isinstance(query, str) != are_texts:
            raise bad_parameter("items", "must be texts if the query is a text, and token ids if it is token ids")
        whole: list[Any] = [item + query if self.item_first else query + item for item in items]
        return whole

    def labels(self, count: int) -> list[list[int]]:
        """Return the labels of each of `count` items."""
        given: list[Any] = self.label_token_ids
        if not given:
            raise bad_parameter("label_token_ids", "must not be an empty list")
        rows: list[list[int]] = given if isinstance(given[0], list) else [given] * count
        if len(rows) != count:
            raise bad_parameter("label_token_ids", f"must have one list per item ({count}), not {len(rows)}")
        for row in rows:
            if not row:
                raise bad_parameter("label_token_ids", "must have a token for each item")
            if len(set(row)) != len(row):
                raise bad_parameter("label_token_ids", "must not name a token twice")
        return rows


def prompts_of(name: str, given: Any) -> list[Prompt]:
    """Return the texts or lists of token ids in a field that may hold one of them or a list; RequestError if there is none."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise bad_parameter(name, "must not be an empty list")
    prompts: list[Prompt] = [given] if isinstance(given[0], int) else list(given)
    check_count(name, prompts)
    return prompts


def check_count(name: str, entries: Sequence[object]) -> None:
    if not entries:
        raise bad_parameter(name, "must not be an empty list")
    if len(entries) > MAX_BATCH:
        raise bad_parameter(name, f"may have at most {MAX_BATCH} entries, not {len(entries)}")
