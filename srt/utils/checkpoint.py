"""Find a checkpoint and read the headers of its files. This works without torch, so broken files are refused early in a start."""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from srt.utils.model_error import ModelError
from srt.utils.torch_file import read_torch_file

SHIPPED_MODELS = Path(__file__).resolve().parent.parent / "assets" / "models"
DEFAULT_MODEL = "tiny"  # the shipped model used when none is named

SHARDED_INDEX = "sharded_state.json"
"""In a folder with weights as the ranks of a server hold them (sharded_state.py)."""
HUB_PATTERNS = (
    SHARDED_INDEX,
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "modules.json",
    "*_Pooling/config.json",
)
"""Files read from a folder and downloaded from a hub repository: no .bin duplicates of the weights, no training state."""
TORCH_PATTERNS = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
"""Files read and downloaded besides where there are no safetensors files."""

FLOATS = ("F64", "F32", "F16", "BF16")
"""Element types, by their safetensors name, that are converted to the model's."""
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "U8": 1, "I8": 1, "I16": 2, "I32": 4, "I64": 8}
"""Sizes of the loadable element types."""

_QUANTISED = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight", "_linear.weight")
"""How the names of the matrices end that --quantization quantises, experts' included."""
_EXPERTS = re.compile(r"\.(shared_)?experts?\.")
"""In the names of the weights of experts, and of one that every token takes."""

MAX_HEADER_BYTES = 100_000_000  # the limit of the format itself
COMPARED_BYTES = 1 << 18  # read at a time: both tensors' parts fit in a core's cache


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Type, shape and location of one tensor of a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    """Offset in the file."""
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def resolve_model_path(model_path: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """Return the folder that `--model-path` names: an existing folder, else a shipped model, else a model of the hub.

    A model of the hub is downloaded unless the local cache has it. With HF_HUB_OFFLINE it must be in the cache. ModelError says in one
    sentence what is wrong.
    """
    try:
        path = Path(model_path).expanduser()
    except RuntimeError:  # "~name" of a user without a home
        path = Path(model_path)
    if not model_path:
        raise ModelError("--model-path is empty: name a checkpoint folder, a shipped model or a hub id.")
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"--model-path {model_path} is a file; give the folder of a Hugging Face checkpoint.")
    if re.fullmatch(r"[\w.-]+", model_path) and (SHIPPED_MODELS / model_path / "config.json").is_file():
        return SHIPPED_MODELS / model_path
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", model_path):
        raise ModelError(
            f"--model-path {model_path} does not exist: name a checkpoint folder, a shipped model or a hub id such as Qwen/Qwen3-8B."
        )
    return _download(model_path, revision, download_dir)


def _download(hub_id: str, revision: str | None, download_dir: str | None) -> Path:
    """Return the local folder of a hub repository, after downloading what is missing. Without the hub, the cached folder will do."""
    # Imported here because only hub ids need it, and the import is slow.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = f"{hub_id} (revision {revision})" if revision else hub_id

    def download(patterns: tuple[str, ...]) -> str:
        return snapshot_download(hub_id, revision=revision, cache_dir=download_dir, allow_patterns=list(patterns))

    try:
        folder = download(HUB_PATTERNS)
        if not any(Path(folder).glob("*.safetensors")):
            folder = download((*HUB_PATTERNS, *TORCH_PATTERNS))
    except GatedRepoError as error:
        raise ModelError(
            f"The model {hub_id} is gated: accept its terms on the hub, then set HF_TOKEN to a token that may read it."
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"The model {hub_id} has no revision {revision}: choose another --revision.") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelError(
            f"--model-path {hub_id} is neither a folder, nor a shipped model, nor a model on the hub that can be read"
            " (for a private one set HF_TOKEN)."
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"--model-path {where} is not a folder and not complete in the local hub cache, and the hub cannot be reached:"
            " check the network, or unset HF_HUB_OFFLINE if it is set."
        ) from error
    except Exception as error:
        # Full disks, proxies, broken certificates: the error classes depend on the HTTP library, which has changed before.
        raise ModelError(f"The model {where} could not be downloaded: {_first_line(error)}.") from error
    return Path(folder)


def is_sharded(folder: str | Path) -> bool:
    """Return whether the folder has weights as the ranks of a server hold them."""
    return Path(folder, SHARDED_INDEX).is_file()


def read_headers(folder: str | Path) -> dict[str, TensorHeader]:
    """Return the header of every tensor by name, in the order of the files. Reads no data.

    Files of PyTorch (pytorch_model.bin) are read where there are no safetensors files. ModelError names a file that is missing, cut short
    or neither.
    """
    folder = Path(folder)
    if is_sharded(folder):
        raise ModelError(f"The weights in {folder} are saved by rank: read them with --load-format sharded_state.")
    headers: dict[str, TensorHeader] = {}
    files, weight_map = _weight_files(folder)
    for file in files:
        for header in _read_file_headers(file):
            twin = headers.setdefault(header.name, header)
            if twin is not header:
                raise ModelError(
                    f"The tensor {header.name} is in both {twin.file.name} and {file.name} of {folder}: remove one of the files."
                )
    for name, file_name in weight_map.items():
        if name not in headers:
            raise ModelError(
                f"{folder / file_name} lacks the tensor {name}, which the index lists: download the file anew."
            )
    return headers


def estimate_weight_bytes(
    folder: str | Path, dtype: str | None = None, quantises: bool = False, num_groups: int = 1
) -> int:
    """Return the size of the weights over all ranks: as stored, or with floats converted to `dtype` (float32, bfloat16, float16).

    If --quantization `quantises` them, the matrices of layers take a byte for each element. Groups of ranks that attend for different
    requests share the experts, and each has all other weights.
    """
    if is_sharded(folder):  # as they will be held
        return sum(h.num_bytes for file in Path(folder).glob("*.safetensors") for h in read_safetensors_headers(file))
    headers = read_headers(folder).values()
    item_bytes = 4 if dtype == "float32" else 2

    def size_of(header: TensorHeader) -> int:
        if dtype is None or header.dtype not in FLOATS:
            return header.num_bytes  # as stored; packed ones are not converted
        return header.num_elements * (1 if quantises and header.name.endswith(_QUANTISED) else item_bytes)

    return sum(size_of(header) * (1 if _EXPERTS.search(header.name) else num_groups) for header in headers)


def is_copy(one: TensorHeader, other: TensorHeader) -> bool:
    """Return whether two tensors are equal to the byte.

    Comparing two tensors of 600 MB takes 0.1 to 0.3 s if their files are in the page cache. Otherwise it takes as long as reading both
    from the disk.
    """
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(part == twin for part, twin in zip(read_parts(one), read_parts(other), strict=True))


def version_of(folder: str | Path) -> str:
    """Return a hash of the files' names, sizes and modification times, which changes if the checkpoint is changed.

    The supervisor keeps the hash of its start. Each child compares it before anything else (managers/process/child.py): if the files were
    changed, the child ends with CheckpointChanged, and the server ends with that reason instead of replacing the child.
    """
    files = sorted(
        {file for pattern in (*HUB_PATTERNS, *TORCH_PATTERNS) for file in Path(folder).glob(pattern) if file.is_file()}
    )
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the files to read, and the file of each tensor according to the index (empty without an index)."""
    for stem in ("model.safetensors", "pytorch_model.bin"):
        single, index = folder / stem, folder / f"{stem}.index.json"
        if single.is_file():
            return [single], {}
        if index.is_file():
            return _indexed_files(index)
        # Some repositories hold the same weights twice: the second copy has the layout of the authors' own code.
        others = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated"))
        if others:
            return others, {}
    raise ModelError(f"{folder} has no weights: neither safetensors files nor pytorch_model.bin.")


def _indexed_files(index: Path) -> tuple[list[Path], dict[str, str]]:
    weight_map = _read_index(index)
    files = [index.parent / name for name in dict.fromkeys(weight_map.values())]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(f"{index.parent} lacks {some(missing)}, which {index.name} lists: download the missing files.")
    return files, weight_map


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
        # A name with a folder in it could point outside the checkpoint.
        well_formed = all(Path(name).name == name for name in weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index} is not an index of tensors: {_first_line(error)}.") from error
    if not well_formed:
        raise ModelError(f"{index} is not an index of tensors: it names files outside its folder.")
    return dict(weight_map)


def _read_file_headers(file: Path) -> Iterable[TensorHeader]:
    if file.suffix == ".bin":
        return [TensorHeader(t.name, t.dtype, t.shape, file, t.start, t.num_bytes) for t in read_torch_file(file)]
    return read_safetensors_headers(file)


def read_safetensors_headers(file: Path) -> Iterable[TensorHeader]:
    """Read the headers of one file: 8 bytes little-endian header length, the header in JSON, the data."""
    try:
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
            text = stream.read(length) if length <= MAX_HEADER_BYTES else b""
            size = file.stat().st_size
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}.") from error
    if not text or len(text) < length:
        raise ModelError(f"{file} is not a safetensors file, or it is cut short: download it anew.")
    try:
        entries: dict[str, Any] = json.loads(text)
        headers = [
            _parse_entry(file, 8 + length, name, entry) for name, entry in entries.items() if name != "__metadata__"
        ]
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file} is not a safetensors file: its header is broken.") from error
    expected = 8 + length + max(ends, default=0)
    if size < expected:
        raise ModelError(f"{file} is cut short: it has {size} bytes of {expected}. Download it anew.")
    return sorted(headers, key=lambda header: header.start)


def read_parts(header: TensorHeader) -> Iterator[bytes]:
    """Yield the bytes of a tensor, COMPARED_BYTES at a time."""
    left = header.num_bytes
    try:
        with header.file.open("rb") as stream:
            stream.seek(header.start)
            while left:
                part = stream.read(min(left, COMPARED_BYTES))
                if not part:
                    raise ModelError(f"{header.file} was cut short while it was read.")
                left -= len(part)
                yield part
    except OSError as error:
        raise ModelError(f"{header.file} cannot be read: {error.strerror}.") from error


def _parse_entry(file: Path, data_start: int, name: str, entry: Mapping[str, Any]) -> TensorHeader:
    """Return the entry as a header; raise ValueError, KeyError or TypeError if it is malformed."""
    start, end = entry["data_offsets"]
    header = TensorHeader(name, str(entry["dtype"]), tuple(entry["shape"]), file, data_start + start, end - start)
    numbers = (start, end, *header.shape)
    item_bytes = ITEM_BYTES.get(entry["dtype"])
    if any(type(number) is not int or number < 0 for number in numbers) or not isinstance(entry["dtype"], str):
        raise ValueError(name)
    if item_bytes is not None and header.num_elements * item_bytes != header.num_bytes:
        raise ValueError(name)
    return header


def some(names: Iterable[str], most: int = 5) -> str:
    """Return the first `most` names and the number of the remaining ones."""
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
