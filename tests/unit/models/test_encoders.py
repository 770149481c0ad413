"""Encoders give the vectors and scores that the library transformers gives, one text at a time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from srt.distributed.parallel_state import TensorParallel
from srt.managers.supervisor.preflight import check_model
from srt.model_loader.loader import LoadConfig, get_model_loader
from srt.models.library.encoder import LibraryEncoder
from srt.server_args import parse_args
from srt.utils.errors import StartError
from srt.utils.families.encoders import ENCODERS
from srt.utils.model_config import ModelConfig
from srt.utils.model_error import ModelError
from srt.utils.tokenizer import load_tokenizer
from tests.support.encoder_checkpoint import ENCODER_TYPES, encoder_outputs, write_encoder
from tests.support.pooling_checkpoint import write_modules

TEXTS = ["Hello", "A longer text with some words", "", "日本語", "x" * 120]


def load(folder: Path) -> LibraryEncoder:
    config = ModelConfig.from_folder(folder)
    cpu = torch.device("cpu")
    tp = TensorParallel(0, 1, None, cpu)
    library = LibraryEncoder.build(config, folder, {}, tp, torch.float32)
    loader = get_model_loader(LoadConfig())
    model = loader.load_model(config, folder, tp, torch.float32, cpu, lambda done, total: None, model=library)
    assert isinstance(model, LibraryEncoder)
    return model


def encode(model: LibraryEncoder, texts: list[list[int]]) -> np.ndarray:
    with torch.inference_mode():
        return model.encode([torch.tensor(ids) for ids in texts]).numpy()


@pytest.mark.parametrize("model_type", ENCODER_TYPES)
def test_vectors_equal_the_librarys(model_type: str, tmp_path: Path) -> None:
    write_encoder(tmp_path, model_type)
    tokenizer = load_tokenizer(tmp_path)
    found = encode(load(tmp_path), [tokenizer.encode(text) for text in TEXTS])
    np.testing.assert_allclose(found, encoder_outputs(tmp_path, TEXTS, "cls"), atol=1e-4)


@pytest.mark.parametrize("model_type", ENCODER_TYPES)
def test_scores_of_pairs_and_texts_equal_the_librarys(model_type: str, tmp_path: Path) -> None:
    write_encoder(tmp_path, model_type, ["yes", "no", "perhaps"])
    tokenizer, model = load_tokenizer(tmp_path), load(tmp_path)
    pairs = [(TEXTS[0], text) for text in (TEXTS[1], TEXTS[3])]
    texts = [*(tokenizer.encode_pair(*pair) for pair in pairs), *map(tokenizer.encode, TEXTS)]
    np.testing.assert_allclose(encode(model, texts), encoder_outputs(tmp_path, [*pairs, *TEXTS], "scores"), atol=1e-4)


def test_a_checkpoint_saved_with_another_head_embeds_by_the_mean_if_it_says_so(tmp_path: Path) -> None:
    write_encoder(tmp_path, "mpnet", kind="ForMaskedLM")
    write_modules(tmp_path, "mean", normalize=False)
    tokenizer, model = load_tokenizer(tmp_path), load(tmp_path)
    found = encode(model, [tokenizer.encode(text) for text in TEXTS])
    np.testing.assert_allclose(found, encoder_outputs(tmp_path, TEXTS, "mean"), atol=1e-4)


def test_every_encoder_is_tested() -> None:
    tested = {name.replace("-", "") for name in ENCODER_TYPES}
    assert tested == {name.lower() for name in ENCODERS}


def test_an_encoder_that_shall_generate_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertForMaskedLM"]}))
    with pytest.raises(ModelError, match="is an encoder, which generates no text"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("option", [["--tp", "2"], ["--attention-backend", "torch_native"]])
def test_options_without_use_for_an_encoder_are_refused(option: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["BertModel"], "vocab_size": 9, "hidden_size": 8, "max_position_embeddings": 64}'
    )
    args = parse_args(["--model-path", str(tmp_path), *option])
    with pytest.raises(StartError, match=f"{option[0]} is not supported for encoders such as BertModel"):
        check_model(args)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pad_token_id": "one"}, "pad_token_id must be a token id"),
        ({"pad_token_id": -9}, "pad_token_id must be a token id"),
        ({"hidden_act": "no such function"}, "it cannot be built"),
        ({"num_attention_heads": 0}, "it cannot be built"),
    ],
)
def test_a_config_that_cannot_be_right_is_refused_in_a_sentence(
    changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    write_encoder(tmp_path, "xlm-roberta")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ModelError, match=words):
        load(tmp_path)
