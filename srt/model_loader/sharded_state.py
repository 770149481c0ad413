"""Save a rank's weights in the form in which they are multiplied, and load them without making that form anew.

This works on a CPU, and for layers of ours. What must be the same for both is in the folder's index (utils/sharded_state.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from srt.distributed.parallel_state import TensorParallel
from srt.layers.adapters import AdaptedWeight
from srt.layers.moe.packed_experts import PackedExperts
from srt.layers.ops import LayerOps
from srt.layers.ops_choice import layer_ops
from srt.layers.quantization.int_weight import IntWeight
from srt.layers.quantization.weight import LinearWeight
from srt.layers.weights import WeightedModule
from srt.model_loader.loader import ModelLoader, Progress, build_ours, move_buffers
from srt.model_loader.weight_copy import DTYPES, MOST_THREADS
from srt.models.causal_lm import CausalLM
from srt.models.library.encoder import LibraryEncoder
from srt.models.library.library_model import LibraryCausalLM
from srt.utils.checkpoint import TensorHeader, some
from srt.utils.host import usable_cores
from srt.utils.model_config import ModelConfig
from srt.utils.model_error import ModelError
from srt.utils.pipeline_stage import Stage
from srt.utils.sharded_state import part_of, read_part_headers

BLOCK_BYTES: Final = 64 << 20
"""Written or read between two reports of progress."""
_CODES: Final = {dtype: code for code, dtype in DTYPES.items()}


def rank_in_replica(tp: TensorParallel, stage: Stage) -> int:
    """Return the number of a rank: those of the last stage come first (managers/process/replica_layout.py)."""
    return (stage.num_stages - 1 - stage.index) * tp.size + tp.rank


def tensors_of(model: CausalLM) -> dict[str, nn.Parameter]:
    """Return what is saved of a finished model, by name. What adapters wrap has the name that it has without them."""
    wrapped = [path for path, module in model.named_modules() if isinstance(module, AdaptedWeight)]
    inner = {f"{path}.inner": path for path in wrapped}
    found: dict[str, nn.Parameter] = {}
    for name, tensor in model.named_parameters():
        path, _, last = name.rpartition(".")
        found[f"{inner.get(path, path)}.{last}"] = tensor
    return found


def write_rank(model: CausalLM, folder: Path, rank: int, most_bytes: int | None, report: Callable[[], None]) -> None:
    """Write the rank's tensors, in files with at most `most_bytes` of them unless a single one has more. OSError if it cannot."""
    for number, tensors in enumerate(_in_parts(tensors_of(model), most_bytes)):
        _write_file(part_of(folder, rank, number), tensors, report)


def is_repacked(model: CausalLM) -> bool:
    """Return whether some weights have a layout that only CPUs like this one can read."""
    return any(isinstance(module, IntWeight) and module.is_repacked for module in model.modules())


def _in_parts(tensors: Mapping[str, Tensor], most_bytes: int | None) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and most_bytes is not None and size + tensor.nbytes > most_bytes:
            yield part
            part, size = {}, 0
        part[name] = tensor.detach()
        size += tensor.nbytes
    yield part


def _write_file(file: Path, tensors: Mapping[str, Tensor], report: Callable[[], None]) -> None:
    entries: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with file.open("wb", buffering=0) as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors.values():
            for block in _bytes_of(tensor.contiguous()):
                _write_all(stream.write, block)
                report()


def _write_all(write: Callable[[memoryview], int | None], block: memoryview) -> None:
    while block:
        block = block[write(block) or 0 :]


def _bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the memory of a contiguous tensor, BLOCK_BYTES at a time."""
    data = tensor.view(-1).view(torch.uint8).numpy().data
    for begin in range(0, len(data), BLOCK_BYTES):
        yield data[begin : begin + BLOCK_BYTES]


def cpu_layout() -> str:
    """Return what the layout of 4-bit weights depends on."""
    return f"{torch.backends.cpu.get_cpu_capability()}, PyTorch {torch.__version__}"


class ShardedStateLoader(ModelLoader):
    """Reads what `write_rank` has written for this rank. The folder's index was compared before."""

    def load_model(
        self,
        config: ModelConfig,
        folder: str | Path,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress,
        check_size: Callable[[int], None] = lambda num_bytes: None,
        model: LibraryCausalLM | LibraryEncoder | None = None,
        ops: LayerOps | None = None,
        stage: Stage | None = None,
    ) -> CausalLM:
        if device.type != "cpu":
            raise ModelError(f"The weights in {folder} are saved by rank, which a CPU can load only: use a checkpoint.")
        assert model is None, "the index does not allow models of the library"
        config.check_tp(tp.size, tp.expert_groups)
        ours = build_ours(config, tp, ops or layer_ops(device), stage)
        _take_finished_form(ours)
        headers = read_part_headers(Path(folder), rank_in_replica(tp, stage or Stage.whole(config.num_layers)))
        check_size(sum(header.num_bytes for header in headers.values()))
        _set_parameters(ours, Path(folder), headers)
        move_buffers(ours, device)
        _read_into(tensors_of(ours), headers, progress)
        _restore(ours)
        return ours.eval()


def _take_finished_form(model: CausalLM) -> None:
    for module in list(model.modules()):
        if isinstance(module, WeightedModule):
            module.take_finished_form()


def _set_parameters(model: CausalLM, folder: Path, headers: Mapping[str, TensorHeader]) -> None:
    """Give the model memory for the stored tensors, in place of its own parameters. ModelError if it is not their model."""
    own = tensors_of(model)
    _check_names(folder, headers, own, _optional_names(model))
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules(remove_duplicate=False):  # what is shared is stored under one of its paths
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made and (header := headers.get(f"{path}.{name}")) is not None:
                made[id(parameter)] = _empty(header)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, made.get(id(parameter)))
    for name in headers.keys() - own.keys():
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, _empty(headers[name]))


def _optional_names(model: CausalLM) -> set[str]:
    """Return the names of tensors that finished weights have or not, as the checkpoint was."""
    packed = [path for path, module in model.named_modules() if isinstance(module, IntWeight)]
    return {f"{path}.{name}" for path in packed for name in ("zeros", "group_of", "order")}


def _check_names(
    folder: Path, headers: Mapping[str, TensorHeader], own: Mapping[str, Tensor], optional: set[str]
) -> None:
    """Raise ModelError, naming tensors, unless the folder has those of the model."""
    missing = [name for name in own if name not in headers and name not in optional]
    surplus = [name for name in headers if name not in own and name not in optional]
    unreadable = [f"{header.name} ({header.dtype})" for header in headers.values() if header.dtype not in DTYPES]
    complaints = (
        ("lacks", missing),
        ("has what the model does not use:", surplus),
        ("has of an unknown type", unreadable),
    )
    found = [f"{text} {some(names)}" for text, names in complaints if names]
    if found:
        raise ModelError(f"The rank's part in {folder} {'; and it '.join(found)}. Save the weights anew.")


def _empty(header: TensorHeader) -> nn.Parameter:
    return nn.Parameter(torch.empty(header.shape, dtype=DTYPES[header.dtype]), requires_grad=False)


def _read_into(
    tensors: Mapping[str, Tensor], headers: Mapping[str, TensorHeader], progress: Callable[[int, int], None]
) -> None:
    """Fill the tensors, which are contiguous, from the files; ModelError if one cannot be read."""
    total, done = sum(header.num_bytes for header in headers.values()), 0
    progress(0, total)
    with ThreadPoolExecutor(min(MOST_THREADS, usable_cores())) as pool:
        for size in pool.map(lambda header: _read_tensor(header, tensors[header.name]), headers.values()):
            done += size
            progress(done, total)


def _read_tensor(header: TensorHeader, tensor: Tensor) -> int:
    try:
        with header.file.open("rb", buffering=0) as stream:
            stream.seek(header.start)
            for block in _bytes_of(tensor.detach()):
                while block:
                    size = stream.readinto(block)
                    if not size:
                        raise ModelError(f"{header.file} was cut short while it was read.")
                    block = block[size:]
    except OSError as error:
        raise ModelError(f"{header.file} cannot be read: {error.strerror}.") from error
    return header.num_bytes


def _restore(module: nn.Module) -> None:
    if isinstance(module, LinearWeight | PackedExperts):
        module.restore()
        return
    for child in module.children():
        _restore(child)


class ShardedUpdate:
    """Weights saved by the ranks of an equal server, which replace those of a model that runs."""

    def __init__(self, model: CausalLM, folder: Path, rank: int, report: Callable[[], None]) -> None:
        """The folder's index was compared before. `report` is called whenever there is progress."""
        self._tensors = tensors_of(model)
        self._folder = folder
        self._headers = read_part_headers(folder, rank)
        self._report = report

    def check(self) -> None:
        """Raise ModelError if the files do not have the tensors of the model, in the form in which they are held."""
        _check_names(self._folder, self._headers, self._tensors, set())
        for name, header in self._headers.items():
            own = self._tensors[name]
            if (header.shape, header.dtype) != (tuple(own.shape), _CODES[own.dtype]):
                raise ModelError(
                    f"{name} in {self._folder} is stored in another form than now: start the server anew for it."
                )

    @torch.inference_mode()
    def write(self) -> None:
        """Read the new weights over the old ones. After an error they are a mixture of both, so the process must end."""
        _read_into(self._tensors, self._headers, lambda done, total: self._report())
