"""Weights as a server's ranks hold them, saved by `save_sharded_model`: the index of such a folder. No torch.

    sharded_state.json                       how the weights were divided and stored
    model-rank-0-part-0.safetensors, ...     the tensors of each rank, under their names in the rank's own model
    config.json, tokenizer.json, ...         copied from the folder that the server began with

The index is written last, so a folder without it is not complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Final

from srt.server_args import ServerArgs
from srt.utils.checkpoint import HUB_PATTERNS, SHARDED_INDEX, TensorHeader, is_sharded, read_safetensors_headers
from srt.utils.model_config import ModelConfig
from srt.utils.model_error import ModelError
from srt.utils.quantization import QUANTIZING

LOAD_FORMAT: Final = "sharded_state"
FORMAT_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class ShardedIndex:
    """How saved weights are divided and stored. A server can load them if its own index is the same."""

    tp_size: int
    pp_size: int
    ep_size: int
    pp_layer_partition: tuple[int, ...]
    dtype: str
    quantization: str | None
    model: str
    """A hash of the configuration without what leaves weights as they are."""
    packed_for: str = ""
    """The CPU whose layout 4-bit weights have; empty if any CPU can read the weights."""

    @classmethod
    def of(cls, args: ServerArgs, config: ModelConfig) -> ShardedIndex:
        """Return the index of what a server with these options has; ModelError if its weights cannot be saved or loaded so."""
        if config.implementation == "transformers" or config.is_encoder:
            raise ModelError(
                f"Weights are saved by rank for layers of ours only, not for {config.architecture}, which the library transformers"
                " runs."
            )
        dtype = config.torch_dtype if args.dtype == "auto" else args.dtype
        # Neither changes the weights: a checkpoint's own type is converted to `dtype`.
        plain = replace(config, torch_dtype="", context_length=0, sampling_defaults={})
        layout = args.tp_size, args.pp_size, args.ep_size, tuple(args.pp_layer_partition)
        quantization = (
            args.quantization if args.quantization in QUANTIZING else None
        )  # else it says what the checkpoint is
        return cls(*layout, dtype, quantization, plain.config_hash())

    def write(self, folder: Path) -> None:
        """Write the index, all at once."""
        new = folder / f"{SHARDED_INDEX}.new"
        new.write_text(json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}, indent=2) + "\n", "utf-8")
        os.replace(new, folder / SHARDED_INDEX)


_OPTIONS: Final = (
    ("tp_size", "--tp"),
    ("pp_size", "--pp-size"),
    ("ep_size", "--ep-size"),
    ("pp_layer_partition", "--pp-layer-partition"),
    ("dtype", "--dtype"),
    ("quantization", "--quantization"),
)


def check_sharded(folder: Path, args: ServerArgs, config: ModelConfig, cpu_layout: str | None = None) -> None:
    """Raise ModelError, with what to do, if a server with these options cannot load what is saved in the folder.

    `cpu_layout` is the layout of 4-bit weights on this CPU; None: it is not known here.
    """
    here, saved = ShardedIndex.of(args, config), _read_index(folder)
    for name, option in _OPTIONS:
        then, now = getattr(saved, name), getattr(here, name)
        if then != now:
            raise ModelError(
                f"The weights in {folder} were saved with {option} {_shown(then)}, not {_shown(now)}: start the server with the same"
                " options, or save them anew."
            )
    if saved.model != here.model:
        raise ModelError(
            f"The weights in {folder} were saved of another model than its config.json and the options describe: save them anew."
        )
    if cpu_layout is not None and saved.packed_for not in ("", cpu_layout):
        raise ModelError(
            f"The 4-bit weights in {folder} were packed for {saved.packed_for}, and this server has {cpu_layout}: save them anew here."
        )


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _read_index(folder: Path) -> ShardedIndex:
    if not is_sharded(folder):
        raise ModelError(
            f"{folder} has no {SHARDED_INDEX}: --load-format {LOAD_FORMAT} reads what save_sharded_model has saved completely."
        )
    path = folder / SHARDED_INDEX
    try:
        found = json.loads(path.read_text("utf-8"))
        version = found.pop("format_version")
        if version == FORMAT_VERSION:
            return ShardedIndex(**{**found, "pp_layer_partition": tuple(found["pp_layer_partition"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} is not an index of saved weights: save them anew.") from error
    raise ModelError(
        f"{path} is of version {str(version)[:20]} of the format, and this server reads version {FORMAT_VERSION}: save the weights anew."
    )


def part_of(folder: Path, rank: int, part: int) -> Path:
    """Return the name of one file of a rank."""
    return folder / f"model-rank-{rank}-part-{part}.safetensors"


def parts_of(folder: Path, rank: int) -> Iterator[Path]:
    """Yield the files of a rank, in their order. ModelError if it has none."""
    for number in count():
        file = part_of(folder, rank, number)
        if not file.is_file():
            if number == 0:
                raise ModelError(f"{folder} lacks {file.name}: copy all files of the folder, or save the weights anew.")
            return
        yield file


def read_part_headers(folder: Path, rank: int) -> dict[str, TensorHeader]:
    """Return the header of every tensor of a rank, by name. Reads no data."""
    return {header.name: header for file in parts_of(folder, rank) for header in read_safetensors_headers(file)}


def files_besides_weights(folder: Path) -> list[Path]:
    """Return the paths in a checkpoint's folder, relative to it, of what a server reads besides the weights."""
    patterns = (one for one in HUB_PATTERNS if "safetensors" not in one and one != SHARDED_INDEX)
    return sorted({file.relative_to(folder) for one in patterns for file in folder.glob(one) if file.is_file()})
