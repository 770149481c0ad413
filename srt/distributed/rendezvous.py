"""Connect the ranks that share layers, and the stages of a pipeline, when a worker starts."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist

from srt.distributed.parallel_state import Group, TensorParallel
from srt.distributed.pipeline import MessageLinks, Pipeline, StageGroup

if TYPE_CHECKING:
    from srt.distributed.peer_memory import PeerMemory
    from srt.distributed.stage_memory import LinkSizes

Backend = Literal["gloo", "nccl"]


def init_tensor_parallel(
    rank: int,
    size: int,
    rendezvous_file: str,
    backend: Backend,
    device: torch.device,
    timeout_s: float = 300.0,
    maps_peers: bool = True,
    expert_groups: int = 1,
) -> TensorParallel:
    """Meet the other ranks at `rendezvous_file`, a path that they share and that no earlier group has used.

    A collective whose peers do not arrive fails after `timeout_s`. A single rank meets no others. GPUs map each other's memory for small
    tensors if they can, unless `maps_peers` is False.
    """
    if size == 1:
        return TensorParallel(0, 1, None, device)
    store = dist.FileStore(rendezvous_file, size)  # type: ignore[attr-defined]  # missing in torch's own stubs
    group = _open_group(store, rank, size, backend, timedelta(seconds=timeout_s))
    tp = TensorParallel(rank, size, group, device, expert_groups=expert_groups)
    # Connect now, so that a missing rank is found at start-up and not in the first step.
    tp.min_int(rank)
    if device.type != "cuda" or not maps_peers:
        return tp
    return TensorParallel(rank, size, group, device, _map_peers(tp, timeout_s), expert_groups)


def init_pipeline(stage: int, num_stages: int, rendezvous_file: str, timeout_s: float, most_in_flight: int) -> Pipeline:
    """Meet the other stages, over gloo, at `rendezvous_file`, a path that they share and that no earlier group has used.

    A message whose peer does not arrive fails after `timeout_s`. Plans in flight are at most `most_in_flight`. Stages on GPUs call
    `open_device_links` afterwards.
    """
    if num_stages == 1:
        return Pipeline(0, 1)
    store = dist.FileStore(rendezvous_file, num_stages)  # type: ignore[attr-defined]  # missing in torch's own stubs
    group = cast("StageGroup", _open_group(store, stage, num_stages, "gloo", timedelta(seconds=timeout_s)))
    pipeline = Pipeline(stage, num_stages, group, MessageLinks(stage, num_stages, group, most_in_flight))
    pipeline.min_int(stage)  # connects now, so that a missing stage is found at start-up
    return pipeline


def open_device_links(pipeline: Pipeline, sizes: LinkSizes, device: torch.device, timeout_s: float) -> None:
    """Exchange steps through the GPUs' memory from now on. StartError on all stages if one cannot. All stages call this together."""
    # Imported here because Triton is installed only with PyTorch for CUDA.
    from srt.distributed.mapped_memory import CudaMemory
    from srt.distributed.stage_memory import open_stage_memory
    from srt.kernels.build.hopper import runs_on
    from srt.kernels.collectives.stage_link import KERNELS

    def find_memory() -> CudaMemory | None:
        return CudaMemory(device) if all(runs_on(device, kernel) for kernel in KERNELS) else None

    pipeline.links = open_stage_memory(pipeline, find_memory, sizes, device, timeout_s)


def _map_peers(tp: TensorParallel, timeout_s: float) -> PeerMemory | None:
    # Imported here because Triton is installed only with PyTorch for CUDA.
    from srt.distributed.mapped_memory import CudaMemory
    from srt.distributed.peer_setup import open_peer_memory
    from srt.kernels.build.hopper import runs_on
    from srt.kernels.collectives.peer_sum import PROGRAMS, PeerKernel

    def find_memory() -> CudaMemory | None:
        # Thread blocks that wait for other ranks' blocks must all run at once, so each needs a multiprocessor.
        has_room = torch.cuda.get_device_properties(tp.device).multi_processor_count >= PROGRAMS
        return CudaMemory(tp.device) if has_room and runs_on(tp.device, PeerKernel(tp.size, None)) else None

    return open_peer_memory(tp, find_memory, timeout_s)


def _open_group(store: Any, rank: int, size: int, backend: Backend, timeout: timedelta) -> Group:
    """Return a group of our own: torch's global group would be state shared by two engines in one process."""
    kind: Any = dist.ProcessGroupGloo if backend == "gloo" else dist.ProcessGroupNCCL
    options = kind._Options() if backend == "gloo" else kind.Options()
    options._timeout = timeout
    if backend == "gloo":
        # All ranks are on this host: nothing listens on its other interfaces, and its hostname need not resolve.
        options._devices = [kind.create_device(hostname="127.0.0.1")]
    return cast("Group", kind(store, rank, size, options))
