"""That streamed attention over latents compiles, finds room, and is right, without a GPU: with a coroutine for each of its threads."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest
import torch

from srt.kernels.attention.latent_attention import PROGRAMS_PER_PROCESSOR, LatentScratch
from srt.kernels.attention.stream_latents import LatentDivision, LatentVariant, clusters_at_once
from srt.kernels.build.cuda_source import machine_code
from srt.kernels.build.hopper import ARCHITECTURE
from tests.support.latent_reference import latent_reference
from tests.unit.kernels.paged_world import make_paged_world

PROCESSOR_BYTES = 228 * 1024  # of shared memory, of which each program takes one KiB more than it asks for
PROCESSORS = 132
AT_ONCE = {8: 30, 4: 62, 2: 132}  # clusters, by size, on an H200


@pytest.mark.parametrize(("page_size", "cluster"), [(16, 1), (16, 8), (64, 2)])
def test_variants_compile_for_hopper_and_two_programs_find_room(
    page_size: int, cluster: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SRT_CACHE_DIR", str(tmp_path))
    variant = LatentVariant(page_size, cluster)
    assert machine_code(variant.source, variant.constants, ARCHITECTURE).startswith(b"\x7fELF")
    assert PROGRAMS_PER_PROCESSOR * (variant.shared_bytes + 1024) <= PROCESSOR_BYTES


def test_a_ring_without_room_for_the_results_is_not_compiled() -> None:
    variant = LatentVariant(16, 1)
    with pytest.raises(RuntimeError, match="results find room"):
        machine_code(variant.source, {**variant.constants, "SLOTS": 1}, ARCHITECTURE)


@pytest.mark.parametrize(
    ("rows", "heads", "context", "cluster", "groups"),
    [
        (1, 16, 1 << 17, 8, 4),
        (1, 16, 300, 8, 1),
        (1, 16, 512, 8, 2),
        (1, 16, 33, 2, 1),
        (1, 16, 1, 1, 1),
        (8, 16, 1 << 17, 8, 3),
        (16, 16, 1 << 17, 8, 1),
        (1, 128, 1 << 17, 8, 3),
        (31, 16, 1 << 17, 4, 1),
        (33, 20, 1 << 17, 2, 1),
        (64, 16, 1 << 17, 2, 1),
        (100, 16, 1 << 17, 2, 1),
        (256, 16, 1 << 17, 1, 1),
        (1000, 16, 1 << 17, 1, 1),
    ],
)
def test_rows_are_divided_so_that_clusters_run_at_once(
    rows: int, heads: int, context: int, cluster: int, groups: int
) -> None:
    assert LatentDivision.of(rows, heads, context, AT_ONCE) == LatentDivision(cluster, groups)


@pytest.mark.parametrize(
    ("processors", "at_once"),
    [(132, AT_ONCE), (132, {8: 33, 4: 66, 2: 132}), (78, {8: 18, 4: 38, 2: 78}), (16, {8: 2, 4: 7, 2: 16})],
)
def test_the_scratch_holds_the_results_of_every_division(processors: int, at_once: dict[int, int]) -> None:
    rank = 8
    scratch = LatentScratch.allocate(processors, rank, torch.device("cpu"))
    for rows, heads in product((1, 2, 3, 7, 8, 9, 15, 16, 17, 31), (8, 16, 20, 128)):
        division = LatentDivision.of(rows, heads, 1 << 17, at_once)
        if division.groups > 1:
            clusters = rows * -(-heads // 16)
            assert clusters * division.cluster <= scratch.arrived.numel()
            assert clusters * division.cluster * division.groups * 16 <= scratch.lse.numel()
            assert clusters * division.groups * 16 * rank <= scratch.partial.numel()


@pytest.mark.parametrize(("at_once", "cluster"), [({8: 0, 4: 0, 2: 0}, 1), ({8: 0, 4: 7, 2: 16}, 4)])
def test_clusters_that_do_not_fit_the_device_are_not_chosen(at_once: dict[int, int], cluster: int) -> None:
    assert LatentDivision.of(1, 16, 1 << 17, at_once) == LatentDivision(cluster, 1)


def test_what_it_does_not_support_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, bf16, runs = torch.device("cuda", 0), torch.bfloat16, [True]
    monkeypatch.setattr("srt.kernels.attention.stream_latents.runs_on", lambda device, variant: runs[0])
    monkeypatch.setattr("srt.kernels.attention.stream_latents.most_clusters", lambda variant, device, size: 264 // size)
    assert clusters_at_once(cuda, bf16, 512, 576, 16) == {8: 33, 4: 66, 2: 132}
    assert clusters_at_once(cuda, torch.float16, 512, 576, 16) is None
    assert clusters_at_once(cuda, bf16, 256, 320, 16) is None, "other latents"
    assert clusters_at_once(cuda, bf16, 512, 576, 1) is None, "a load brings positions of one page"
    runs[0] = False
    assert clusters_at_once(cuda, bf16, 512, 576, 16) is None


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
SCALE = 0.2
HOST = Path(__file__).with_name("stream_latents_on_host.cpp")


def run_on_host(
    folder: Path,
    division: LatentDivision,
    num_heads: int,
    page_size: int,
    lengths: list[int],
    *bugs: tuple[str, str],
) -> float:
    """Return the largest error of a row, computed by the kernel with a coroutine for each of its threads. RuntimeError for other faults."""
    variant = LatentVariant(page_size, division.cluster)
    _, _, kernel = variant.source.partition("// The kernel.\n")
    for right, wrong in bugs:
        assert kernel.count(right) == 1, right
        kernel = kernel.replace(right, wrong)
    (folder / "kernel.h").write_text(kernel)
    library = folder / "kernel.so"
    constants = {**variant.constants, "MEMORY_BYTES": variant.shared_bytes}
    defines = [f"-D{name}={value}" for name, value in constants.items()]
    command = ["g++", "-O1", "-std=c++17", "-w", "-shared", "-fPIC", "-ffp-contract=off", f"-I{folder}", *defines]
    subprocess.run([*command, str(HOST), "-o", str(library)], check=True)

    world = make_paged_world(lengths, 1, 576, page_size, torch.bfloat16)
    latents, table, rows = world.kv.k_buffer, world.kv.page_table, len(lengths)
    q = torch.randn(num_heads, rows, 512).bfloat16().transpose(0, 1)
    rotated = torch.randn(rows, num_heads, 192).bfloat16()[..., 128:]
    out, tiles = torch.full((rows, num_heads, 512), 7.0, dtype=torch.bfloat16), -(-num_heads // 16)
    pairs = rows * tiles * division.groups * 16
    partial, lse = torch.full((pairs, 512), torch.nan), torch.full((pairs * division.cluster,), torch.nan)
    arrived = torch.zeros(rows * tiles * division.cluster, dtype=torch.int32)
    tensors = q, rotated, table, world.req_pool_indices, world.seq_lens, partial, lse, arrived, out
    strides = *q.stride()[:2], *rotated.stride()[:2], table.stride(0)
    run = ctypes.CDLL(str(library)).run
    run.restype = ctypes.c_char_p
    fault = run(
        ctypes.c_void_p(latents.data_ptr()), ctypes.c_longlong(latents.stride(0)),
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors), ctypes.c_float(SCALE * math.log2(math.e)), num_heads, *strides,
        division.cluster * division.groups, tiles, rows,
    )  # fmt: skip
    if fault is not None:
        raise RuntimeError(fault.decode())
    assert not arrived.any(), "a counter is not left at zero"
    both, errors = torch.cat((q, rotated), dim=-1), []
    for row, (slot, length) in enumerate(zip(world.req_pool_indices.tolist(), lengths, strict=True)):
        expected = torch.zeros(1, num_heads, 512)
        if length:
            expected = latent_reference(
                both[row : row + 1], latents, 512, table, page_size, [(slot, length - 1, 1)], SCALE
            )
        errors.append(float((out[row].double() - expected[0]).norm() / expected.norm().clamp(min=1e-3)))
    return max(math.inf if math.isnan(error) else error for error in errors)


@needs_compiler
@pytest.mark.parametrize(
    ("division", "num_heads", "page_size", "lengths"),
    [
        (LatentDivision(1, 1), 16, 16, [1, 17, 200, 0]),
        (LatentDivision(1, 1), 16, 16, [16 * 33 + 1]),  # the loading warp looks up 32 blocks at a time
        (LatentDivision(4, 1), 20, 16, [150, 31]),
        (LatentDivision(2, 3), 8, 32, [300, 300, 130, 16]),  # by three groups, three, two, and one
        (LatentDivision(8, 2), 16, 64, [290, 0]),
    ],
)
def test_every_row_gets_its_attention(
    division: LatentDivision, num_heads: int, page_size: int, lengths: list[int], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    assert run_on_host(tmp_path, division, num_heads, page_size, lengths) < 4e-3


@needs_compiler
@pytest.mark.parametrize(
    "bug",
    [
        ("totals[tile][i] *= shrink, ", ""),
        ("(2 * warp + lane / 16) ^ lane % 8", "2 * warp + lane / 16"),
        ("if (live < BLOCK) {", "if (false) {"),
        ("add_to(sum, some[i][other], share);", "add_to(sum, some[i][0], share);"),
    ],
    ids=["an old total", "no swizzle", "no zeros", "another group"],
)
def test_a_wrong_kernel_would_be_noticed(bug: tuple[str, str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert run_on_host(tmp_path, LatentDivision(2, 2), 16, 16, [470], bug) > 2e-2


@needs_compiler
@pytest.mark.parametrize(
    "bugs",
    [
        [
            (
                "SLOTS;\n#pragma unroll\n      for (int line",
                "SLOTS;\n      arrive_after_reads(empty + 8 * slot);\n      for (int line",
            ),
            ("      arrive_after_reads(empty + 8 * slot);\n    }", "    }"),
        ],
        [("    sync_warps();\n#pragma unroll\n    for", "#pragma unroll\n    for")],
        [
            ("sync_cluster(), sync_cluster();", "sync_cluster();"),
            ("    sync_cluster();\n  } else {", "    sync_warps();\n  } else {"),
        ],
    ],
    ids=["a slot that is still read", "sums that are not written yet", "results that are not written yet"],
)
def test_a_barrier_left_out_would_be_noticed(bugs: list[tuple[str, str]], tmp_path: Path) -> None:
    torch.manual_seed(0)
    try:
        error = run_on_host(tmp_path, LatentDivision(2, 1), 16, 16, [470], *bugs)
    except RuntimeError:
        return
    assert error > 2e-2


@needs_compiler
def test_a_program_that_ends_while_others_read_its_memory_would_be_noticed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    loader = "sync_cluster(), sync_cluster();", "sync_cluster();"
    others = "if constexpr (CLUSTER > 1) sync_cluster();  // others may still read this program's results", ""
    with pytest.raises(RuntimeError, match="has ended"):
        run_on_host(tmp_path, LatentDivision(2, 1), 16, 16, [40], loader, others)
