"""GB/s of each way of updating a server's weights, beside the rate at which this machine copies memory.

    python -m benchmarks.weight_updates [--model-path qwen3-0.6b] [--layers 6] [--rounds 3] [--ways group] [--trainer-gpu 1]
                                        [any option of the server]

The weights are random, of the shape in benchmarks/configs or of a checkpoint's config.json, and lie in the page cache. Every way replaces
all of them, in a server that has nothing else to do; the best of the rounds counts. Afterwards the server must hold these weights to the
bit, whichever way they came. With `--trainer-gpu` the trainer's weights are on that GPU, and also come over NCCL, beside which the rate
of a copy from that GPU to the server's first one is shown.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from benchmarks import limits, models
from srt.distributed.update_group import Backend, UpdateGroup
from srt.layers.ops_choice import layer_ops
from srt.layers.weights import WeightPiece
from srt.model_loader.loader import build_whole
from srt.runtime import Runtime
from srt.server_args import ServerArgs, parse_args
from srt.utils.model_config import ModelConfig

CPU = torch.device("cpu")
BODY_BYTES = 1 << 29  # of tensors in one call, of which the route takes at most 1 GiB
COPIED_BYTES = 1 << 28
Tensors = dict[str, Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="qwen3-0.6b", help="a shape in benchmarks/configs, or any model")
    parser.add_argument("--layers", type=int, help="keep so many layers of it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default="", help="only those with this word in their name")
    parser.add_argument("--trainer-gpu", type=int, help="GPU of a trainer that sends over NCCL; the server's is 0")
    parser.add_argument("--jsonl", help="append the result to this file")
    options, server_options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch, name) for name in ("old", "new")]
        for seed, folder in enumerate(folders):
            write_checkpoint(Path(models.folder_of(options.model_path)), folder, seed, options.layers)
        args = parse_args(["--model-path", str(folders[0]), *server_options])
        figures = measure(args, folders, Path(scratch), options)
    record = {"benchmark": "weight_updates", "model": options.model_path, "layers": options.layers}
    limits.write_jsonl(options.jsonl, {**record, "options": server_options, "ways": figures, **limits.versions()})
    return 0


def write_checkpoint(shape: Path, folder: Path, seed: int, num_layers: int | None) -> None:
    """Write random weights of this shape."""
    shutil.copytree(shape, folder, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin"))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {} if num_layers is None else {"num_hidden_layers": num_layers}
    config.pop("layer_types", None)
    path.write_text(json.dumps(config))
    served = ModelConfig.from_folder(folder)
    assert served.weight_formats.is_plain, "choose a shape whose weights are not quantised; --quantization may be given"
    dtype, generator = getattr(torch, served.torch_dtype), torch.Generator().manual_seed(seed)
    pieces: list[WeightPiece] = build_whole(served, layer_ops(CPU)).weight_pieces(None)
    tensors = {
        piece.name: (torch.randn(piece.shape, generator=generator) * piece.shape[-1] ** -0.5).to(dtype)
        for piece in pieces
        if not piece.is_optional
    }
    save_file(tensors, folder / "model.safetensors")


def measure(
    args: ServerArgs, folders: list[Path], scratch: Path, options: argparse.Namespace
) -> list[dict[str, object]]:
    """Print the table, and return its rows."""
    rounds, trainer_gpu = options.rounds, options.trainer_gpu
    given = {name: value for name, value in asdict(args).items() if value != getattr(type(args)(), name)}
    copy_rate = measured_copy_rate()
    num_bytes = (folders[0] / "model.safetensors").stat().st_size
    figures: list[dict[str, object]] = []
    with Runtime(**given) as runtime, Trainer(runtime, args.tp_size, trainer_gpu) as trainer:
        print(
            f"{limits.versions()}; {num_bytes / 1e9:.2f} GB of weights; a copy in the host's memory: {copy_rate:.1f} GB/s"
        )
        if torch.cuda.is_available() and args.device != "cpu":
            rate = measured_upload_rate(torch.ones(COPIED_BYTES, dtype=torch.uint8).pin_memory())
            print(f"{torch.cuda.get_device_name(0)}; a copy to it from pinned memory: {rate:.1f} GB/s")
        if trainer_gpu is not None:
            rate = measured_upload_rate(torch.ones(COPIED_BYTES, dtype=torch.uint8, device=f"cuda:{trainer_gpu}"))
            print(f"a copy to it from GPU {trainer_gpu}: {rate:.1f} GB/s")
        print("way                                        s     GB/s   of the copy's")
        expected: dict[int, object] = {}
        for name, ways in ways_of(runtime, trainer, args, folders, scratch).items():
            if options.ways not in name:
                continue
            best_s = min(timed(way) for _ in range(rounds - 1) for _, way in ways) if rounds > 1 else float("inf")
            for index, way in ways:
                best_s = min(best_s, timed(way))
                hashes = runtime.weights_checker()["ranks"]
                assert expected.setdefault(index, hashes) == hashes, f"{name}: these are other weights than were sent"
            rate = num_bytes / best_s / 1e9
            print(f"{name:38} {best_s:7.3f} {rate:8.2f} {rate / copy_rate:12.2f}", flush=True)
            figures.append({"way": name, "s": best_s, "gb_s": rate, "copy_gb_s": copy_rate})
        assert expected[0] != expected[1], "both checkpoints are the same"
    print("afterwards all weights were those that were sent")
    return figures


Way = tuple[int, Callable[[], object]]  # which weights it brings


def ways_of(
    runtime: Runtime, trainer: Trainer, args: ServerArgs, folders: list[Path], scratch: Path
) -> dict[str, list[Way]]:
    """Return the ways of updating, each with calls that bring the new weights and the old ones again."""
    order = (1, 0)
    ways: dict[str, list[Way]] = {
        "from disk": [(n, partial(runtime.update_weights_from_disk, str(folders[n]))) for n in order]
    }
    if args.device == "cpu" and args.pp_size == args.dp_size == 1:
        by_rank = [scratch / "old by rank", scratch / "new by rank"]
        for folder, saved in zip(folders, by_rank, strict=True):
            runtime.update_weights_from_disk(str(folder))
            runtime.save_sharded_model(str(saved))
        ways["from disk, saved by rank"] = [
            (n, partial(runtime.update_weights_from_disk, str(by_rank[n]))) for n in order
        ]
    tensors = [trainer.read(folder) for folder in folders]
    bodies = [[save(part) for part in in_parts(one)] for one in tensors]
    ways["from tensors in the host's memory"] = [(n, partial(send_bodies, runtime, bodies[n])) for n in order]
    for backend, device in trainer.devices.items():
        on_device = [{name: one.to(device) for name, one in of.items()} for of in tensors]
        send = partial(trainer.send, backend)
        ways[f"from a process group ({backend})"] = [
            (n, partial(send, on_device[n], list(on_device[n].values()))) for n in order
        ]
        buckets = [torch.cat([one.view(-1).view(torch.uint8) for one in of.values()]) for of in on_device]
        ways[f"from a process group ({backend}), one bucket"] = [
            (n, partial(send, on_device[n], [buckets[n]])) for n in order
        ]
    return ways


def timed(way: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    way()
    return time.perf_counter() - begin_s


def send_bodies(runtime: Runtime, bodies: list[bytes]) -> None:
    for body in bodies:
        runtime.update_weights_from_tensor(body)


def in_parts(tensors: Tensors) -> Iterator[Tensors]:
    """Divide the tensors into calls of about BODY_BYTES. A layer's tensors stay together, as quantised layers need."""
    part: Tensors = {}
    layer = ""
    for name, tensor in sorted(tensors.items()):
        of_layer = ".".join(name.split(".")[:3])
        if part and of_layer != layer and sum(one.nbytes for one in part.values()) > BODY_BYTES:
            yield part
            part = {}
        part[name], layer = tensor, of_layer
    yield part


class Trainer:
    """Rank 0 of groups with the server's ranks, in this process: one over gloo, and one over NCCL if it has a GPU."""

    def __init__(self, runtime: Runtime, num_ranks: int, gpu: int | None) -> None:
        self._runtime = runtime
        self._pool = ThreadPoolExecutor(1)
        self.devices: dict[Backend, torch.device] = {"gloo": CPU}
        if gpu is not None:
            self.devices["nccl"] = torch.device("cuda", gpu)
            torch.cuda.set_device(gpu)  # for all that NCCL does in this thread
        self._groups = {backend: self._meet(num_ranks, backend) for backend in self.devices}

    def _meet(self, num_ranks: int, backend: Backend) -> UpdateGroup:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
        place = "127.0.0.1", port, 1, num_ranks + 1, backend
        joining = self._pool.submit(self._runtime.init_weights_update_group, *place, backend)
        group = UpdateGroup("127.0.0.1", port, 0, num_ranks + 1, backend, backend)
        joining.result()
        return group

    def read(self, folder: Path) -> Tensors:
        return load_file(folder / "model.safetensors")

    def send(self, backend: Backend, tensors: Tensors, sent: list[Tensor]) -> None:
        """Send the tensors as they are, or as one, over one of the groups."""
        names, shapes = list(tensors), [list(one.shape) for one in tensors.values()]
        dtypes = [str(one.dtype).removeprefix("torch.") for one in tensors.values()]
        form = "flattened_bucket" if len(sent) < len(tensors) else None
        receiving = self._pool.submit(
            self._runtime.update_weights_from_distributed, names, dtypes, shapes, backend, load_format=form
        )
        self._groups[backend].broadcast(sent)
        receiving.result()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        for backend, group in self._groups.items():
            self._runtime.destroy_weights_update_group(backend)
            group.close()
        self._pool.shutdown()


def measured_copy_rate() -> float:
    """Return how many GB of tensors this process copies in a second, the best of several times."""
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    best_s = float("inf")
    for _ in range(8):
        begin_s = time.perf_counter()
        target.copy_(source)
        best_s = min(best_s, time.perf_counter() - begin_s)
    return COPIED_BYTES / best_s / 1e9


def measured_upload_rate(source: Tensor) -> float:
    """Return how many GB a second reach the first GPU from where these bytes are, the best of several times."""
    target = torch.empty_like(source, device="cuda:0")
    best_s = float("inf")
    for _ in range(8):
        synchronize(source, target)
        begin_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize(source, target)
        best_s = min(best_s, time.perf_counter() - begin_s)
    return COPIED_BYTES / best_s / 1e9


def synchronize(*tensors: Tensor) -> None:
    for one in tensors:
        if one.is_cuda:
            torch.cuda.synchronize(one.device)


if __name__ == "__main__":
    raise SystemExit(main())
