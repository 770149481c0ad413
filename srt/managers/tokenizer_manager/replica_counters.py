"""The counters of several replicas as those of one engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from srt.protocol.messages import Scalar

# Values that are no counts: the mean of all replicas stands for them.
AVERAGED = ("expected_share_of_max_new_tokens", "decode_step_us", "prompt_token_ns")
AVERAGED_OF_LAYERS = ("distinct_experts_of_layer_", "peak_load_of_layer_")  # beginnings of names


def combined(replicas: Sequence[Mapping[str, Scalar]]) -> dict[str, Scalar]:
    """Return the counters of all replicas in one: counts are added up, a claim holds if it holds for one replica."""
    if len(replicas) == 1:
        return dict(replicas[0])
    names = dict.fromkeys(name for one in replicas for name in one)
    return {name: _combined(name, [one[name] for one in replicas if name in one]) for name in names}


def _combined(name: str, values: list[Scalar]) -> Scalar:
    numbers = [value for value in values if isinstance(value, int | float)]
    if len(numbers) < len(values) or name == "page_size":
        return values[0]
    if isinstance(values[0], bool):
        return any(values)
    if name.startswith("max_") or name == "row_tokens":
        return max(numbers)
    return sum(numbers) / len(numbers) if _is_averaged(name) else sum(numbers)


def _is_averaged(name: str) -> bool:
    return name in AVERAGED or name.startswith(AVERAGED_OF_LAYERS)
