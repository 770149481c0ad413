"""Types of the JSON answers of embedding models and classifiers, with the text that describes each field."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

from srt.entrypoints.answers import Count


class Embedding(TypedDict):
    object: Annotated[Literal["embedding"], "The kind of object."]
    index: Annotated[Count, "The place of the text in the input."]
    embedding: Annotated[list[float] | str, "The embedding, in the form of encoding_format."]


class PromptUsage(TypedDict):
    prompt_tokens: Annotated[Count, "Tokens of all texts."]
    total_tokens: Annotated[Count, "The same number."]


class Embeddings(TypedDict):
    object: Annotated[Literal["list"], "The kind of object."]
    data: Annotated[list[Embedding], "An embedding for each text, in the order of the input."]
    model: Annotated[str, "The model name of the request."]
    usage: Annotated[PromptUsage, "Counts of tokens."]


class EncodedMeta(TypedDict):
    id: Annotated[str, "The request's rid, or a random name."]
    prompt_tokens: Annotated[Count, "Tokens of the text."]
    cached_tokens: Annotated[Count, "Tokens of the text found in the prefix cache."]
    weight_version: Annotated[str, "The version of the weights."]


class Encoded(TypedDict):
    embedding: Annotated[list[float], "The embedding; from /classify the score of each label, as the model gives it."]
    meta_info: Annotated[EncodedMeta, "Counts of the request."]


class Ranked(TypedDict):
    score: Annotated[float, "How well the document fits the query: higher is better."]
    document: NotRequired[Annotated[str, "The document, unless return_documents is false."]]
    index: Annotated[Count, "The document's place in the request."]
    meta_info: Annotated[EncodedMeta, "Counts of the document's request."]


class Scores(TypedDict):
    scores: Annotated[list[list[float]], "For each item, a score for each label, in the order of label_token_ids."]
    model: Annotated[str, "The model name of the request."]
    usage: Annotated[PromptUsage, "Counts of tokens."]
    object: Annotated[Literal["scoring"], "The kind of object."]
