"""The options of a server on several hosts, which of them may differ between its hosts, and what several hosts do not support."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from srt.utils.option import ArgumentError, option
from srt.utils.rank_options import RankOptions

HOSTS = "Several hosts"
PORTS_PER_REPLICA = 3  # behind that of --dist-init-addr: for frontends, for workers, and where ranks find each other
LAST_PORT = 65535
# Options that concern one host. Clients talk to host 0 alone, so its options of HTTP count.
OWN_OPTIONS = frozenset(
    "node_rank cluster_key_file model_path speculative_draft_model_path tokenizer_path quantization_param_path download_dir revision"
    " served_model_name chat_template base_gpu_id host port api_key admin_api_key enable_metrics cors_allow_origins"
    " ssl_certfile ssl_keyfile ssl_keyfile_password tokenizer_worker_num log_level log_format log_requests log_requests_level"
    " decode_log_interval".split()
)


@dataclass(frozen=True, slots=True)
class HostOptions(RankOptions):
    """The options of several hosts as the user gave them; a part of ServerArgs."""

    nnodes: int = option(
        1, "hosts that serve together; start the server on each, with the same options but --node-rank", group=HOSTS
    )
    node_rank: int = option(0, "number of this host; host 0 has the HTTP port, and leads", group=HOSTS)
    dist_init_addr: str | None = option(
        None, "HOST:PORT of host 0 for the others; three more ports for each replica follow it", group=HOSTS
    )
    cluster_key_file: str | None = option(
        None, "file with a secret of at least 32 bytes, the same on all hosts: only they can join", group=HOSTS
    )
    use_ray: bool = option(
        False, "let Ray start each replica on a host of its cluster, as an actor with a placement group", group=HOSTS
    )
    ray_num_cpus: int | None = option(
        None, "CPUs that Ray reserves for each replica (default: one for each rank)", group=HOSTS
    )

    def check_hosts(self, args: Any) -> None:
        """Raise ArgumentError for options of several hosts that cannot work. `args` are all options of the server."""
        if self.nnodes < 1:
            raise ArgumentError(f"--nnodes must be at least 1, not {self.nnodes}.")
        if not 0 <= self.node_rank < self.nnodes:
            raise ArgumentError(
                f"--node-rank must lie between 0 and {self.nnodes - 1} (see --nnodes), not {self.node_rank}."
            )
        if self.use_ray:
            self._check_ray(args)
            return
        if self.ray_num_cpus is not None:
            raise ArgumentError("--ray-num-cpus needs --use-ray.")
        if self.nnodes == 1:
            for name in ("dist_init_addr", "cluster_key_file"):
                if getattr(self, name) is not None:
                    raise ArgumentError(f"--{name.replace('_', '-')} needs --nnodes of at least 2.")
            return
        for name, what in (
            ("dist_init_addr", "HOST:PORT, an address of host 0"),
            ("cluster_key_file", "FILE, a secret that all hosts have (umask 077; openssl rand -hex 32 > FILE)"),
        ):
            if getattr(self, name) is None:
                raise ArgumentError(f"--nnodes {self.nnodes} needs --{name.replace('_', '-')} {what}.")
        self._check_ports(args)
        self._check_division(args)
        if self.serves_adapters:
            raise ArgumentError(f"--enable-lora works on one host only, not with --nnodes {self.nnodes}.")

    def _check_ray(self, args: Any) -> None:
        """Raise ArgumentError for options that cannot work with --use-ray."""
        if self.nnodes > 1:
            raise ArgumentError("--use-ray starts one host for each replica: leave out --nnodes.")
        if self.cluster_key_file is not None:
            raise ArgumentError("--use-ray makes a secret of its own: leave out --cluster-key-file.")
        if self.ray_num_cpus is not None and self.ray_num_cpus < 1:
            raise ArgumentError(f"--ray-num-cpus must be at least 1, not {self.ray_num_cpus}.")
        if self.serves_adapters:
            raise ArgumentError("--enable-lora works on one host only, not with --use-ray.")
        if self.enable_dp_attention:
            raise ArgumentError("--enable-dp-attention works on one host only, not with --use-ray.")
        if self.dist_init_addr is not None:
            self._check_ports(args)

    def _check_ports(self, args: Any) -> None:
        """Raise ArgumentError unless --dist-init-addr is HOST:PORT with room for the ports that follow."""
        _, port = self.leader_address()
        if port + PORTS_PER_REPLICA * args.dp_size > LAST_PORT:
            raise ArgumentError(
                f"--dist-init-addr needs {PORTS_PER_REPLICA * args.dp_size} free ports behind its own, so {port} is too high."
            )

    def leader_address(self) -> tuple[str, int]:
        """Return host and port of --dist-init-addr. ArgumentError if it is not HOST:PORT."""
        given = self.dist_init_addr or ""
        host, _, port = given.rpartition(":")
        if not host or not (port.isascii() and port.isdigit()) or not 1 <= int(port) <= LAST_PORT:
            raise ArgumentError(f"--dist-init-addr must be HOST:PORT, such as 10.0.0.1:5000, not {given!r}.")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ArgumentError(
                f"--dist-init-addr must have an IPv6 address in brackets, such as [fd00::1]:5000, not {given!r}."
            )
        if host in ("0.0.0.0", "::"):
            raise ArgumentError(f"--dist-init-addr must be an address that the other hosts can reach, not {host}.")
        return host, int(port)

    def _check_division(self, args: Any) -> None:
        """Raise ArgumentError unless each host has whole replicas, or each replica whole hosts."""
        ranks, total = args.num_ranks, args.dp_size * args.num_ranks
        if total % self.nnodes or (total // self.nnodes % ranks and ranks % (total // self.nnodes)):
            sizes = f"--dp-size {args.dp_size} × --tp {args.tp_size} × --pp-size {args.pp_size}"
            raise ArgumentError(
                f"--nnodes {self.nnodes} does not divide the {total} workers of {sizes} into whole replicas, or each replica"
                " into equal parts: change one of them."
            )
