"""Example of Ray Serve: `python -m srt.ray_serve --model-path tiny --device cpu`, with the options of the server.

Ray Serve decides how many replicas there are. Each is an actor in a placement group of its own, and owns a whole server.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from srt.server_args import ArgumentError, ServerArgs, parse_args
from srt.utils.errors import StartError
from srt.utils.ray_package import check_ray_installed

NAME = "srt"
ONGOING_REQUESTS = 16  # of a replica: with more, Ray Serve starts another one
MOST_REQUESTS = 256  # that Ray Serve sends to a replica at a time


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal ends it, and return the exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(prog="python -m srt.ray_serve", allow_abbrev=False, add_help=False)
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--max-replicas", type=int, default=4)
    try:
        own, words = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
        args = checked(parse_args(words))
        check_ray_installed()
        run(args, {"min_replicas": own.min_replicas, "max_replicas": own.max_replicas})
    except (ArgumentError, StartError) as error:
        sys.stderr.write(f"{error}\n")
        return 2 if isinstance(error, ArgumentError) else 1
    except KeyboardInterrupt:
        return 0
    return 0


def checked(args: ServerArgs) -> ServerArgs:
    """Return the options; ArgumentError for those that Ray Serve's replicas do not have."""
    if args.nnodes > 1 or args.use_ray:
        raise ArgumentError("Ray Serve starts the replicas: leave out --nnodes and --use-ray.")
    if args.device != "cpu":
        raise ArgumentError("srt.ray_serve starts replicas that compute on CPUs only: add --device cpu.")
    if args.ssl_certfile is not None:
        raise ArgumentError("Ray Serve has the HTTP port: set its own TLS options, and leave out --ssl-certfile.")
    return args


def run(args: ServerArgs, bounds: dict[str, int]) -> None:
    """Serve on the cluster that RAY_ADDRESS names, or on that of this machine, until KeyboardInterrupt."""
    import ray

    try:
        from ray import serve
    except ImportError as error:
        raise StartError("Ray Serve is not installed: run pip install 'srt-serve[ray]'.") from error

    from srt.ray_cluster.options import with_whole_paths
    from srt.ray_cluster.serve_replica import ServeReplica

    try:
        ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), logging_level=logging.ERROR, log_to_driver=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise StartError("No Ray cluster can be used: start one with ray start --head, or set RAY_ADDRESS.") from error
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray has set a handler that aborts
    if others := sorted(serve.status().applications):
        raise StartError(
            f"Ray Serve on this cluster runs {', '.join(others)} already, and this example ends Ray Serve with itself: use another"
            " cluster."
        )
    num_cpus = args.num_ranks * args.dp_size
    # The settings that the example is about.
    options: dict[str, Any] = {
        "name": NAME,
        "autoscaling_config": {**bounds, "target_ongoing_requests": ONGOING_REQUESTS},
        "max_ongoing_requests": MOST_REQUESTS,
        "ray_actor_options": {"num_cpus": num_cpus},
        "placement_group_bundles": [{"CPU": num_cpus}],
        "placement_group_strategy": "STRICT_PACK",
    }
    deployment: Any = serve.deployment(ServeReplica)
    local = replace(with_whole_paths(args), host="127.0.0.1", port=0)
    serve.start(http_options={"host": args.host, "port": args.port})
    try:
        serve.run(deployment.options(**options).bind(local), name=NAME)
        sys.stderr.write(f"Ready at http://{args.host}:{args.port}\n")
        signal.pause()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
