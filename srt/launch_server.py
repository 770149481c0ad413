"""`python -m srt.launch_server`: check the options and the model, start the processes, and stay as their supervisor.

Exit code 0 after an orderly end, 2 for wrong options, 1 after any other failure, with one sentence that explains it. The order of
imports is for a quick start: the wire format is loaded while the children are already loading theirs.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from srt.managers.process.child_process import (
    LIFELINE_FD,
    MODULES,
    ChildKey,
    ChildProcess,
    environment_of,
    spawn,
)
from srt.managers.process.replica_layout import children_of, host_of
from srt.managers.supervisor.preflight import ServerPlan, check_and_listen
from srt.managers.supervisor.run_dir import RunDir
from srt.managers.supervisor.signal_pipe import SignalPipe
from srt.managers.supervisor.systemd import ServiceManager
from srt.server_args import ArgumentError, ServerArgs, parse_args
from srt.utils.bytecode import bytecode_environment
from srt.utils.cache_folders import cache_environment
from srt.utils.errors import StartError
from srt.utils.host import is_loopback, process_age_s, usable_cores
from srt.utils.logs import json_line

if TYPE_CHECKING:
    from srt.managers.supervisor.hosts import Hosts
    from srt.managers.supervisor.progress_display import ProgressDisplay
    from srt.managers.supervisor.ray_placement import RayPlacement
    from srt.protocol.stream import MessageStream


FAILED, WRONG_OPTIONS = 1, 2  # exit codes: a service manager may try again after the first, but not after the second


def main(argv: Sequence[str] | None = None) -> int:
    """Run a server to its end and return the exit code."""
    started_s = time.monotonic() - process_age_s()
    open_standard_streams()
    if not sys.platform.startswith("linux"):
        return _refuse(f"srt runs on Linux (and WSL2) only, not on {sys.platform}.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until there are processes to end in order
    lifeline_fd = os.environ.pop(LIFELINE_FD, None)
    as_json = False
    try:
        os.environ |= cache_environment(os.environ)
        os.environ |= bytecode_environment(os.environ)
        if lifeline_fd is not None:
            return serve_runtime(int(lifeline_fd), started_s)
        args = parse_args(sys.argv[1:] if argv is None else argv)
        as_json = args.log_format == "json"
        plan = check_and_listen(args, http=args.node_rank == 0)
        if args.node_rank > 0:
            return follow(plan, read_secret_of(args))
        if not is_loopback(args.host) and args.api_key is None:
            _say(f"Warning: {args.host} can be reached by others, and no --api-key is set.", "warning", as_json)
        return serve_on_ray(plan, args, started_s) if args.use_ray else serve(plan, started_s, None)
    except ArgumentError as error:
        return _refuse(str(error), WRONG_OPTIONS, as_json)
    except StartError as error:
        return _refuse(str(error), FAILED, as_json)
    except KeyboardInterrupt:
        return 0


def open_standard_streams() -> None:
    """Open closed standard streams on /dev/null: else a socket would get such a number, and a child's own stream would replace it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number: this one
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def serve_runtime(lifeline_fd: int, started_s: float) -> int:
    """Run a server for a Runtime, or a host for an actor of Ray: it sends the options and receives the reason of a failure."""
    from srt.managers.supervisor.lifeline import open_lifeline, say_failed

    lifeline, order = open_lifeline(lifeline_fd)
    try:
        if order.secret is not None:
            return follow(check_and_listen(order.args, http=False), order.secret, lifeline)
        if order.args.nnodes > 1:
            raise ArgumentError("nnodes is for servers: run python -m srt.launch_server on each host.")
        if order.args.use_ray:
            raise ArgumentError("use_ray is for servers: run python -m srt.launch_server --use-ray.")
        return serve(check_and_listen(order.args, http=order.http), started_s, lifeline)
    except (ArgumentError, StartError) as error:
        say_failed(lifeline, str(error))
        return 1


def serve_on_ray(plan: ServerPlan, args: ServerArgs, started_s: float) -> int:
    """Lead a server whose replicas Ray starts. They get the options as the user gave them, because each host finds the model itself."""
    from srt.managers.supervisor.ray_placement import RayPlacement

    with RayPlacement(args) as placement:
        return serve(replace(plan, args=placement.led(plan.args)), started_s, None, placement=placement)


def serve(
    plan: ServerPlan,
    started_s: float,
    lifeline: MessageStream | None,
    modules: Mapping[str, str] = MODULES,
    placement: RayPlacement | None = None,
) -> int:
    """Start all processes side by side, and run them until they end."""
    run_dir = RunDir()
    try:
        service_manager = ServiceManager()
        # Before there are signals to wait for: Ctrl-C ends the wait for other hosts.
        hosts = gather_hosts(plan, run_dir, placement) if plan.args.nnodes > 1 else None
        signals = SignalPipe()
        spawn = spawner(plan, modules)
        children = [spawn(key) for key in own_children(plan)]
        # Imported here, while the children load their modules.
        from srt.managers.supervisor.supervisor import Supervisor

        words = plan, run_dir, children, spawn, signals, new_display(plan.args), service_manager, started_s, lifeline
        return Supervisor(*words, hosts).run()
    finally:
        run_dir.remove()


def gather_hosts(plan: ServerPlan, run_dir: RunDir, placement: RayPlacement | None) -> Hosts:
    """Wait until all other hosts have joined this one, which leads. With a `placement`, Ray starts them."""
    from srt.managers.supervisor.host_facts import facts_of
    from srt.managers.supervisor.hosts import Hosts

    args = plan.args
    others = [key for key in all_children(plan) if host_of(key, args) > 0]
    secret = read_secret_of(args) if placement is None else placement.secret
    hosts = Hosts(args, others, facts_of(plan), secret, run_dir.path)
    display = new_display(args)
    where = "to be started by Ray" if placement else f"at {args.dist_init_addr}"
    display.say(f"Waiting for {args.nnodes - 1} more host{'s' * (args.nnodes > 2)} {where}.")
    if placement is None:
        hosts.wait(display.say)
    else:
        placement.place()
        hosts.wait(display.say, placement.check)
        placement.confirm()
    return hosts


def read_secret_of(args: ServerArgs) -> bytes:
    """Return the secret that this host has in a file."""
    from srt.protocol.cluster_key import read_secret

    assert args.cluster_key_file is not None, "several hosts have a secret"
    return read_secret(args.cluster_key_file)


def follow(
    plan: ServerPlan, secret: bytes, lifeline: MessageStream | None = None, modules: Mapping[str, str] = MODULES
) -> int:
    """Run the processes of a host that does not lead, until that, the server or the lifeline ends."""
    from srt.managers.supervisor.following import FollowingSupervisor, join
    from srt.managers.supervisor.host_facts import facts_of

    args = plan.args
    run_dir, display, service_manager = RunDir(), new_display(args), ServiceManager()
    try:
        sock, leader = join(args, facts_of(plan), secret, display.say, lifeline)
        display.say(f"Host {args.node_rank} has joined {args.dist_init_addr}.")
        words = plan, run_dir, sock, leader, secret, spawner(plan, modules), SignalPipe(), display, service_manager
        return FollowingSupervisor(*words, lifeline).run()
    finally:
        run_dir.remove()


def new_display(args: ServerArgs) -> ProgressDisplay:
    """Return the display of this server's supervisor."""
    from srt.managers.supervisor.progress_display import ProgressDisplay
    from srt.utils.log_files import log_file_handler

    return ProgressDisplay(
        quiet=args.log_level in ("warning", "error"),
        as_json=args.log_format == "json",
        keep=log_file_handler("supervisor", os.getpid()),
    )


def all_children(plan: ServerPlan) -> list[ChildKey]:
    """List all processes of this plan but the supervisors."""
    return children_of(plan.num_http_frontends, plan.args.attention_ranks, plan.args.dp_size, plan.args.pp_size)


def own_children(plan: ServerPlan) -> list[ChildKey]:
    """List the processes of this plan that run on this host."""
    return [key for key in all_children(plan) if host_of(key, plan.args) == plan.args.node_rank]


def spawner(plan: ServerPlan, modules: Mapping[str, str]) -> Callable[[ChildKey], ChildProcess]:
    """Return the function that starts a child, at first or as a replacement."""
    own = own_children(plan)
    num_processes = len(own) + 1
    num_workers = sum(key.role == "worker" for key in own)
    cores = usable_cores()

    def start(key: ChildKey) -> ChildProcess:
        environment = environment_of(key.role, num_workers, num_processes, cores)
        return spawn(key, modules[key.role], environment, plan.listener if key.role == "frontend" else None)

    return start


def _refuse(sentence: str, exit_code: int = FAILED, as_json: bool = False) -> int:
    _say(sentence, "error", as_json)
    return exit_code


def _say(sentence: str, level: str, as_json: bool) -> None:
    sys.stderr.write((json_line(time.time(), level, "supervisor", sentence) if as_json else sentence) + "\n")


if __name__ == "__main__":
    sys.exit(main())
