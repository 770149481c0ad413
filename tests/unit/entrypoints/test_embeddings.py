"""/v1/embeddings, /encode, /classify, /v1/rerank and /v1/score, on an engine that says what it is told to."""

from __future__ import annotations

import base64
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from srt.managers.tokenizer_manager.api_types import ChoiceUpdate, GenerateInput, RequestError, TokenLogprob
from srt.utils.pooling_config import PoolingSpec
from tests.unit.entrypoints.fake_engine import World, choice_update, prompt_ids

EMBEDDER = PoolingSpec("last", normalize=True)
VECTORS: dict[str, list[float]] = {"a": [3, 4, 0, 0], "b": [0, 0, 5, 12], "near a": [6, 8, 1, 0]}


def pooling_world(spec: PoolingSpec, vectors: dict[str, list[float]] | None = None) -> World:
    """A server whose model has these vectors for texts, and four ones for all others."""
    world, known = World(), VECTORS if vectors is None else vectors
    world.engine.model = dataclasses.replace(world.engine.model, pooling=spec, hidden_size=4)

    def say(request: GenerateInput) -> list[list[ChoiceUpdate] | RequestError | None]:
        text = "".join(map(chr, prompt_ids(request)))
        vector = np.array(known.get(text, [1] * len(next(iter(known.values())))), np.float32)
        update = choice_update(request, "x", 0, cut=True)
        return [[replace(update, output_logprobs=(TokenLogprob(0.0, 0, vector=vector),))]]

    world.engine.script = say
    return world


def scoring_world(logprobs: dict[str, list[float]]) -> World:
    """A server whose model generates, and gives the labels behind a text these log-probabilities."""
    world = World()

    def say(request: GenerateInput) -> list[list[ChoiceUpdate] | RequestError | None]:
        values = logprobs["".join(map(chr, prompt_ids(request)))]
        assert len(request.logprobs.ids) == len(values)
        update = choice_update(request, "x", 0, cut=True)
        of_ids = tuple(zip(values, request.logprobs.ids, strict=True))
        return [[replace(update, output_logprobs=(TokenLogprob(-1.0, 0, of_ids=of_ids),))]]

    world.engine.script = say
    return world


def post(world: World, path: str, body: dict[str, Any]) -> Any:
    response = world.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def refusal(world: World, path: str, body: dict[str, Any]) -> tuple[int, str]:
    response = world.post(path, body)
    return response.status_code, response.json()["error"]["message"]


def test_embeddings_are_in_the_order_of_the_input_and_have_length_1() -> None:
    world = pooling_world(EMBEDDER)
    answer = post(world, "/v1/embeddings", {"input": ["a", "b"], "model": "tiny"})
    assert [one["embedding"] for one in answer["data"]] == [[0.6, 0.8, 0, 0], [0, 0, 0.3846154, 0.9230769]]
    assert [one["index"] for one in answer["data"]] == [0, 1]
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    assert answer["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
    assert all(handle.request.params.max_new_tokens == 1 for handle in world.engine.handles)


@pytest.mark.parametrize("given", ["a", ["a"], [97], [[97]]])
def test_a_text_may_be_token_ids_and_stand_alone_or_in_a_list(given: object) -> None:
    answer = post(pooling_world(EMBEDDER), "/v1/embeddings", {"input": given})
    assert [one["embedding"] for one in answer["data"]] == [[0.6, 0.8, 0, 0]]


def test_base64_holds_little_endian_float32() -> None:
    answer = post(pooling_world(EMBEDDER), "/v1/embeddings", {"input": "a", "encoding_format": "base64"})
    values = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    np.testing.assert_array_equal(values, np.array([0.6, 0.8, 0, 0], np.float32))


def test_fewer_dimensions_are_scaled_to_length_1_again() -> None:
    answer = post(pooling_world(EMBEDDER), "/v1/embeddings", {"input": ["near a", "b"], "dimensions": 2})
    near, zero = (one["embedding"] for one in answer["data"])
    assert near == pytest.approx([0.6, 0.8])
    assert zero == [0, 0]


def test_a_model_that_does_not_normalize_gives_its_vectors_as_they_are() -> None:
    world = pooling_world(PoolingSpec("mean"))
    assert post(world, "/encode", {"text": "b", "dimensions": 3})["embedding"] == [0, 0, 5]


def test_encode_answers_a_batch_with_a_list() -> None:
    world = pooling_world(EMBEDDER)
    one = post(world, "/encode", {"text": "a", "rid": "mine"})
    assert one["embedding"] == [0.6, 0.8, 0, 0]
    assert one["meta_info"] == {"id": "mine", "prompt_tokens": 1, "cached_tokens": 2, "weight_version": "default"}
    many = post(world, "/encode", {"input_ids": [[97], [98]], "rid": "mine"})
    assert [one["meta_info"]["id"] for one in many] == ["mine_0", "mine_1"]
    assert isinstance(post(world, "/encode", {"input_ids": [[97]]}), list)


def test_classify_gives_the_scores_as_they_are() -> None:
    world = pooling_world(PoolingSpec(labels=("bad", "good")), {"a": [-2.0, 7.5]})
    assert post(world, "/classify", {"text": "a"})["embedding"] == [-2, 7.5]


def test_rerank_by_a_classifier_scores_pairs() -> None:
    world = pooling_world(PoolingSpec(labels=("fits",)), {"q|a": [-1.0], "q|b": [2.0], "q|c": [-1.0]})
    answer = post(world, "/v1/rerank", {"query": "q", "documents": ["a", "b", "c"]})
    assert [(one["index"], one["document"]) for one in answer] == [(1, "b"), (0, "a"), (2, "c")]
    assert answer[0]["score"] == pytest.approx(1 / (1 + math.exp(-2)))
    answer = post(
        world, "/v1/rerank", {"query": "q", "documents": ["a", "b", "c"], "top_n": 1, "return_documents": False}
    )
    assert [one["index"] for one in answer] == [1]
    assert "document" not in answer[0]


def test_rerank_by_embeddings_compares_directions() -> None:
    answer = post(pooling_world(PoolingSpec("mean")), "/v1/rerank", {"query": "a", "documents": ["b", "near a"]})
    assert [one["index"] for one in answer] == [1, 0]
    assert [one["score"] for one in answer] == pytest.approx([50 / 5 / math.sqrt(101), 0])


def test_rerank_by_a_model_that_generates_asks_its_template() -> None:
    yes, no = math.log(0.3), math.log(0.1)
    prompt = "<user>q<user>{}{{'instruct': 'fit'}}"
    world = scoring_world({prompt.format("a"): [no, yes], prompt.format("b"): [yes, no]})
    body = {"query": "q", "documents": ["a", "b"], "instruct": "fit"}
    status, message = refusal(world, "/v1/rerank", body)
    assert (status, "not a reranker's" in message) == (501, True)
    world.engine.template_variables = {'can only be "yes" or "no"'}
    world.engine.single_tokens = {"yes": 1, "no": 2}
    answer = post(world, "/v1/rerank", body)
    assert [one["index"] for one in answer] == [1, 0]
    assert [one["score"] for one in answer] == pytest.approx([0.75, 0.25])
    assert not world.engine.handles[0].request.add_special_tokens


def test_score_gives_probabilities_of_labels() -> None:
    logprobs = {"qa": [math.log(0.2), math.log(0.6)], "qb": [math.log(0.5), -math.inf]}
    world = scoring_world(logprobs)
    body: dict[str, Any] = {"query": "q", "items": ["a", "b"], "label_token_ids": [5, 6]}
    answer = post(world, "/v1/score", body)
    assert answer["object"] == "scoring"
    assert answer["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    np.testing.assert_allclose(answer["scores"], [[0.2, 0.6], [0.5, 0]])
    shares = post(world, "/v1/score", {**body, "apply_softmax": True})["scores"]
    np.testing.assert_allclose(shares, [[0.25, 0.75], [1.0, 0.0]])
    flat = post(world, "/v1/score", {**body, "items": "a", "apply_softmax": True, "temperature": 1e9})["scores"]
    np.testing.assert_allclose(flat, [[0.5, 0.5]], atol=1e-6)


def test_score_takes_token_ids_items_first_and_labels_of_each_item() -> None:
    world = scoring_world({"ab": [-1.0], "cb": [-2.0, -3.0]})
    body = {"query": [98], "items": [[97], [99]], "label_token_ids": [[1], [2, 3]], "item_first": True}
    scores = post(world, "/v1/score", body)["scores"]
    assert [list(map(math.log, row)) for row in scores] == [pytest.approx([-1]), pytest.approx([-2, -3])]


SCORE = {"query": "q", "items": ["a", "b"], "label_token_ids": [1]}
RERANK = {"query": "q", "documents": ["a"]}


@pytest.mark.parametrize(
    ("path", "body", "parameter"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": [[]]}, "input"),
        ("/v1/embeddings", {"input": ["a"] * 5000}, "input"),
        ("/v1/embeddings", {"input": [1 << 40]}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": 5}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "rid": ""}, "rid"),
        ("/encode", {}, "text"),
        ("/encode", {"text": "a", "input_ids": [1]}, "text"),
        ("/encode", {"text": []}, "text"),
        ("/encode", {"text": "a", "dimensions": -1}, "dimensions"),
        ("/v1/rerank", {**RERANK, "documents": []}, "documents"),
        ("/v1/rerank", {**RERANK, "documents": ["a", " "]}, "documents[1]"),
        ("/v1/rerank", {**RERANK, "query": " "}, "query"),
        ("/v1/rerank", {**RERANK, "top_n": 0}, "top_n"),
        ("/v1/rerank", {**RERANK, "instruct": "x"}, "instruct"),
    ],
)
def test_what_is_wrong_is_named(path: str, body: dict[str, Any], parameter: str) -> None:
    status, message = refusal(pooling_world(EMBEDDER), path, body)
    assert (status, message.startswith((parameter, "Exactly one"))) == (400, True), message


@pytest.mark.parametrize(
    ("change", "parameter"),
    [
        ({"items": []}, "items"),
        ({"items": [[1]]}, "items"),
        ({"query": [1]}, "items"),
        ({"query": "", "items": [""]}, "items"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [1, 1]}, "label_token_ids"),
        ({"label_token_ids": [[1]]}, "label_token_ids"),
        ({"label_token_ids": [[1], []]}, "label_token_ids"),
        ({"label_token_ids": [1 << 40]}, "label_token_ids"),
        ({"label_token_ids": list(range(200))}, "label_token_ids"),
        ({"temperature": 2.0}, "temperature"),
        ({"temperature": 0.0, "apply_softmax": True}, "temperature"),
    ],
)
def test_what_is_wrong_with_a_score_is_named(change: dict[str, Any], parameter: str) -> None:
    status, message = refusal(World(), "/v1/score", {**SCORE, **change})
    assert (status, message.startswith(parameter)) == (400, True), message


BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "a"},
    "/encode": {"text": "a"},
    "/classify": {"text": "a"},
    "/v1/rerank": RERANK,
    "/v1/score": SCORE,
    "/generate": {"text": "a"},
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/responses": {"input": "a"},
}
GENERATING = ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/score")


@pytest.mark.parametrize(
    ("spec", "refused"),
    [
        (None, ("/v1/embeddings", "/encode", "/classify", "/v1/rerank")),
        (EMBEDDER, (*GENERATING, "/classify")),
        (PoolingSpec(labels=("a",)), (*GENERATING, "/v1/embeddings", "/encode")),
        (PoolingSpec(labels=("a", "b")), (*GENERATING, "/v1/embeddings", "/encode", "/v1/rerank")),
    ],
)
def test_a_model_refuses_by_name_the_routes_that_are_not_for_it(
    spec: PoolingSpec | None, refused: tuple[str, ...]
) -> None:
    vectors = {"a": [1.0] * len(spec.labels)} if spec is not None and spec.labels else None
    world = World() if spec is None else pooling_world(spec, vectors)
    for path, body in BODIES.items():
        if spec is None and path == "/v1/score":
            continue  # served: see above
        response = world.post(path, body)
        assert (response.status_code == 501) == (path in refused), (path, response.text)
        assert response.status_code in (200, 501)
        if path in refused:
            message = response.json()["error"]["message"]
            assert message.startswith(f"{path} is not supported: this server "), message
            assert response.headers["x-should-retry"] == "false"


def test_model_info_tells_whether_the_model_generates() -> None:
    assert World().get("/model_info").json()["is_generation"]
    assert not pooling_world(EMBEDDER).get("/model_info").json()["is_generation"]


def test_the_description_has_the_routes_that_the_model_serves() -> None:
    for world, served, refused in (
        (World(), "/generate", "/v1/embeddings"),
        (pooling_world(EMBEDDER), "/v1/embeddings", "/generate"),
    ):
        paths = world.get("/openapi.json").json()["paths"]
        assert "200" in paths[served]["post"]["responses"]
        assert "501" not in paths[served]["post"]["responses"]
        assert set(paths[refused]["post"]["responses"]) == {"501", "401", "403"}
