"""`srt doctor` prints what a bug report needs about this machine, on one page, and checks whether a server could start here.

It takes the options of `srt serve`, starts no server, and shows no secrets.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import srt
from srt.cli.gpu_links import describe_links, read_ways
from srt.kernels.build import cpu_library
from srt.managers.process.heartbeats import HeartbeatReader
from srt.managers.scheduler import scheduler as scheduler_state
from srt.managers.supervisor.preflight import check_model, check_surroundings, listen, runs_on_cpu
from srt.managers.supervisor.run_dir import PREFIX, RunDir, is_in_use
from srt.managers.supervisor.worker_places import worker_places
from srt.server_args import ArgumentError, ServerArgs, make_parser, parse_args
from srt.utils.cache_folders import VARIABLE as CACHE_VARIABLE
from srt.utils.cache_folders import cache_environment
from srt.utils.checkpoint import DEFAULT_MODEL, estimate_weight_bytes
from srt.utils.compiled import is_compiled
from srt.utils.errors import StartError
from srt.utils.host import available_memory_bytes, usable_cores
from srt.utils.log_files import last_lines, log_folder
from srt.utils.ray_package import check_ray_installed
from srt.version import __version__

DISTRIBUTION = "srt-serve"
USEFUL = ("triton", "flashinfer-python", "nvidia-ml-py")  # optional packages, listed if installed
LEAST_SHM_BYTES = 64 << 20  # NCCL's and gloo's buffers between ranks
NUM_LOG_LINES = 40
TORCH_TIMEOUT_S = 120.0
ENVIRONMENT = re.compile(
    r"(SRT|HF|HUGGING|CUDA|NCCL|GLOO|OMP|MKL|TORCH|TRITON|XDG|TMPDIR|PYTHON|TRANSFORMERS)", re.IGNORECASE
)
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)
_TORCH = """
import json, torch
n = torch.cuda.device_count()
gpus = [torch.cuda.get_device_properties(i) for i in range(n)]
access = torch.cuda.can_device_access_peer
try:
    peers = [(i, j) for i in range(n) for j in range(i + 1, n) if access(i, j) and access(j, i)]
except Exception:
    peers = None
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads(),
  "uuids": [str(getattr(g, "uuid", "")) for g in gpus], "peers": peers,
  "gpus": [f"{g.name}, {g.total_memory / 2**30:.0f} GiB, compute capability {g.major}.{g.minor}" for g in gpus]}))
"""

Line = tuple[str, str]


class CheckFailed(Exception):
    """Raised by a check for a problem that keeps a server from working. The text says what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the page. Exit code 0 if every check passed, else 1."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "--help" in words or "-h" in words:
        sys.stdout.write(f"usage: srt doctor [the options of srt serve]\n\n{__doc__}\n{make_parser().format_help()}")
        return 0
    args, complaint = _options(words)
    torch = _torch_facts()
    report = Report()
    report.section("srt", _versions(torch))
    report.section("This machine", _machine(torch))
    report.section("Environment", _environment())
    report.section("Options", _changed_options(args))
    report.section("Workers", worker_places(args, runs_on_cpu(args)))
    report.section("Folders", _folders(args))
    report.section("Running servers of this user", _servers(args))
    report.checks(
        [
            ("options", lambda: _pass_or_fail(complaint)),
            ("packages", _check_packages),
            ("PyTorch", lambda: _check_torch(torch)),
            ("open files and current folder", _check_surroundings),
            ("temporary folder", _check_temporary_folder),
            ("caches", _check_caches),
            ("shared memory", lambda: _check_shared_memory(args)),
            ("address", lambda: _check_address(args)),
            ("model", lambda: _check_model(args)),
            ("devices", lambda: _check_devices(args, torch)),
        ]
    )
    lines = last_lines(NUM_LOG_LINES)
    report.section("Last log lines, of all servers (they may quote requests: read them before you pass them on)", lines)
    return report.end()


class Report:
    """Sections of named values, then checks."""

    def __init__(self) -> None:
        self._num_failed = 0

    def section(self, title: str, lines: Iterator[Line] | list[str]) -> None:
        sys.stdout.write(f"\n{title}\n")
        for line in lines:
            name, _, value = (line, "", "") if isinstance(line, str) else (f"{line[0]:28}", "", line[1])
            sys.stdout.write(f"  {name} {value}".rstrip() + "\n")
        sys.stdout.flush()

    def checks(self, checks: list[tuple[str, Callable[[], str]]]) -> None:
        sys.stdout.write("\nChecks\n")
        for name, check in checks:
            try:
                verdict, words = "ok", check()
            except (CheckFailed, StartError, ArgumentError, OSError) as error:
                verdict, words = "FAILED", str(error)
                self._num_failed += 1
            sys.stdout.write(f"  {verdict:6} {name}: {words}\n")
            sys.stdout.flush()

    def end(self) -> int:
        failed = self._num_failed
        sys.stdout.write(f"\n{'Every check passed.' if not failed else f'{failed} of the checks failed.'}\n")
        return 1 if failed else 0


def _options(words: list[str]) -> tuple[ServerArgs, str | None]:
    """Parse the options. If they are wrong, return the defaults and the error's text."""
    if not any(word.partition("=")[0] in ("--model-path", "--model") for word in words):
        words = ["--model-path", DEFAULT_MODEL, *words]
    try:
        return parse_args(words), None
    except ArgumentError as error:
        return ServerArgs(model_path=DEFAULT_MODEL), str(error)


# ---- What is here


def _versions(torch: dict[str, Any] | str) -> Iterator[Line]:
    yield "srt", f"{__version__} in {Path(srt.__file__).parent}"
    yield (
        "scheduler",
        "compiled" if is_compiled(scheduler_state) else "plain Python (run `make compile` to make it quicker)",
    )
    yield "steps on a CPU", _cpu_steps()
    yield "Python", f"{platform.python_version()} at {sys.executable}"
    for name in [*_required(), *USEFUL]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)
    if isinstance(torch, dict):
        yield "CUDA of PyTorch", str(torch["cuda"])


def _cpu_steps() -> str:
    if not cpu_library.is_supported():
        return "by PyTorch's operations, as this processor has no AVX2"
    if cpu_library.load_library() is not None:
        return "compiled"
    return "by PyTorch's operations (install a C++ compiler and srt again to make them quicker)"


def _machine(torch: dict[str, Any] | str) -> Iterator[Line]:
    yield "system", f"{platform.platform()}, {_distribution()}"
    yield "processor", f"{_processor()}; {usable_cores()} of {os.cpu_count()} cores may be used"
    yield "memory", f"{available_memory_bytes() / 1e9:.1f} GB available"
    if isinstance(torch, dict):
        yield "GPUs that PyTorch sees", "; ".join(torch["gpus"]) or "none"
        for sentence in describe_links(torch["uuids"], torch["peers"], read_ways(torch["uuids"])):
            yield "links between GPUs", sentence
        yield "threads of PyTorch", str(torch["threads"])
    yield "NVIDIA driver", _driver()
    yield "open files", "{} (at most {})".format(*resource.getrlimit(resource.RLIMIT_NOFILE))


def _environment() -> Iterator[Line]:
    for name, value in sorted(os.environ.items()):
        if ENVIRONMENT.match(name) or name.lower().endswith("_proxy"):
            yield name, hidden(name, value)


def hidden(name: str, value: str) -> str:
    """Return the value without its secrets: the whole of a secret variable, the password in an address."""
    if SECRET.search(name):
        return "(set)" if value else ""
    return re.sub(r"//[^/@\s]*@", "//(hidden)@", value)


def _changed_options(args: ServerArgs) -> Iterator[Line]:
    defaults = ServerArgs().public_values()
    for name, value in args.public_values().items():
        yield f"--{name.replace('_', '-')}", f"{value}{'' if value == defaults[name] else '  (not the default)'}"


def _folders(args: ServerArgs) -> Iterator[Line]:
    environment = dict(os.environ)
    with contextlib.suppress(StartError):  # the check of the caches reports it
        environment |= cache_environment(os.environ)
    cache = Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    home = Path(environment.get("HF_HOME") or cache / "huggingface")
    hub = Path(args.download_dir or environment.get("HF_HUB_CACHE") or home / "hub")
    triton = Path(environment.get("TRITON_CACHE_DIR") or "~/.triton/cache").expanduser()
    for name, path, variables in (
        ("temporary files", Path(tempfile.gettempdir()), "TMPDIR"),
        ("log lines", log_folder(), "TMPDIR"),
        ("downloaded models", hub, f"HF_HOME, {CACHE_VARIABLE} or --download-dir"),
        ("compiled kernels", triton, f"TRITON_CACHE_DIR or {CACHE_VARIABLE}"),
    ):
        yield name, f"{path} ({_state_of(path)}; moved by {variables})"


def _state_of(folder: Path) -> str:
    nearest = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    state = "" if nearest == folder else "does not exist yet, "
    state += "writable" if os.access(nearest, os.W_OK) else "read-only"
    with contextlib.suppress(OSError):
        state += f", {shutil.disk_usage(nearest).free / 1e9:.1f} GB free"
    return state


def _servers(args: ServerArgs) -> Iterator[Line]:
    found = False
    for run_dir in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        if is_in_use(run_dir):
            found = True
            for status in HeartbeatReader(run_dir, args.watchdog_timeout).read(time.monotonic()):
                words = status.trouble(args.watchdog_timeout) or "well"
                yield f"{run_dir.name}: {status.process}", f"pid {status.pid}: {words}"
    if not found:
        yield "none", ""


def _required() -> list[str]:
    """Return the names of the packages that srt requires."""
    return [re.split(r"[<>=!~\[; ]", one)[0] for one in _requirements()]


def _requirements() -> list[str]:
    try:
        wanted = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return sorted(one for one in wanted if "extra ==" not in one)


def _torch_facts() -> dict[str, Any] | str:
    """Ask PyTorch, in a separate process, for its version and GPUs; return these facts, or the reason why it failed."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _TORCH], capture_output=True, text=True, timeout=TORCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"PyTorch was not loaded within {TORCH_TIMEOUT_S:.0f} s."
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or [f"PyTorch ended with exit code {done.returncode}."])[-1]
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def _distribution() -> str:
    with contextlib.suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown distribution")
    return "unknown distribution"


def _processor() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text("utf-8", "replace"), re.MULTILINE)
        if found:
            return found[1]
    return platform.machine()


def _driver() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text("utf-8", "replace").splitlines()[0]
    return "none"


# ---- Checks


def _pass_or_fail(complaint: str | None) -> str:
    if complaint is not None:
        raise CheckFailed(f"{complaint} The other checks use the default options.")
    return "valid"


def _check_packages() -> str:
    from packaging.requirements import Requirement  # comes with huggingface_hub

    wanted = [Requirement(one) for one in _requirements()]
    if not wanted:
        raise CheckFailed(f"{DISTRIBUTION} is not installed: run pip install -e . in its folder.")
    for one in wanted:
        try:
            version = importlib.metadata.version(one.name)
        except importlib.metadata.PackageNotFoundError:
            raise CheckFailed(f"{one.name} is missing: run pip install '{one}'.") from None
        if not one.specifier.contains(version, prereleases=True):
            raise CheckFailed(f"{one.name} {version} is not a supported version: run pip install '{one}'.")
    return f"all {len(wanted)} are installed, in supported versions"


def _check_torch(torch: dict[str, Any] | str) -> str:
    if isinstance(torch, str):
        raise CheckFailed(torch)
    return f"{torch['version']} loads"


def _check_surroundings() -> str:
    check_surroundings()
    return f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files may be open at once"


def _check_temporary_folder() -> str:
    run_dir = RunDir()
    path = run_dir.path
    run_dir.remove()
    return f"{path.parent} takes sockets and locks"


def _check_caches() -> str:
    moved = cache_environment(os.environ)
    return f"moved to {', '.join(sorted(set(moved.values())))}" if moved else "in the libraries' own folders"


def _check_shared_memory(args: ServerArgs) -> str:
    free = shutil.disk_usage("/dev/shm").free
    if args.tp_size > 1 and free < LEAST_SHM_BYTES:
        raise CheckFailed(
            f"/dev/shm has {free >> 20} MiB free, but ranks need {LEAST_SHM_BYTES >> 20}: use docker run --shm-size 1g."
        )
    return f"{free / 1e9:.1f} GB free"


def _check_address(args: ServerArgs) -> str:
    listen(args.host, args.port).close()
    return f"port {args.port} of {args.host} is free"


def _check_model(args: ServerArgs) -> str:
    folder = check_model(args)
    size = 0 if args.load_format == "dummy" else estimate_weight_bytes(folder)
    return f"{folder} fits, with {size / 1e9:.2f} GB of weights"


def _check_devices(args: ServerArgs, torch: dict[str, Any] | str) -> str:
    if args.use_ray:
        check_ray_installed()
        return f"{args.dp_size} replica(s) on hosts that Ray chooses"
    num_workers = args.num_ranks * args.dp_size // args.nnodes  # on this host
    if runs_on_cpu(args):
        return f"{num_workers} rank(s) on {usable_cores()} cores"
    num_gpus = len(torch["gpus"]) if isinstance(torch, dict) else 0
    if args.base_gpu_id + num_workers > num_gpus:
        sizes = f"--tp {args.tp_size}" + (f" and --dp-size {args.dp_size}" if args.dp_size > 1 else "")
        raise CheckFailed(
            f"{sizes} from GPU {args.base_gpu_id} on needs {args.base_gpu_id + num_workers} GPUs, but PyTorch"
            f" sees {num_gpus}: use --device cpu to run without GPUs."
        )
    return f"{num_workers} of {num_gpus} GPUs"
