"""Run all layers of a decode step of one or two rows in one kernel: for Hopper, bfloat16, and the decoders of Qwen3 and Llama.

Weights have bfloat16, or e4m3 or 4-bit numbers.

Such a step has little to compute. Separate kernels take 4 to 5 µs each, mostly to start, to wait for each other and to load the previous
result. Here programs stay on their multiprocessors: weights stream through their shared memory while they exchange results, six times
per layer.
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor

from srt.kernels.build.cuda_source import checked, cuda, machine_code
from srt.kernels.build.hopper import (
    ARCHITECTURE,
    BLOCK_K,
    CAPABILITY,
    WIDEST_LOAD,
    box_map,
    launch,
    most_clusters,
    pointer,
    runs_on,
    source_of,
    tensor_map,
    with_alignment,
)
from srt.kernels.build.precompile import is_precompiled
from srt.kernels.build.shared_memory import SHARED_BYTES
from srt.kernels.gemm.packed_matrix import BF16, Numbers, PackedMatrix

if TYPE_CHECKING:
    from srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from srt.model_executor.forward_batch_info import ForwardBatch
    from srt.models.causal_lm import CausalLM
    from srt.models.decoder import Decoder, DecoderLayer

logger = logging.getLogger(__name__)

_SOURCE: Final = Path(__file__).with_suffix(".cu")
ROWS: Final = (1, 2)
"""Numbers of rows for which the kernel is faster (measured on an H200). 4 rows of 0.6B, or 2 rows of 8B, take 5 % longer than with separate
kernels; so models with more than _SHORT columns use it for one row only."""
_UNIT: Final = 8  # rows of a weight that are loaded together
_WARPS: Final = 15
_CHUNKS: Final = {16: 512, 8: 512, 4: 1024}  # columns of a weight per load, by the bits of its numbers
_SUMMED: Final = 128  # columns of a weight of 8 or 4 bits that must have the same scale
_MOST_SHARING: Final = 16
_LEAST_SCALES: Final = 4
_MOST_SPLITS: Final = 16
_HEAD_DIM: Final = 128
_FEWEST_STAGES: Final = 16
_MAP_BYTES: Final = 128
_SHORT: Final = 2048  # up to this many columns of the residual stream, the ring holds most of a layer's weights
_BYTES_IN_FLIGHT: Final = 16_384, 49_152
"""Weights that a program has in flight, for streams up to _SHORT and longer ones. With more, other programs' words are delayed too."""
_GROUPS: Final = (2, 4, 5)
"""Supported numbers of query heads per KV head, as tested on a GPU. With more than 5 the registers do not suffice."""
_MOST_POSITIONS: Final = 12_288, 2560
"""Largest number of positions of a row, for streams up to _SHORT and longer ones. With more, separate kernels are faster, because their
attention reads faster. On an H200 with longer streams (8B and 14B) this kernel is 1 % faster at 2,019 positions, and 3 to 4 % slower at
6,019."""
_MOST_PACKED_POSITIONS: Final = {8: 6144, 4: 8192}
"""The same for weights of these bits, measured with 8B: at 1,024 positions this kernel takes 10 % and 29 % less."""
_FULL_SHARE: Final = 0.95  # smallest share of the multiprocessors that must have a program


@dataclass(frozen=True, slots=True)
class ResidentVariant:
    """The kernel for one shape of layers."""

    rows: int
    hidden: int
    query_width: int
    kv_width: int
    inner: int
    has_head_norm: bool
    page_size: int
    programs: int
    stages: int
    form: Numbers = BF16

    @classmethod
    def of(
        cls,
        rows: int,
        widths: tuple[int, int, int, int],
        has_head_norm: bool,
        page_size: int,
        num_processors: int,
        form: Numbers = BF16,
    ) -> ResidentVariant | None:
        """Return the variant for these `widths` of stream, queries, keys and the MLP's inner dimension; None if there is none."""
        hidden, query_width, kv_width, inner = widths
        units = math.gcd(hidden, query_width + 2 * kv_width, inner) // _UNIT
        programs = next((n for n in range(num_processors, 0, -1) if units and units % n == 0), 0)
        chunk = _CHUNKS[form.bits]
        has_chunks = hidden % chunk == query_width % chunk == inner % chunk == 0
        if programs < _FULL_SHARE * num_processors or not has_chunks or (rows > 1 and hidden > _SHORT):
            return None
        if rows * kv_width // _HEAD_DIM > programs or query_width not in [group * kv_width for group in _GROUPS]:
            return None
        if query_width * rows % (2 * programs):
            return None
        if form.bits < 16 and (rows > 1 or not _has_scales(form, widths)):
            return None
        variant = cls(rows, hidden, query_width, kv_width, inner, has_head_norm, page_size, programs, 1, form)
        stages = (SHARED_BYTES[90] - variant.shared_bytes) // (variant._stage_bytes + 16) + 1
        return replace(variant, stages=stages) if stages >= _FEWEST_STAGES else None

    @property
    def group(self) -> int:
        return self.query_width // self.kv_width

    @property
    def chunk(self) -> int:
        """Number of columns of a weight per load."""
        return _CHUNKS[self.form.bits]

    @property
    def _stage_bytes(self) -> int:
        return _UNIT * self.chunk * self.form.bits // 8

    @property
    def scale_boxes(self) -> tuple[tuple[int, int], ...]:
        """Numbers of groups and outputs of a program whose scales are loaded together, for each product of a layer."""
        inputs = self.hidden, self.query_width, self.hidden, self.inner
        outputs = self.query_width + 2 * self.kv_width, self.hidden, self.inner, self.hidden
        group = self.form.group
        return tuple((k // group if group else 1, n // self.programs) for k, n in zip(inputs, outputs, strict=True))

    @property
    def sharing(self) -> int:
        """Number of neighbouring outputs of which one scale is read: of blocks several, which have equal ones."""
        if self.form.bits != 8 or not self.form.group:
            return 1
        return _MOST_SHARING if all(outputs % _MOST_SHARING == 0 for _, outputs in self.scale_boxes) else _UNIT

    @property
    def _scale_bytes(self) -> int:
        """Shared memory for a layer's scales and zero points."""
        if self.form.bits == 16:
            return 0
        item = 16 // self.sharing if self.sharing > 1 else 4 if self.form.bits == 8 else 2
        items = (item, *([2] if self.form.has_zeros else []))
        boxes = [-(-groups * outputs * item // 128) * 128 for groups, outputs in self.scale_boxes for item in items]
        gates = len(items) * 2
        return sum(boxes) + sum(boxes[gates : gates + len(items)])

    @property
    def splits(self) -> int:
        """Number of programs that share the positions of a row and KV head."""
        most = min(_MOST_SPLITS, self.programs * _HEAD_DIM // (self.rows * self.kv_width))
        return 1 << (most.bit_length() - 1)

    @property
    def is_short(self) -> bool:
        return self.hidden <= _SHORT

    @property
    def _layers_ahead(self) -> int:
        """Number of layers for whose norms there is room in shared memory."""
        return 2 if self.is_short else 1

    @property
    def most_positions(self) -> int:
        """Largest number of positions, the row's own included, with which this kernel is faster."""
        return _MOST_PACKED_POSITIONS.get(self.form.bits, _MOST_POSITIONS[not self.is_short])

    @property
    def name(self) -> str:
        return "resident_layers"

    @property
    def source(self) -> str:
        return source_of(_SOURCE)

    @property
    def num_threads(self) -> int:
        return 32 * (_WARPS + 1)

    @property
    def cluster(self) -> int:
        return 1

    @property
    def shared_bytes(self) -> int:
        """Shared memory: the ring and its barriers, sums of squares, then either x and parts of products, or attention's data."""
        widest = max(self.hidden, self.query_width, self.inner)
        is_packed = self.form.bits < 16
        x = 2 * widest if is_packed else 4 * self.rows * widest // self.chunk * 4 * (self.chunk // 8 + 4)
        of_hidden, of_inner = self.hidden // _UNIT // self.programs, self.inner // _UNIT // self.programs
        packed = (self.query_width + 2 * self.kv_width) // _UNIT // self.programs
        columns = packed * self.hidden, of_hidden * self.query_width, 2 * of_inner * self.hidden, of_hidden * self.inner
        parts = 4 * max(columns) // self.chunk * self.rows * _UNIT
        if self.form.bits == 4:  # x as integers: bytes in other banks, and two factors of two numbers for each _SUMMED
            x += 32
            parts += 2 * 2 * 4 * widest // _SUMMED
        attending = _WARPS if self.group <= 2 or is_packed else _WARPS // 2
        attention = 4 * (self.group * _HEAD_DIM + _HEAD_DIM + attending * self.group * (2 + _HEAD_DIM))
        norms = self._layers_ahead * (2 * 2 * self.hidden + 4 * _HEAD_DIM + 16 + 4 * 8)
        scales = self._layers_ahead * self._scale_bytes + (128 + 2 * 128 if is_packed else 0)  # zeros, two alignments
        others = norms + scales + 4 * self.rows * _WARPS + max(x + parts, attention) + 64  # 64: for alignment
        return with_alignment(self.stages * (self._stage_bytes + 16) + others)

    @property
    def constants(self) -> Mapping[str, int]:
        return {
            "ROWS": self.rows,
            "HIDDEN": self.hidden,
            "QUERY_WIDTH": self.query_width,
            "KV_WIDTH": self.kv_width,
            "INNER": self.inner,
            "HEAD_DIM": _HEAD_DIM,
            "HEAD_NORM": int(self.has_head_norm),
            "PAGE_SIZE": self.page_size,
            "PROGRAMS": self.programs,
            "SPLITS": self.splits,
            "CHUNK": self.chunk,
            "STAGES": self.stages,
            "LAYERS_AHEAD": self._layers_ahead,
            "IN_FLIGHT": _BYTES_IN_FLIGHT[not self.is_short] // self._stage_bytes,
            "BITS": self.form.bits,
            "SCALE_INPUTS": self.form.group,
            "SHARING": self.sharing,
            "HAS_ZEROS": int(self.form.has_zeros),
        }


def _has_scales(form: Numbers, widths: tuple[int, int, int, int]) -> bool:
    """Return whether groups of inputs are such that sums of _SUMMED products have one scale, and a program's fit in one load."""
    hidden, query_width, _, inner = widths
    if not form.group:
        return True
    is_even = all(width % form.group == 0 for width in (hidden, query_width, inner))
    return form.group % _SUMMED == 0 and is_even and max(hidden, query_width, inner) // form.group <= WIDEST_LOAD


class Layer(ctypes.Structure):
    """Mirror of the kernel's argument in resident_layers.cu."""

    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("norm", "mlp_norm", "q_norm", "k_norm", "k_buffer", "v_buffer")
    )


class Exchange(ctypes.Structure):
    """Mirror of the kernel's argument in resident_layers.cu."""

    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in ("packed", "parts", "factors", "attended", "added", "active", "stream", "tag")
    )


class Step(ctypes.Structure):
    """Mirror of the kernel's argument in resident_layers.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("maps", "layers", "embedded", "out", "cosines", "sines")),
        *((name, ctypes.c_void_p) for name in ("locations", "slots", "seq_lens", "page_table")),
        *((name, ctypes.c_longlong) for name in ("page_stride", "k_stride", "v_stride")),
        ("num_layers", ctypes.c_int),
        *((name, ctypes.c_float) for name in ("eps", "head_eps", "scale_log2")),
    )


class ResidentLayers:
    """A model's layers on one device and its KV memory. Called like the model, with the same results but for rounding.

    Steps must run one after the other, because they share the memory through which programs communicate.
    """

    def __init__(
        self, model: CausalLM, variant: ResidentVariant, kv_pool: MHATokenToKVPool, device: torch.device
    ) -> None:
        self._model, self._variant, self._device = cast("Decoder", model.model), variant, device
        layers = cast("list[DecoderLayer]", list(self._model.layers))
        first = layers[0]
        self._norm_eps = first.input_layernorm.norm.eps
        self._head_eps = first.self_attn.head_norms[0].eps if first.self_attn.head_norms else 0.0
        self._scale_log2 = first.self_attn.attn.scale * math.log2(math.e)
        maps = [one for layer in layers for one in _maps_of(layer, variant)]
        self._maps = _on_device(b"".join(maps), device)
        self._strides = tuple(buffer.stride(0) for buffer in kv_pool.get_kv(0))
        tables = [
            Layer(**{name: pointer(one) for name, one in _tensors_of(layer, kv_pool).items()}) for layer in layers
        ]
        self._layers = _on_device(b"".join(map(bytes, tables)), device)
        self._num_layers = len(layers)
        rows, heads = variant.rows, variant.query_width // _HEAD_DIM
        counts = (
            rows * (variant.query_width + 2 * variant.kv_width) // 2,
            rows * variant.query_width * variant.splits,
            rows * heads * variant.splits * 2,
            rows * variant.query_width // 2,
            rows * variant.hidden // 2,
            rows * variant.inner // 2,
            rows * variant.hidden // 2,
        )
        self._words = [torch.zeros(count, dtype=torch.int64, device=device) for count in counts]
        self._tag = torch.full((1,), 2, dtype=torch.int32, device=device)  # words are 0 at first

    @classmethod
    def of(
        cls,
        model: CausalLM,
        kv_pool: MHATokenToKVPool,
        tables: ReqToTokenPool,
        device: torch.device,
        rows: int,
    ) -> ResidentLayers | None:
        """Return the runner; None if there is no variant for the model. If a variant exists but cannot run, this is logged."""
        layers = cast("list[DecoderLayer]", list(model.model.layers))
        variant = _variant_of(layers, kv_pool, tables.page_size, device, rows)
        if variant is None:
            return None
        is_compiled_elsewhere = is_precompiled(
            variant, lambda: machine_code(variant.source, variant.constants, ARCHITECTURE)
        )
        if not is_compiled_elsewhere and not _runs_at_once(variant, device):
            return None
        return cls(model, variant, kv_pool, device)

    @property
    def most_positions(self) -> int:
        """Largest number of positions, the row's own included, with which this kernel is faster."""
        return self._variant.most_positions

    def __call__(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        model, variant, tables = self._model, self._variant, batch.req_to_token_pool
        rotation = model.rotary_emb(positions)
        embedded = model.embed_tokens(input_ids)
        out = torch.empty_like(embedded)
        assert embedded.shape == (variant.rows, variant.hidden) and embedded.is_contiguous()
        integers = batch.out_cache_loc, batch.req_pool_indices, batch.seq_lens
        assert all(tensor.dtype is torch.int64 for tensor in integers) and tables.page_table.dtype is torch.int32
        step = Step(
            *map(
                pointer,
                (self._maps, self._layers, embedded, out, rotation.cos, rotation.sin, *integers, tables.page_table),
            ),
            tables.page_table.stride(0),
            *self._strides,
            self._num_layers,
            self._norm_eps,
            self._head_eps,
            self._scale_log2,
        )
        exchange = Exchange(*map(pointer, self._words), pointer(self._tag))
        with torch.cuda.device(self._device):
            launch(variant, (variant.programs, 1, 1), (), (exchange, step), is_dependent=True)
        return model.norm(out)  # type: ignore[no-any-return]


def _runs_at_once(variant: ResidentVariant, device: torch.device) -> bool:
    """Return whether all programs can run at once, which they must because they wait for each other."""
    if not runs_on(device, variant) or most_clusters(variant, device.index, 1) < variant.programs:
        return False
    if _is_shared(device):
        logger.info(
            "Decode steps of one or two rows use separate kernels, because other processes may use this GPU at the same time (MPS)."
        )
        return False
    return True


def _is_shared(device: torch.device) -> bool:
    """Return whether kernels of other processes may run beside ours. A driver that cannot tell is not asked again."""
    driver, _ = cuda()
    attribute = getattr(driver.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_MPS_ENABLED", None)
    if attribute is None:
        return False
    status, is_shared = driver.cuDeviceGetAttribute(attribute, checked(driver.cuDeviceGet(device.index)))
    return int(status) == 0 and bool(is_shared)


def _variant_of(
    layers: list[DecoderLayer], kv_pool: MHATokenToKVPool, page_size: int, device: torch.device, rows: int
) -> ResidentVariant | None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != CAPABILITY:
        return None
    first = layers[0].self_attn
    tensors = [tensor for layer in layers for tensor in _tensors_of(layer, kv_pool).values()]
    if any(tensor is not None and tensor.dtype is not torch.bfloat16 for tensor in tensors):
        return None
    forms = {_form_of(matrix) for layer in layers for matrix in _matrices_of(layer)}
    form = forms.pop()
    if form is None or forms:
        return None
    if first.attn.head_dim != _HEAD_DIM:
        return None
    widths = (
        first.o_proj.weight.shape[0],
        first.attn.num_heads * _HEAD_DIM,
        first.attn.num_kv_heads * _HEAD_DIM,
        layers[0].gated_mlp.down_proj.weight.shape[1],
    )
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    return ResidentVariant.of(rows, widths, first.head_norms is not None, page_size, num_processors, form)


def _matrices_of(layer: DecoderLayer) -> list[Tensor | PackedMatrix | None]:
    """Return the weights of the linear layers in the order in which the kernel expects them; None for those that it cannot read."""
    attention, mlp = layer.self_attn, layer.gated_mlp
    weights = [linear.weight for linear in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)]
    return [weight.packed_matrix if weight.matrix is None else weight.matrix for weight in weights]


def _form_of(matrix: Tensor | PackedMatrix | None) -> Numbers | None:
    """Return how the kernel reads the weight; None if it cannot."""
    if isinstance(matrix, PackedMatrix):
        if matrix.form.bits == 8 and len(matrix.scales) > 1 and not matrix.rounds_groups:
            return None  # neighbouring outputs may have different scales
        return Numbers(matrix.form.bits, matrix.group if len(matrix.scales) > 1 else 0, matrix.form.has_zeros)
    return BF16 if matrix is not None and matrix.dtype is torch.bfloat16 else None


def _maps_of(layer: DecoderLayer, variant: ResidentVariant) -> list[bytes]:
    """Return the tensor maps of a layer's weights, then of their scales and of their zero points, if they have any."""
    weights, scales, zeros = [], [], []
    for matrix, (groups, outputs) in zip(_matrices_of(layer), variant.scale_boxes, strict=True):
        assert matrix is not None
        if not isinstance(matrix, PackedMatrix):
            weights.append(_map_of(matrix, variant))
            continue
        weights.append(_map_of(matrix.numbers.view(torch.bfloat16), variant))
        if variant.sharing > 1:
            scales.append(_shared_scales_map(matrix.scales, groups, outputs, variant.sharing))
        else:
            scales.append(box_map(matrix.scales, groups, outputs))
        if matrix.zeros is not None:
            zeros.append(box_map(matrix.zeros, groups, outputs))
    return [ctypes.string_at(int(one.getPtr()), _MAP_BYTES) for one in weights + scales + zeros]


def _map_of(weight: Tensor, variant: ResidentVariant) -> Any:
    """Return the tensor map for loads of a chunk of a unit's rows, as consecutive blocks."""
    rows, columns = weight.shape
    lines = variant.chunk * variant.form.bits // 16 // BLOCK_K
    shape, box = (BLOCK_K, rows, columns // BLOCK_K), (BLOCK_K, _UNIT, lines)
    return tensor_map(weight.data_ptr(), shape, (2 * columns, 2 * BLOCK_K), box)


def _shared_scales_map(scales: Tensor, groups: int, outputs: int, sharing: int) -> Any:
    """Return the tensor map for the first 4 scales of each `sharing` outputs, which is the least that can be loaded."""
    rows, columns = scales.shape
    shape, box = (_LEAST_SCALES, columns // sharing, rows), (_LEAST_SCALES, outputs // sharing, groups)
    return tensor_map(scales.data_ptr(), shape, (4 * sharing, 4 * columns), box, 4, is_swizzled=False)


def _on_device(data: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _tensors_of(layer: DecoderLayer, kv_pool: MHATokenToKVPool) -> dict[str, Tensor | None]:
    """Return the tensors by the kernel's names."""
    attention = layer.self_attn
    q_norm, k_norm = (None, None) if attention.head_norms is None else attention.head_norms
    k_buffer, v_buffer = kv_pool.get_kv(attention.attn.layer_id)
    return {
        "norm": layer.input_layernorm.norm.weight,
        "mlp_norm": layer.post_attention_layernorm.norm.weight,
        "q_norm": None if q_norm is None else q_norm.weight,
        "k_norm": None if k_norm is None else k_norm.weight,
        "k_buffer": k_buffer,
        "v_buffer": v_buffer,
    }
