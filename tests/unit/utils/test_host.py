"""Cores and memory of hosts and containers, as files say."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from srt.utils.host import available_memory_bytes, process_age_s, usable_cores

GB = 1 << 30


def write(root: Path, files: Mapping[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def proc(tmp_path: Path) -> Path:
    return write(tmp_path / "proc", {"meminfo": f"MemTotal: {64 * GB // 1024} kB\nMemAvailable: {16 * GB // 1024} kB"})


def test_cores_are_the_affinity_without_a_quota(tmp_path: Path) -> None:
    allowed = len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path) == allowed
    assert usable_cores(write(tmp_path, {"cpu.max": "max 100000"})) == allowed


def test_a_quota_counts_in_both_versions_and_leaves_at_least_one_core(tmp_path: Path) -> None:
    assert usable_cores(write(tmp_path / "new", {"cpu.max": "150000 100000"})) == 1
    assert usable_cores(write(tmp_path / "small", {"cpu.max": "20000 100000"})) == 1
    old = {"cpu/cpu.cfs_quota_us": 100000, "cpu/cpu.cfs_period_us": 100000}
    assert usable_cores(write(tmp_path / "old", old)) == 1
    unlimited = {"cpu/cpu.cfs_quota_us": -1, "cpu/cpu.cfs_period_us": 100000}
    assert usable_cores(write(tmp_path / "unlimited", unlimited)) == len(os.sched_getaffinity(0))


def test_memory_is_what_the_kernel_calls_available_unless_the_container_has_less(tmp_path: Path) -> None:
    meminfo = proc(tmp_path)
    assert available_memory_bytes(tmp_path / "none", meminfo) == 16 * GB
    assert available_memory_bytes(write(tmp_path / "a", {"memory.max": "max", "memory.current": 5}), meminfo) == 16 * GB
    limited = {
        "memory.max": 8 * GB,
        "memory.current": 6 * GB,
        "memory.stat": f"anon 1\nactive_file {GB}\ninactive_file 0",
    }
    assert available_memory_bytes(write(tmp_path / "b", limited), meminfo) == 3 * GB
    full = {"memory.max": GB, "memory.current": 2 * GB}
    assert available_memory_bytes(write(tmp_path / "c", full), meminfo) == 0
    old = {"memory/memory.limit_in_bytes": 4 * GB, "memory/memory.usage_in_bytes": GB}
    assert available_memory_bytes(write(tmp_path / "d", old), meminfo) == 3 * GB


def test_limits_of_the_groups_around_this_process_count_too(tmp_path: Path) -> None:
    root = write(tmp_path / "cgroup", {"system.slice/memory.max": 2 * GB, "system.slice/memory.current": GB})
    write(root, {"system.slice/srt.service/memory.max": "max", "system.slice/srt.service/memory.current": 0})
    write(root, {"system.slice/srt.service/cpu.max": "100000 100000"})
    meminfo = write(proc(tmp_path), {"self/cgroup": "0::/system.slice/srt.service"})
    assert available_memory_bytes(root, meminfo) == GB
    assert usable_cores(root, meminfo) == 1


def test_a_process_knows_its_age() -> None:
    first = process_age_s()
    assert 0 < first <= process_age_s()
