"""Find the tensors in a file of PyTorch (.bin). This works without torch, and runs nothing that the file contains.

Such a file is a zip archive: `data.pkl` describes the tensors, and `data/KEY` is the memory of one or several of them, uncompressed.
The unpickler here knows tensors and dictionaries, and refuses every other name.
"""

from __future__ import annotations

import math
import pickle
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from srt.utils.model_error import ModelError

MAX_PICKLE_BYTES: Final = 100_000_000
_LOCAL_HEADER: Final = struct.Struct("<26xHH")
"""What a zip file has before each member's name: at its end the lengths of the name and of what follows it."""
_DTYPES: Final = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
ITEM_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Type, shape and location of one tensor of a file."""

    name: str
    dtype: str
    """The type's name in safetensors files."""
    shape: tuple[int, ...]
    start: int
    """Offset in the file."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def read_torch_file(file: Path) -> list[StoredTensor]:
    """Return the tensors of a file of PyTorch, in the order of its pickle. ModelError names a file that cannot be read."""
    try:
        with file.open("rb") as stream:
            if not zipfile.is_zipfile(stream):
                raise ModelError(
                    f"{file} is cut short, or of a format older than PyTorch 1.6: download it anew, or read it with torch.load and"
                    " write it with torch.save."
                )
            with zipfile.ZipFile(stream) as archive:
                return _read_archive(file, archive, stream)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}.") from error
    except _NotATensorError as error:
        raise ModelError(f"{file} holds {error}, not only tensors: only a model's own weights are read.") from error
    except (zipfile.BadZipFile, pickle.UnpicklingError, struct.error, *_MALFORMED) as error:
        raise ModelError(f"{file} is not a file of PyTorch, or it is damaged: download it anew.") from error


_MALFORMED: Final = (
    *(
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        EOFError,
        RecursionError,
        OverflowError,
        ImportError,
    ),
    *(NotImplementedError, RuntimeError),  # of zipfile, for compressions and encryptions that it does not know
)


def _read_archive(file: Path, archive: zipfile.ZipFile, stream: IO[bytes]) -> list[StoredTensor]:
    members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
        raise ModelError(f"{file} was written by a machine of another byte order: convert it to safetensors there.")
    pickled = members["data.pkl"]
    if pickled.file_size > MAX_PICKLE_BYTES:
        raise ValueError(pickled.file_size)
    with archive.open(pickled) as data:
        tensors = _TensorUnpickler(data).load()
    if not isinstance(tensors, dict):
        raise _NotATensorError(f"a {type(tensors).__name__}")
    return [_locate(name, tensor, members, file, stream) for name, tensor in tensors.items()]


def _locate(
    name: object, tensor: object, members: Mapping[str, zipfile.ZipInfo], file: Path, stream: IO[bytes]
) -> StoredTensor:
    if not isinstance(tensor, _Tensor) or not isinstance(name, str):
        raise _NotATensorError(f"{name} ({type(tensor).__name__})")
    member, dtype = members[f"data/{tensor.storage.key}"], tensor.storage.dtype
    item_bytes = ITEM_BYTES[dtype]
    if tensor.stride != _row_major(tensor.shape) and math.prod(tensor.shape) > 1:
        raise ModelError(f"{file} holds {name} not row by row: convert the checkpoint to safetensors.")
    begin, end = tensor.offset * item_bytes, (tensor.offset + math.prod(tensor.shape)) * item_bytes
    if begin < 0 or end > member.file_size or member.compress_type != zipfile.ZIP_STORED:
        raise ValueError(name)
    stream.seek(member.header_offset)
    name_bytes, extra_bytes = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
    data = member.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
    return StoredTensor(name, dtype, tensor.shape, data + begin)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


class _NotATensorError(Exception):
    """The file contains something else."""


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str
    key: str


@dataclass(frozen=True, slots=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Dict(dict[Any, Any]):
    """Stands for an ordered dictionary, whose attributes (versions of modules) say nothing here."""

    def __setstate__(self, state: object) -> None:
        """Ignore the attributes."""


class _TensorUnpickler(pickle.Unpickler):
    """Knows the names that descriptions of tensors consist of, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        known = {
            "collections.OrderedDict": _Dict,
            "torch._utils._rebuild_tensor_v2": _tensor,
            "torch._utils._rebuild_parameter": _parameter,
        }.get(f"{module}.{name}")
        if known is None:
            raise _NotATensorError(f"{module}.{name}")
        return known

    def persistent_load(self, pid: Any) -> _Storage:
        _, dtype, key, _, _ = pid
        if dtype not in ITEM_BYTES:
            raise ValueError(dtype)
        return _Storage(dtype, str(key))


def _tensor(storage: _Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: object) -> _Tensor:
    numbers = (offset, *shape, *stride)
    if any(type(number) is not int or number < 0 for number in numbers) or not isinstance(storage, _Storage):
        raise ValueError(numbers)
    return _Tensor(storage, offset, tuple(shape), tuple(stride))


def _parameter(tensor: _Tensor, *_: object) -> _Tensor:
    return tensor
