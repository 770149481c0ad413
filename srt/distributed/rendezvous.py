"""Connect the ranks that share layers, and the stages of a pipeline, when a worker starts."""

from __future__ import annotations

import copy
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist

from srt.distributed.expert_exchange import ExpertExchange
from srt.distributed.parallel_state import Group, SharedExperts, TensorParallel
from srt.distributed.pipeline import MessageLinks, Pipeline, StageGroup
from srt.distributed.step_calls import StepCalls
from srt.utils.errors import StartError

if TYPE_CHECKING:
    from srt.distributed.peer_memory import PeerMemory
    from srt.distributed.stage_memory import LinkSizes

Backend = Literal["gloo", "nccl"]
POLL_S = 0.05
distributed: Any = dist  # its own annotations lack what is used here


class TcpMeeting:
    """A port of the host of rank 0, for ranks on several hosts. All groups of an engine share it, each with its own name."""

    def __init__(self, address: str, own_address: str, timeout_s: float, *, leads: bool) -> None:
        """Listen there if this is rank 0, or wait for it. StartError if it does not come within `timeout_s`."""
        host, _, port = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        self.own_address = own_address
        options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s), "wait_for_workers": False}
        if leads:
            # Opened here, because torch would listen on all interfaces.
            listener = socket.create_server(
                (host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            )
            options["master_listen_fd"] = listener.detach()
        else:
            _await_port(host, int(port), timeout_s)
        self.store: Any = distributed.TCPStore(host, int(port), None, leads, **options)

    def named(self, name: str) -> TcpMeeting:
        """Return the meeting of another group at the same port."""
        other = copy.copy(self)
        other.store = distributed.PrefixStore(name, self.store)
        return other


def _await_port(host: str, port: int, timeout_s: float) -> None:
    """Wait until something listens at the port; TCPStore would write a page of C++ frames to the log for each failed try."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout_s).close()
            return
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise StartError(f"Rank 0 did not come to {host}:{port} within {timeout_s:.0f} s.") from error
        time.sleep(POLL_S)


def init_tensor_parallel(
    rank: int,
    size: int,
    rendezvous: str | TcpMeeting,
    backend: Backend,
    device: torch.device,
    timeout_s: float = 300.0,
    maps_peers: bool = True,
    expert_groups: int = 1,
    exchange: SharedExperts | None = None,
    most_sum_bytes: int = 0,
    most_divided_bytes: int = 0,
) -> TensorParallel:
    """Meet the other ranks at `rendezvous`: a path that they share and that no earlier group has used, or a port if hosts differ.

    A collective whose peers do not arrive fails after `timeout_s`. A single rank meets no others. GPUs map each other's memory if they can,
    unless `maps_peers` is False: for small tensors, for sums of tensors up to `most_sum_bytes`, and for steps whose rows two ranks divide,
    with hidden states of up to `most_divided_bytes`. All ranks must say these alike. `exchange` connects the ranks to others that share
    their experts.
    """
    if size == 1:
        return TensorParallel(0, 1, None, device, exchange=exchange)
    group = _open_group(rendezvous, rank, size, backend, timedelta(seconds=timeout_s))
    tp = TensorParallel(rank, size, group, device, expert_groups=expert_groups, exchange=exchange)
    # Connect now, so that a missing rank is found at start-up and not in the first step.
    tp.min_int(rank)
    if device.type != "cuda" or not maps_peers:
        return tp
    peers = _map_peers(tp, timeout_s, most_sum_bytes, most_divided_bytes)
    return TensorParallel(rank, size, group, device, peers, expert_groups, exchange)


def init_expert_exchange(
    rank: int,
    paths: Sequence[str],
    num_groups: int,
    meeting: Callable[[str], str],
    device: torch.device,
    timeout_s: float = 300.0,
    maps_peers: bool = True,
    expert_groups: int = 1,
) -> ExpertExchange:
    """Meet the ranks of all attention groups, which share the experts. Each hears calls at its path of `paths`.

    `meeting` returns a path as `init_tensor_parallel` wants it: for "experts", and on GPUs also for "tokens".
    """
    # Opened first: after the meeting every rank can call every other one.
    calls, size, cpu = StepCalls(paths[rank], timeout_s), len(paths), torch.device("cpu")
    backend: Backend = "gloo" if device.type == "cpu" else "nccl"
    ranks = init_tensor_parallel(rank, size, meeting("experts"), backend, device, timeout_s, maps_peers, expert_groups)
    if device.type == "cpu":
        return ExpertExchange(ranks, num_groups, calls, paths)
    on_host = init_tensor_parallel(rank, size, meeting("tokens"), "gloo", cpu, timeout_s)
    return ExpertExchange(ranks, num_groups, calls, paths, on_host)


def init_pipeline(
    stage: int, num_stages: int, rendezvous: str | TcpMeeting, timeout_s: float, most_in_flight: int
) -> Pipeline:
    """Meet the other stages, over gloo, at `rendezvous`: a path that they share and that no earlier group has used, or a port.

    A message whose peer does not arrive fails after `timeout_s`. Plans in flight are at most `most_in_flight`. Stages on GPUs call
    `open_device_links` afterwards.
    """
    if num_stages == 1:
        return Pipeline(0, 1)
    group = cast("StageGroup", _open_group(rendezvous, stage, num_stages, "gloo", timedelta(seconds=timeout_s)))
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


def _map_peers(tp: TensorParallel, timeout_s: float, most_sum_bytes: int, most_divided_bytes: int) -> PeerMemory | None:
    # Imported here because Triton is installed only with PyTorch for CUDA.
    from srt.distributed.mapped_memory import CudaMemory
    from srt.distributed.peer_setup import open_peer_memory
    from srt.distributed.row_division import can_divide
    from srt.kernels.build.hopper import runs_on
    from srt.kernels.collectives.large_sum import LargeKernel, boxed_bytes
    from srt.kernels.collectives.medium_sum import MediumKernel
    from srt.kernels.collectives.peer_sum import PROGRAMS, PeerKernel

    # Thread blocks that wait for other ranks' blocks must all run at once. A multiprocessor has room for one, or for a few of large sums.
    has_room = torch.cuda.get_device_properties(tp.device).multi_processor_count >= PROGRAMS

    def find_memory() -> CudaMemory | None:
        kernels = PeerKernel(tp.size, None), MediumKernel(tp.size, torch.bfloat16)
        return CudaMemory(tp.device) if has_room and all(runs_on(tp.device, kernel) for kernel in kernels) else None

    most_large_bytes = boxed_bytes(tp.size, most_sum_bytes) if has_room else 0
    if most_large_bytes and not runs_on(tp.device, LargeKernel(tp.size, torch.bfloat16, is_divided=tp.size > 2)):
        most_large_bytes = 0
    divided = most_divided_bytes if most_divided_bytes and tp.size == 2 and can_divide(tp.device) else 0
    sizes = tp.min_int(most_large_bytes), tp.min_int(divided)
    return open_peer_memory(tp, find_memory, timeout_s, most_large_bytes=sizes[0], most_divided_bytes=sizes[1])


def _open_group(rendezvous: str | TcpMeeting, rank: int, size: int, backend: Backend, timeout: timedelta) -> Group:
    """Return a group of our own: torch's global group would be state shared by two engines in one process."""
    if isinstance(rendezvous, str):
        own_address, store = "127.0.0.1", distributed.FileStore(rendezvous, size)
    else:
        own_address, store = rendezvous.own_address, rendezvous.store
    kind: Any = dist.ProcessGroupGloo if backend == "gloo" else dist.ProcessGroupNCCL
    options = kind._Options() if backend == "gloo" else kind.Options()
    options._timeout = timeout
    if backend == "gloo":
        # Nothing listens on this host's other interfaces, and its hostname need not resolve.
        options._devices = [kind.create_device(hostname=own_address)]
    return cast("Group", kind(store, rank, size, options))
