"""What can be refused before any process is started: a taken port, a broken checkpoint, a model that does not fit."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass, replace
from pathlib import Path

from srt.server_args import ServerArgs
from srt.utils.checkpoint import estimate_weight_bytes, resolve_model_path
from srt.utils.errors import StartError
from srt.utils.host import available_memory_bytes
from srt.utils.model_config import ModelConfig

BACKLOG = 4096  # connections that wait while frontends start or are replaced; the kernel may cap it


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """A server that can be started: options with the port that was really taken, and the checkpoint's folder."""

    args: ServerArgs
    model_folder: Path
    listener: socket.socket | None

    @property
    def num_http_frontends(self) -> int:
        return self.args.tokenizer_worker_num if self.listener else 0

    @property
    def url(self) -> str | None:
        if self.listener is None:
            return None
        host = "127.0.0.1" if self.args.host == "0.0.0.0" else "[::1]" if self.args.host == "::" else self.args.host
        return f"http://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{self.args.port}"


def check_and_listen(args: ServerArgs, *, http: bool) -> ServerPlan:
    """Take the port, find the model and see that it can run here. StartError or ArgumentError say in a sentence why not."""
    listener = listen(args.host, args.port) if http else None
    try:
        if listener:
            args = replace(args, port=listener.getsockname()[1])
        return ServerPlan(args, check_model(args), listener)
    except BaseException:
        if listener:
            listener.close()
        raise


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise StartError(f"--host {host} is not an address of this machine ({error.strerror}).") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise StartError(
            f"Port {port} of {host} cannot be taken ({error.strerror}): choose another one with --port (0 takes any free one)."
        ) from error
    return listener


def check_model(args: ServerArgs) -> Path:
    """The folder of a model that can be split as asked and whose weights fit."""
    folder = resolve_model_path(args.model_path, args.revision, args.download_dir).resolve()
    config = ModelConfig.from_folder(folder, args.model_overrides(), args.context_length)
    config.check_tp(args.tp_size)
    if args.load_format != "dummy":
        check_memory(folder, config.torch_dtype if args.dtype == "auto" else args.dtype, args)
    return folder


def check_memory(folder: Path, dtype: str, args: ServerArgs) -> None:
    """On a CPU the weights of all ranks lie in this machine's memory."""
    needed = estimate_weight_bytes(folder, dtype)  # reads the headers, so a broken file is found here on any device
    on_cpu = args.device == "cpu" or (args.device is None and not Path("/dev/nvidiactl").exists())
    if not on_cpu:
        return
    available = available_memory_bytes()
    if needed > available:
        raise StartError(
            f"The weights take {needed / 1e9:.1f} GB as {dtype}, and {available / 1e9:.1f} GB of memory are available:"
            " choose a smaller model, or --dtype bfloat16 if it is not that already."
        )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
