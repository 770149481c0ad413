"""How an embedding model or a classifier makes one vector of a text, as its checkpoint says. No torch.

sentence-transformers writes modules.json, which names the steps behind the model, and a folder with a config.json for each of them.
Checkpoints of transformers alone say only by their architecture what they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from srt.utils.config_values import mapping, positive_int, shown
from srt.utils.families.encoders import encoder_of
from srt.utils.model_error import ModelError

Pooling = Literal["last", "mean", "cls"]
MODULES_FILE = "modules.json"
CLASSIFIER, BARE, GENERATOR = "ForSequenceClassification", "Model", "ForCausalLM"
WITH_HEAD = "LMHeadModel"  # GPT-2 and others of its time, which generate text

_MODES: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_MODE_KEYS: dict[str, Pooling] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """What becomes of the hidden states of a text."""

    pooling: Pooling = "last"
    """The states that count: those of the last token, the mean over all tokens, or those of the first token."""
    normalize: bool = False
    """Whether the vector is scaled to length 1."""
    labels: tuple[str, ...] = ()
    """A classifier's classes, each of which gets a score. Empty: the vector itself is the answer, an embedding."""

    @property
    def is_classifier(self) -> bool:
        return bool(self.labels)

    @property
    def can_use_prefixes(self) -> bool:
        """Whether a text may begin behind a cached prefix. Only the last token's states do not depend on computing the others."""
        return self.pooling == "last"


def generating_architecture(architecture: str) -> str:
    """Return the architecture with the same layers that generates text, if this one is a classifier's or has no head at all."""
    for ending in (CLASSIFIER, BARE):
        if architecture.endswith(ending):
            return architecture.removesuffix(ending) + GENERATOR
    return architecture


def read_pooling(folder: Path, architecture: str, raw: Mapping[str, Any], *, is_asked_for: bool) -> PoolingSpec | None:
    """Return how the model pools; None for a model that generates text.

    Checkpoints with sentence-transformers' modules.json, classifiers and models without a head pool in any case, others if they are
    asked to. Raises ModelError for steps that are not supported.
    """
    modules_file = folder / MODULES_FILE
    usual: Pooling = "last" if encoder_of(architecture) is None else "cls"
    if architecture.endswith(CLASSIFIER):
        spec = PoolingSpec(usual, labels=_labels(raw))
    elif modules_file.is_file():
        spec = _spec_of_modules(folder, _read(modules_file))
    elif (architecture.endswith(BARE) and not architecture.endswith(WITH_HEAD)) or is_asked_for:
        spec = PoolingSpec(usual, normalize=True)
    else:
        return None
    if raw.get("is_causal") is False:
        raise ModelError(
            "config.json: is_causal false is not supported: this server embeds with models whose tokens see only those before them."
        )
    return spec


def _labels(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the classes. transformers leaves them out of config.json if there are two without names."""
    names = mapping(raw, "id2label")
    count = positive_int(raw, "num_labels", len(names) or 2)
    return tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(count))


def _spec_of_modules(folder: Path, modules: Any) -> PoolingSpec:
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{folder / MODULES_FILE} must hold a list of objects.")
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    for kind in kinds:
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise ModelError(
                f"{MODULES_FILE}: the step {shown(kind)} is not supported, only Transformer, Pooling and Normalize."
            )
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise ModelError(
            f"{MODULES_FILE}: the steps {', '.join(kinds)} are not supported, only Transformer, Pooling and then perhaps Normalize."
        )
    if modules[0].get("path"):
        raise ModelError(
            f"{MODULES_FILE}: the model must lie in the folder itself, not in {shown(modules[0]['path'])}."
        )
    path = str(modules[1].get("path", ""))
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise ModelError(f"{MODULES_FILE}: the path {shown(path)} leads out of the checkpoint.")
    return PoolingSpec(_pooling(_read(folder / path / "config.json"), f"{path}/config.json"), "Normalize" in kinds)


def _pooling(config: Any, name: str) -> Pooling:
    if not isinstance(config, dict):
        raise ModelError(f"{name} must hold a JSON object.")
    stated = config.get("pooling_mode")
    asked = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
    if isinstance(stated, str) and stated in _MODES and not asked:
        return _MODES[stated]
    if stated is None and len(asked) == 1 and asked[0] in _MODE_KEYS:
        return _MODE_KEYS[asked[0]]
    named = ", ".join(asked) or shown(stated)
    raise ModelError(f"{name}: the pooling {named} is not supported, only one of {', '.join(_MODE_KEYS)}.")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}.") from error
