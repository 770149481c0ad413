"""Which GPUs the workers of a server would have on this host. For `srt doctor`. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from srt.managers.process.replica_layout import ReplicaLayout, layouts_of, workers_per_host
from srt.server_args import ServerArgs


def worker_places(args: ServerArgs, on_cpu: bool) -> Iterator[tuple[str, str]]:
    """Yield a name and a text for each replica here."""
    if args.use_ray:
        yield "replicas", f"{args.dp_size}, on hosts that Ray chooses"
        return
    kind = "attention group" if args.enable_dp_attention else "replica"
    for layout in layouts_of(args):
        places = []
        for stage, gpus in enumerate(_gpus_by_stage(args, layout)):
            place = f"{len(gpus)} rank(s) on the CPU" if on_cpu else f"GPU {', '.join(map(str, gpus))}"
            if gpus:
                places.append(place if layout.pp == 1 else f"stage {stage}: {place}")
        if places:
            yield f"{kind} {layout.replica}", "; ".join(places)


def _gpus_by_stage(args: ServerArgs, layout: ReplicaLayout) -> list[list[int]]:
    """Return the numbers of the GPUs of each stage on this host, the first stage first."""
    per_host = workers_per_host(args)
    stages: list[list[int]] = [[] for _ in range(layout.pp)]
    for worker in layout.workers:
        if worker.index // per_host == args.node_rank:
            stages[layout.stage_of(layout.rank_of(worker.index))].append(args.base_gpu_id + worker.index % per_host)
    return stages
