"""The cores and memory of the host that this process may use, within the limits of its container."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import resource
import time
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
PROC = Path("/proc")
PF_EXITING = 4  # a flag of the Linux kernel


def usable_cores(cgroup: Path = CGROUP, proc: Path = PROC) -> int:
    """Return the number of usable cores: the process' affinity, cut to the quotas of its cgroup and the enclosing ones; at least 1."""
    limits: list[float] = [len(os.sched_getaffinity(0))]
    limits += [quota for folder in _cgroups(cgroup, proc) if (quota := _cpu_quota(folder)) is not None]
    return max(1, int(min(limits)))


def available_memory_bytes(cgroup: Path = CGROUP, proc: Path = PROC) -> int:
    """Return the memory that can still be allocated: the kernel's MemAvailable, cut to what the limits of the cgroups leave."""
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text("ascii").splitlines())
    limits = [int(fields["MemAvailable"].split()[0]) * 1024]
    limits += [left for folder in _cgroups(cgroup, proc) if (left := _cgroup_memory_left(folder)) is not None]
    return max(0, min(limits))


def process_age_s() -> float:
    """Return the seconds since the kernel started this process."""
    started_ticks = int((PROC / "self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard limit: every client connection is a descriptor."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # some kernels refuse an unlimited hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _cgroups(root: Path, proc: Path) -> list[Path]:
    """Return this process' cgroup and the enclosing ones. Inside a container its own looks like the root."""
    lines = (_read(proc / "self/cgroup") or "").splitlines()
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    own = root / path
    return [own, *(folder for folder in own.parents if folder.is_relative_to(root))]


def _cpu_quota(cgroup: Path) -> float | None:
    """Return the CPU quota of the cgroup (version 2, else 1) in cores; None without a limit."""
    unified = _read(cgroup / "cpu.max")
    if unified is not None:
        quota, period = unified.split()
        return None if quota == "max" else int(quota) / int(period)
    old_quota, old_period = _read(cgroup / "cpu/cpu.cfs_quota_us"), _read(cgroup / "cpu/cpu.cfs_period_us")
    if old_quota is None or old_period is None or int(old_quota) < 0:
        return None
    return int(old_quota) / int(old_period)


def _cgroup_memory_left(cgroup: Path) -> int | None:
    limit, used, stat = _read(cgroup / "memory.max"), _read(cgroup / "memory.current"), cgroup / "memory.stat"
    if limit is None:
        old = cgroup / "memory"
        limit, used, stat = (
            _read(old / "memory.limit_in_bytes"),
            _read(old / "memory.usage_in_bytes"),
            old / "memory.stat",
        )
    if limit is None or used is None or limit == "max":
        return None
    return int(limit) - int(used) + _reclaimable(_read(stat) or "")


def _reclaimable(stat: str) -> int:
    """Return the bytes of page cache, which count as used but are freed when memory is needed."""
    counters = dict(line.split() for line in stat.splitlines())
    return int(counters.get("inactive_file", 0)) + int(counters.get("active_file", 0))


def _read(path: Path) -> str | None:
    try:
        return path.read_text("ascii").strip()
    except OSError:
        return None


def is_exiting(pid: int) -> bool:
    """Return whether this process is exiting or a zombie. Exiting takes a while if it has much memory or uses a GPU."""
    try:
        state, *fields = (PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return True
    return state in "ZX" or bool(int(fields[5]) & PF_EXITING)


def is_loopback(host: str) -> bool:
    """Return whether this name or address refers to this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
