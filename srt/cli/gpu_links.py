"""Say which GPUs of a host write each other's memory, and over what. For `srt doctor`. No torch."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Final

SMI_TIMEOUT_S: Final = 20.0
_WAYS: Final = {
    "PIX": "over PCIe, behind one switch",
    "PXB": "over PCIe, through several switches",
    "PHB": "over PCIe, through the processor",
    "NODE": "over PCIe, through several host bridges of one processor",
    "SYS": "over PCIe and the connection between processors",
}
"""How two GPUs are connected, by the code that `nvidia-smi topo -m` prints for the pair. NVLink has a code for each number of links."""

Pair = tuple[int, int]


def describe_links(uuids: Sequence[str], peers: Sequence[Sequence[int]] | None, ways: dict[Pair, str]) -> Iterator[str]:
    """Yield sentences about the links between GPUs, one for all pairs that are alike.

    `uuids` are those of the GPUs as PyTorch numbers them, and `peers` lists the pairs that CUDA lets access each other; None: it did
    not say. `ways` is what `read_ways` returns.
    """
    pairs = list(combinations(range(len(uuids)), 2))
    if not pairs or peers is None:
        yield "unknown: PyTorch did not say" if pairs else "there are no two GPUs"
        return
    accessible = {(one[0], one[1]) for one in peers}
    alike: dict[str, list[Pair]] = {}
    for pair in pairs:
        way = ways.get(pair)
        if pair in accessible:
            what = f"can access each other's memory{'' if way is None else ', ' + way}"
            rest = ": ranks (--tp) and stages (--pp-size) on them may exchange data through it"
        else:
            what = f"cannot access each other's memory{'' if way is None else ' (they are connected ' + way + ')'}"
            rest = ": sums of --tp go through NCCL, and --pp-size is refused"
        alike.setdefault(what + rest, []).append(pair)
    for sentence, its_pairs in alike.items():
        yield f"{_names(its_pairs, len(uuids))} {sentence}"


def read_ways(uuids: Sequence[str]) -> dict[Pair, str]:
    """Ask `nvidia-smi` over what each pair of GPUs is connected. Without it this is empty; a pair that it does not list is left out."""
    if not any(combinations(uuids, 2)):
        return {}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        listed = _smi("--query-gpu=index,uuid", "--format=csv,noheader")
        return ways_of(uuids, listed, _smi("topo", "-m"))
    return {}


def ways_of(uuids: Sequence[str], listed: str, matrix: str) -> dict[Pair, str]:
    """Return the way between each pair of GPUs by the two outputs of `nvidia-smi`, whose numbers may differ from PyTorch's."""
    rows = [line.split(",") for line in listed.splitlines() if line.count(",") == 1]
    number_of = {uuid.strip().removeprefix("GPU-"): int(index) for index, uuid in rows if index.strip().isdigit()}
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in matrix.splitlines()]
    header = next((words for words in lines if words[:1] == ["GPU0"] and "X" not in words), [])
    columns = [name for name in header if re.fullmatch(r"GPU\d+", name)]
    codes = {
        (words[0], column): code
        for words in lines
        if words and words is not header
        for column, code in zip(columns, words[1:], strict=False)
    }
    ways = {}
    for pair in combinations(range(len(uuids)), 2):
        ends = [number_of.get(uuids[gpu].removeprefix("GPU-")) for gpu in pair]
        way = _way_of(codes.get((f"GPU{ends[0]}", f"GPU{ends[1]}"), ""))
        if way is not None:
            ways[pair] = way
    return ways


def _way_of(code: str) -> str | None:
    links = re.fullmatch(r"NV(\d+)", code)
    return f"over NVLink ({links[1]} links)" if links else _WAYS.get(code)


def _names(pairs: list[Pair], num_gpus: int) -> str:
    if len(pairs) == num_gpus * (num_gpus - 1) // 2:
        return "GPUs 0 and 1" if num_gpus == 2 else f"all {num_gpus} GPUs"
    if len(pairs) == 1:
        return "GPUs {} and {}".format(*pairs[0])
    return "the GPUs of each pair " + ", ".join(f"{one}-{other}" for one, other in pairs)


def _smi(*options: str) -> str:
    return subprocess.run(
        ["nvidia-smi", *options], capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True
    ).stdout
