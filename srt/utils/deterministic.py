"""The options that --enable-deterministic-inference cannot be combined with, since the same bits were not shown for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OPTION = "--enable-deterministic-inference"


def option_obstacle(values: Mapping[str, Any]) -> str | None:
    """Return a sentence about an option that the deterministic mode does not support; None if there is none. `values` are the options."""
    if not values["enable_deterministic_inference"]:
        return None
    unsupported = {
        "--speculative-algorithm": values["speculative_algorithm"] is not None,
        "--enable-torch-compile": values["enable_torch_compile"],
        "--quantization": values["quantization"] is not None,
        "--kv-cache-dtype": values["kv_cache_dtype"] != "auto",
        "--model-impl transformers": values["model_impl"] == "transformers",
        "--is-embedding": values["is_embedding"],
        "--dtype float16": values["dtype"] == "float16",
        "--attention-backend": values["attention_backend"] is not None,
        "--prefill-attention-backend": values["prefill_attention_backend"] is not None,
        "--decode-attention-backend": values["decode_attention_backend"] is not None,
    }
    name = next((name for name, is_asked_for in unsupported.items() if is_asked_for), None)
    return None if name is None else f"{OPTION} does not support {name}: leave one of the two out."
