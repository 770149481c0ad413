"""That the kernel of whole layers compiles and finds room, on a machine without a GPU. What it computes: tests/gpu."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from srt.kernels.build.cuda_source import compile_source, machine_code
from srt.kernels.build.hopper import ARCHITECTURE
from srt.kernels.build.shared_memory import SHARED_BYTES
from srt.kernels.decoder import resident_layers
from srt.kernels.decoder.resident_layers import Exchange, Layer, ResidentLayers, ResidentVariant, Step, _runs_at_once
from srt.kernels.gemm.packed_matrix import BF16, E4M3, Numbers
from srt.models.decoder import DecoderLayer
from tests.support.runners import make_runner

CONFIG = Path(__file__).parents[3] / "benchmarks" / "configs" / "qwen3-0.6b.json"

Widths = tuple[int, int, int, int]  # of the stream, of queries, of keys, of the MLP's inside
SMALL: Widths = (1024, 2048, 1024, 3072)  # Qwen3-0.6B
SHAPES: list[Widths] = [
    SMALL,
    (4096, 4096, 1024, 12288),  # Qwen3-8B
    (5120, 5120, 1024, 17408),  # Qwen3-14B
    (4096, 4096, 1024, 14336),  # Llama-3-8B
    (5120, 4096, 1024, 14336),  # Mistral-Nemo
]


FORMS = [E4M3, Numbers(8, 128), Numbers(4, 128), Numbers(4, 128, has_zeros=True), Numbers(4)]


def variant_of(
    widths: Widths, rows: int = 1, has_head_norm: bool = True, page_size: int = 16, form: Numbers = BF16
) -> ResidentVariant | None:
    return ResidentVariant.of(rows, widths, has_head_norm, page_size, num_processors=132, form=form)


def assert_compiles(variant: ResidentVariant) -> None:
    assert machine_code(variant.source, variant.constants, ARCHITECTURE).startswith(b"\x7fELF")
    assert_requests_all_memory(variant)


def assert_requests_all_memory(variant: ResidentVariant) -> None:
    """Check that the requested bytes hold the kernel's own structure, wherever they begin, and that one more stage would be too many.

    Only what defines the structure is compiled.
    """
    before, memory = variant.source.split("\nstruct Memory {\n")
    struct = "\nstruct Memory {\n" + memory.split("\n};\n")[0] + "\n};\n"
    check = f'static_assert(sizeof(Memory) + 1008 <= {variant.shared_bytes}, "it needs more");'
    compile_source(before + struct + check, variant.constants, ARCHITECTURE)
    assert variant.shared_bytes <= SHARED_BYTES[90] < replace(variant, stages=variant.stages + 1).shared_bytes


@pytest.mark.parametrize("widths", SHAPES, ids=str)
@pytest.mark.parametrize(("rows", "has_head_norm", "page_size"), [(1, True, 16), (1, False, 1), (2, True, 64)])
def test_every_variant_compiles_for_hopper_and_finds_room(
    widths: Widths, rows: int, has_head_norm: bool, page_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SRT_CACHE_DIR", str(tmp_path))
    variant = variant_of(widths, rows, has_head_norm, page_size)
    if variant is None:
        assert rows > 1 and widths[0] > 2048, widths
        return
    assert_compiles(variant)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("widths", [SMALL, (5120, 5120, 1024, 17408)], ids=str)
def test_every_form_of_weights_compiles_and_finds_room(
    widths: Widths, form: Numbers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SRT_CACHE_DIR", str(tmp_path))
    variant = variant_of(widths, form=form)
    assert variant is not None
    assert_compiles(variant)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("widths", SHAPES, ids=str)
def test_every_form_of_every_shape_requests_all_memory(widths: Widths, form: Numbers) -> None:
    for has_head_norm in (True, False):
        variant = variant_of(widths, has_head_norm=has_head_norm, form=form)
        assert variant is not None
        assert_requests_all_memory(variant)


def test_forms_whose_sums_would_have_several_scales_are_left_to_others() -> None:
    assert variant_of(SMALL, form=Numbers(4, 64)) is None
    assert variant_of(SMALL, form=Numbers(4, 32, has_zeros=True)) is None
    assert variant_of(SMALL, form=Numbers(4, 2048)) is None, "a group of 2048 does not divide 1024 inputs"
    assert variant_of(SMALL, rows=2, form=E4M3) is None
    assert variant_of((1536, 2048, 1024, 3072), form=Numbers(4, 128)) is None, "no whole chunks"


def test_a_ring_shorter_than_its_warps_is_not_compiled() -> None:
    variant = variant_of(SMALL)
    assert variant is not None
    with pytest.raises(RuntimeError, match="a warp that waits for a chunk"):
        machine_code(variant.source, replace(variant, stages=14).constants, ARCHITECTURE)


def test_programs_have_equal_shares_and_each_has_some() -> None:
    for widths in SHAPES:
        hidden, query_width, kv_width, inner = widths
        variant = variant_of(widths)
        assert variant is not None and 0.95 * 132 <= variant.programs <= 132
        assert all(width % (8 * variant.programs) == 0 for width in (hidden, query_width + 2 * kv_width, inner))
        assert variant.splits * kv_width // 128 <= variant.programs


def test_shapes_that_cannot_be_shared_evenly_are_left_to_others() -> None:
    assert variant_of((2560, 4096, 1024, 9728)) is None, "64 programs at most"
    assert variant_of((1000, 2048, 1024, 3072)) is None, "no whole chunks"
    assert variant_of((2048, 4096, 512, 6144)) is None, "8 heads of a group"
    assert variant_of((3072, 3072, 1024, 8192)) is None, "3, which were not seen on a GPU"
    assert variant_of((4096, 4096, 1024, 12288), rows=2) is None, "kernels of their own are faster"
    assert ResidentVariant.of(1, SMALL, True, 16, num_processors=114) is None, "an H100 PCIe's processors"


@pytest.mark.parametrize("structure", [Layer, Exchange, Step], ids=lambda one: one.__name__)
def test_structures_are_those_of_the_kernel(structure: type[ctypes.Structure]) -> None:
    """They travel as bytes: no compiler compares them."""
    variant = variant_of(SMALL)
    assert variant is not None
    (body,) = re.findall(rf"struct {structure.__name__} \{{(.*?)\}};", variant.source, re.DOTALL)
    kinds = {"int": ctypes.c_int, "float": ctypes.c_float, "long long": ctypes.c_longlong}
    members = re.findall(r"^\s*(?:const )?([\w ]+?)\s*(\*?)\s*(\w+);", body, re.MULTILINE)
    expected = [(name, ctypes.c_void_p if is_pointer else kinds[kind]) for kind, is_pointer, name in members]
    assert list(structure._fields_) == expected and expected


@torch.inference_mode()
def test_the_kernel_is_told_where_everything_of_its_layers_and_rows_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads(CONFIG.read_text()) | {"num_hidden_layers": 2, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    runner = make_runner(tmp_path, 16, load_format="dummy", dtype="bfloat16")
    launches: list[tuple[Any, ...]] = []
    monkeypatch.setattr(resident_layers, "tensor_map", Map)
    monkeypatch.setattr(resident_layers, "launch", lambda *args, **options: launches.append(args))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    variant = variant_of(SMALL)
    assert variant is not None
    pool, tables = runner.state.token_to_kv_pool, runner.state.req_to_token_pool
    layers = ResidentLayers(runner.loaded.our_model, variant, pool, torch.device("cpu"))
    row = torch.zeros(1, dtype=torch.int64)
    batch = SimpleNamespace(req_to_token_pool=tables, out_cache_loc=row, req_pool_indices=row + 1, seq_lens=row + 2)
    layers(row, row, batch)  # type: ignore[arg-type]  # what it asks of a batch

    ((_, grid, _, (exchange, step)),) = launches
    assert grid == (128, 1, 1)
    assert step.num_layers == 2 and step.k_stride == pool.get_kv(0)[0].stride(0)
    assert step.seq_lens == batch.seq_lens.data_ptr() and step.page_table == tables.page_table.data_ptr()
    places = {getattr(exchange, field[0]) for field in Exchange._fields_}
    assert len(places) == len(Exchange._fields_)
    told = (Layer * 2).from_address(step.layers)
    weights = (ctypes.c_longlong * (2 * 4 * 16)).from_address(step.maps)
    for index, layer in enumerate(cast("list[DecoderLayer]", list(runner.loaded.our_model.model.layers))):
        attention, mlp = layer.self_attn, layer.gated_mlp
        assert attention.head_norms is not None
        named = {
            "norm": layer.input_layernorm.norm.weight,
            "mlp_norm": layer.post_attention_layernorm.norm.weight,
            "q_norm": attention.head_norms[0].weight,
            "k_norm": attention.head_norms[1].weight,
            "k_buffer": pool.get_kv(index)[0],
            "v_buffer": pool.get_kv(index)[1],
        }
        assert {name: getattr(told[index], name) for name in named} == {k: v.data_ptr() for k, v in named.items()}
        in_order = attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj
        mapped = [weights[(4 * index + i) * 16] for i in range(4)]
        matrices = [linear.weight.matrix for linear in in_order]
        assert mapped == [matrix.data_ptr() for matrix in matrices if matrix is not None]


@pytest.mark.parametrize(
    ("answer", "runs"),
    [((0, 0), True), ((0, 1), False), ((1, None), True), (None, True)],
    ids=["alone", "beside others", "an old driver", "old bindings"],
)
def test_a_device_that_others_use_at_the_same_time_is_left_to_kernels_that_wait_for_nobody(
    answer: tuple[int, int | None] | None,
    runs: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    attributes = SimpleNamespace() if answer is None else SimpleNamespace(CU_DEVICE_ATTRIBUTE_MPS_ENABLED="shared")
    driver = SimpleNamespace(
        CUdevice_attribute=attributes,
        cuDeviceGet=lambda index: (0, f"device {index}"),
        cuDeviceGetAttribute=lambda attribute, device: (
            answer if (attribute, device) == ("shared", "device 1") else None
        ),
    )
    monkeypatch.setattr(resident_layers, "cuda", lambda: (driver, None))
    monkeypatch.setattr(resident_layers, "runs_on", lambda device, variant: True)
    monkeypatch.setattr(resident_layers, "most_clusters", lambda variant, device, size: 132)
    variant = variant_of(SMALL)
    assert variant is not None
    with caplog.at_level(logging.INFO):
        assert _runs_at_once(variant, torch.device("cuda", 1)) == runs
    assert [said.endswith("(MPS).") for said in caplog.messages] == ([] if runs else [True])


class Map:
    """As large as the driver's, and begins with the matrix's address."""

    def __init__(self, address: int, *_: object) -> None:
        self._numbers = (ctypes.c_longlong * 16)(address)

    def getPtr(self) -> int:
        return ctypes.addressof(self._numbers)
