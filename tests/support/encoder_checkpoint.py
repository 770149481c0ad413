"""Small random encoders of the library transformers, with a tokenizer that puts special tokens around texts and pairs of texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CLS, SEP, PAD, UNKNOWN = "<s>", "</s>", "<pad>", "<unk>"
SPECIAL = (CLS, PAD, SEP, UNKNOWN)  # by id: <pad> is 1, as in RoBERTa
USUAL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "type_vocab_size": 2,
    "dtype": "float32",
}
ENCODER_TYPES: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 32},
    "bert": {},
    "camembert": {"type_vocab_size": 1},
    "distilbert": {"dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4},
    "electra": {"embedding_size": 32},
    "mpnet": {},
    "modernbert": {"cls_token_id": 0, "sep_token_id": 2, "local_attention": 16, "global_attn_every_n_layers": 2},
    "roberta": {"type_vocab_size": 1},
    "xlm-roberta": {"type_vocab_size": 1},
}
"""For each model type what its configuration has beside, or instead of, what is usual."""


def write_encoder(folder: Path, model_type: str, labels: Sequence[str] = (), kind: str = "Model") -> None:
    """Write an encoder with random weights: a classifier if there are labels, and otherwise as the library saves the class `kind`."""
    import torch
    import transformers

    fields = {**USUAL, **ENCODER_TYPES[model_type]}
    if labels:
        fields |= {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
        kind = "ForSequenceClassification"
    config = transformers.AutoConfig.for_model(model_type, **fields)
    base = transformers.AutoModel._model_mapping[type(config)].__name__.removesuffix("Model")
    model = getattr(transformers, base + kind)(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.ndim == 1 else noise / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *alphabet))}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}", pair=f"{CLS} $A {SEP} $B:1 {SEP}:1", special_tokens=[(CLS, 0), (SEP, 2)]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, cls_token=CLS, sep_token=SEP, pad_token=PAD, unk_token=UNKNOWN
    )
    fast.save_pretrained(folder)


def encoder_outputs(folder: Path, texts: Sequence[str | tuple[str, str]], what: str) -> NDArray[np.float32]:
    """Return what the library computes of each text or pair alone: its pooling `cls` or `mean`, or a classifier's `scores`."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    kind = transformers.AutoModelForSequenceClassification if what == "scores" else transformers.AutoModel
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    tells_apart = what == "scores" and model.config.model_type in ("albert", "bert", "electra")
    found = []
    for text in texts:
        pair = (text,) if isinstance(text, str) else text
        given = tokenizer(*pair, return_tensors="pt", return_token_type_ids=tells_apart)
        with torch.inference_mode():
            output = model(**given)
        states = output.logits[0] if what == "scores" else output.last_hidden_state[0]
        found.append(states.mean(dim=0) if what == "mean" else states[0] if what == "cls" else states)
    return torch.stack(found).numpy()
