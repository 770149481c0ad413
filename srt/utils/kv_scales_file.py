"""Read the file of --quantization-param-path: scales of an fp8 KV memory, as vLLM and SGLang read them, without torch.

    {"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.023, "1": 0.031}}}}

`scaling_factor` has an object for each rank, which has a number for each layer. It is the factor of both keys and values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from srt.utils.model_error import ModelError

_DTYPES: Final = ("float8_e4m3fn", "fp8_e4m3")


def read_scales_file(path: str | Path, model_type: str, num_layers: int, tp_size: int) -> list[list[float]]:
    """Return the factors of each rank's layers. ModelError says what is wrong with the file."""
    content = _read_object(Path(path))
    stated = content.get("model_type")
    if stated not in (None, model_type):
        raise _refused(path, f"it is for a model of type {stated!r}, not {model_type!r}")
    memory = content.get("kv_cache")
    if not isinstance(memory, dict) or not isinstance(memory.get("scaling_factor"), dict):
        raise _refused(path, "it has no kv_cache with a scaling_factor")
    if memory.get("dtype") not in _DTYPES:
        raise _refused(path, f"its dtype is {memory.get('dtype')!r}, but only {_DTYPES[0]!r} is supported")
    factors: dict[str, Any] = memory["scaling_factor"]
    if sorted(factors) != sorted(map(str, range(tp_size))):
        raise _refused(path, f"it has factors for {len(factors)} ranks, but --tp is {tp_size}")
    return [_of_rank(path, rank, factors[str(rank)], num_layers) for rank in range(tp_size)]


def _of_rank(path: str | Path, rank: int, layers: object, num_layers: int) -> list[float]:
    found: Mapping[str, Any] = layers if isinstance(layers, dict) else {}
    if len(found) != num_layers:
        raise _refused(path, f"it has factors for {len(found)} layers of rank {rank}, but the model has {num_layers}")
    factors = []
    for layer in range(num_layers):
        factor = found.get(str(layer))
        is_number = isinstance(factor, int | float) and not isinstance(factor, bool) and math.isfinite(factor)
        if factor is None or not is_number or factor <= 0:
            raise _refused(path, f"the factor of layer {layer} of rank {rank} must be positive, not {factor!r}")
        factors.append(float(factor))
    return factors


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise _refused(path, f"it cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"it is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise _refused(path, "it does not hold an object")
    return content


def _refused(path: str | Path, reason: str) -> ModelError:
    return ModelError(f"--quantization-param-path {path}: {reason}.")
