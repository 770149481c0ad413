"""The layout of a replica: how many ranks it has, which processes it consists of, and how its engines are numbered.

A server has `--dp-size` replicas, each a whole copy of the model: a scheduler and one worker for each rank. All of a server's workers
are numbered from 0, the first replica's before the second's, and so are its schedulers.

A replica has `--pp-size` stages, each of `--tp-size` ranks. The ranks of the last stage come first, and those of the first stage last. So
rank 0 is always one that draws, and the scheduler takes the results of steps from it.

With `--enable-dp-attention` the `--tp-size` ranks are divided into `--dp-size` attention groups. A group counts as a replica, with a
scheduler and a generation of its own, but the ranks of all groups share the experts. So all groups end and start together.

With `--nnodes` the workers are divided evenly between the hosts, in the order of their numbers. A scheduler runs where rank 0 does, and
frontends run on host 0. With `--use-ray` host 0 has nothing but the frontends, and each replica is a host of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from srt.managers.process.child_process import ChildKey
from srt.server_args import ServerArgs


@dataclass(frozen=True, slots=True)
class ReplicaLayout:
    """The layout of one replica of a server."""

    tp: int  # ranks that share each layer
    replica: int = 0  # its number
    pp: int = 1  # stages, which divide the layers between them
    groups: int = 1  # attention groups that share experts with this one, itself included

    @classmethod
    def of(cls, args: ServerArgs, replica: int = 0) -> ReplicaLayout:
        groups = args.dp_size if args.enable_dp_attention else 1
        return cls(args.attention_ranks, replica, args.pp_size, groups)

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    @property
    def scheduler(self) -> ChildKey:
        return ChildKey("scheduler", self.replica, self.replica)

    @property
    def workers(self) -> tuple[ChildKey, ...]:
        """The workers, in the order of their ranks."""
        first = self.replica * self.num_ranks
        return tuple(ChildKey("worker", first + rank, self.replica) for rank in range(self.num_ranks))

    @property
    def members(self) -> tuple[ChildKey, ...]:
        """All processes that end and are replaced together."""
        return (*self.workers, self.scheduler)

    def rank_of(self, worker: int) -> int:
        """Return the rank of the worker with this number."""
        return worker - self.replica * self.num_ranks

    def stage_of(self, rank: int) -> int:
        """Return the stage of a rank."""
        return self.pp - 1 - rank // self.tp

    def tp_rank_of(self, rank: int) -> int:
        """Return the place of a rank among the ranks of its stage."""
        return rank % self.tp


def layouts_of(args: ServerArgs) -> list[ReplicaLayout]:
    """Return the layout of every replica of a server."""
    return [ReplicaLayout.of(args, replica) for replica in range(args.dp_size)]


# The generations of one replica are as far apart as there are replicas. So no two engines of a server have the same number, and files
# that are named after it do not collide.


def first_generation(replica: int) -> int:
    """Return the generation of the first engine of a replica."""
    return 1 + replica


def next_generation(generation: int, num_replicas: int) -> int:
    """Return the generation of the engine that replaces this one."""
    return generation + num_replicas


def previous_generation(generation: int, num_replicas: int) -> int:
    """Return the generation of the engine that this one replaced; a number below 1 if it was the first."""
    return generation - num_replicas


def start_number(generation: int, num_replicas: int) -> int:
    """Return how many engines a replica had before this one. The engines that share experts have the same number."""
    return (generation - 1) // num_replicas


def children_of(num_frontends: int, tp_size: int, dp_size: int = 1, pp_size: int = 1) -> list[ChildKey]:
    """List all processes of a server but the supervisor. Workers come first: their imports take longest."""
    layouts = [ReplicaLayout(tp_size, replica, pp_size) for replica in range(dp_size)]
    workers = [worker for layout in layouts for worker in layout.workers]
    frontends = [ChildKey("frontend", index) for index in range(num_frontends)]
    return [*workers, *(layout.scheduler for layout in layouts), *frontends]


def workers_per_host(args: ServerArgs) -> int:
    """Return the number of workers on each host of a server."""
    return args.num_ranks if args.use_ray else args.dp_size * args.num_ranks // args.nnodes


def host_of(child: ChildKey, args: ServerArgs) -> int:
    """Return the number of the host that this process runs on."""
    if child.role == "frontend":
        return 0
    worker = child.index if child.role == "worker" else child.replica * args.num_ranks
    return worker // workers_per_host(args) + (1 if args.use_ray else 0)
