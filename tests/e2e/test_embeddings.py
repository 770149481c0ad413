"""A real server with an embedding model, asked by the official Python client, and others with a classifier and a model that generates."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from numpy.typing import NDArray

import srt
from srt.managers.tokenizer_manager.api_types import RequestError
from srt.utils.tokenizer import load_tokenizer
from tests.support.checkpoints import CheckpointFactory
from tests.support.encoder_checkpoint import encoder_outputs, write_encoder
from tests.support.oracle import Oracle
from tests.support.pooling_checkpoint import reference_scores, reference_vectors, write_classifier, write_embedder
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.e2e

TEXTS = ["Hello", "A longer text, which takes several chunks of its tokens: " * 3, "日本語 🙂", "x"]
FEW = ["--port", "0", "--device", "cpu", "--dtype", "float32", "--max-total-tokens", "16384"]


@pytest.fixture(scope="module")
def embedder(checkpoint: CheckpointFactory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "embedder"
    return write_embedder(folder, checkpoint("qwen3"), "mean", bare=True)


@pytest.fixture(scope="module")
def server(embedder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    words = ["--model-path", str(embedder), "--served-model-name", "embedder", *FEW, "--chunked-prefill-size", "8"]
    with ServerProcess("srt.launch_server", words, tmp_path_factory.mktemp("embedder")) as process:
        process.wait_ready()
        yield process
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.lines


def expected_of(folder: Path, texts: list[str]) -> NDArray[np.float32]:
    ids = [load_tokenizer(folder).encode(text) for text in texts]
    vectors = reference_vectors(folder, ids, "mean")
    normed: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return normed


def test_the_official_client_gets_embeddings(server: ServerProcess, embedder: Path) -> None:
    """It asks for base64 unless it is told otherwise."""
    expected = expected_of(embedder, TEXTS)
    with openai.OpenAI(base_url=server.wait_ready() + "/v1", api_key="none", max_retries=0, timeout=60) as api:
        for options in ({}, {"encoding_format": "float"}):
            answer = api.embeddings.create(model="embedder", input=TEXTS, **options)  # type: ignore[arg-type]
            np.testing.assert_allclose([one.embedding for one in answer.data], expected, atol=1e-4)
        short = api.embeddings.create(model="embedder", input=TEXTS[0], dimensions=16)
        cut = expected[0][:16] / np.linalg.norm(expected[0][:16])
        np.testing.assert_allclose(short.data[0].embedding, cut, atol=1e-4)
        assert answer.usage.prompt_tokens == sum(len(load_tokenizer(embedder).encode(text)) for text in TEXTS)
        with pytest.raises(openai.InternalServerError, match="embeds texts, and generates none"):
            api.completions.create(model="embedder", prompt="Hello")


def test_health_and_model_info_of_an_embedding_model(server: ServerProcess) -> None:
    with httpx.Client(base_url=server.wait_ready(), timeout=60) as client:
        assert client.get("/health_generate").status_code == 200
        assert client.get("/model_info").json()["is_generation"] is False
        info = client.get("/server_info?deep=true").json()
        assert (info["is_embedding"], info["disable_radix_cache"]) == (True, True)


def test_texts_in_the_middle_when_a_worker_dies_get_their_embeddings(server: ServerProcess, embedder: Path) -> None:
    texts = [f"{number} " + "many words " * 400 for number in range(4)]
    answers: list[Any] = []
    with httpx.Client(base_url=server.wait_ready(), timeout=120) as client:
        body = {"input": texts}
        asking = threading.Thread(target=lambda: answers.append(client.post("/v1/embeddings", json=body).json()))
        asking.start()
        while not counters(client)["num_running"]:
            assert asking.is_alive(), "they were ready before the worker could die"
        assert client.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
        assert counters(client)["num_running"] > 0
        (worker,) = [one for one in server.started() if "srt.managers.tp_worker" in one.cmdline()]
        worker.kill()
        while (
            client.post("/continue_generation").status_code != 200
        ):  # the pause outlives the engine, which is replaced first
            assert asking.is_alive(), "they ended in a pause"
        asking.join()
    vectors = [one["embedding"] for one in answers[0]["data"]]
    np.testing.assert_allclose(vectors, expected_of(embedder, texts), atol=1e-4)


def counters(client: httpx.Client) -> Any:
    return client.get("/server_info").json()["internal_states"][0]


def test_a_classifier_scores_and_ranks(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    folder = write_classifier(tmp_path / "model", checkpoint("llama"), ["fits"])
    tokenizer = load_tokenizer(folder)
    with srt.Runtime(model_path=str(folder), device="cpu", dtype="float32", max_total_tokens=4096) as runtime:
        scores = [one["embedding"] for one in runtime.classify(TEXTS)]
        expected = reference_scores(folder, [tokenizer.encode(text) for text in TEXTS])
        np.testing.assert_allclose(scores, expected, atol=1e-4)
        ranked = runtime.rerank("What?", TEXTS, top_n=3)
        pairs = reference_scores(folder, [tokenizer.encode_pair("What?", text) for text in TEXTS])[:, 0]
        assert [one["index"] for one in ranked] == np.argsort(-pairs)[:3].tolist()
        np.testing.assert_allclose(ranked[0]["score"], 1 / (1 + np.exp(-pairs.max())), atol=1e-4)
        with pytest.raises(RequestError, match="use /classify"):
            runtime.encode("x")


def test_scores_of_labels_equal_the_models_probabilities(checkpoint: CheckpointFactory) -> None:
    folder = checkpoint("qwen3")
    query, items, labels = [5, 6, 7], [[8, 9], [10]], [1, 2, 3]
    with srt.Runtime(model_path=str(folder), device="cpu", dtype="float32", max_total_tokens=4096) as runtime:
        found = runtime.score(query, items, labels)["scores"]
        shares = runtime.score(query, items, labels, apply_softmax=True, item_first=True)["scores"]
        with pytest.raises(RequestError, match="start one with --is-embedding"):
            runtime.encode("x")
    oracle = Oracle(folder)
    expected = [np.exp(oracle.logprobs(query + item)[-1][labels]) for item in items]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    first = [np.exp(oracle.logprobs(item + query)[-1][labels]) for item in items]
    np.testing.assert_allclose(shares, [row / row.sum() for row in first], atol=1e-5)


def test_an_encoder_embeds_texts_in_chunks_and_batches(tmp_path: Path) -> None:
    write_encoder(tmp_path, "xlm-roberta")
    words = ["--model-path", str(tmp_path), "--served-model-name", "e", *FEW, "--chunked-prefill-size", "8"]
    texts = [
        *TEXTS[:1],
        "Twenty words " * 5,
        *TEXTS[2:],
        "y" * 126,
    ]  # the last with as many tokens as there are positions
    with ServerProcess("srt.launch_server", words, tmp_path) as process, httpx.Client(timeout=60) as client:
        url = process.wait_ready()
        answer = client.post(f"{url}/v1/embeddings", json={"input": texts}).json()
        vectors = encoder_outputs(tmp_path, texts, "cls")
        expected = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        np.testing.assert_allclose([one["embedding"] for one in answer["data"]], expected, atol=1e-4)
        assert client.post(f"{url}/v1/embeddings", json={"input": "y" * 127}).status_code == 400
        assert client.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 501


def test_an_encoder_scores_and_ranks_pairs(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert", ["fits"])
    with srt.Runtime(model_path=str(tmp_path), device="cpu", dtype="float32", max_total_tokens=4096) as runtime:
        scores = [one["embedding"] for one in runtime.classify([TEXTS[0], TEXTS[2]])]
        np.testing.assert_allclose(scores, encoder_outputs(tmp_path, [TEXTS[0], TEXTS[2]], "scores"), atol=1e-4)
        documents = [TEXTS[0], TEXTS[2], TEXTS[3]]
        ranked = runtime.rerank("What?", documents)
        pairs = encoder_outputs(tmp_path, [("What?", text) for text in documents], "scores")[:, 0]
        assert [one["index"] for one in ranked] == np.argsort(-pairs).tolist()
        np.testing.assert_allclose(ranked[0]["score"], 1 / (1 + np.exp(-pairs.max())), atol=1e-4)
