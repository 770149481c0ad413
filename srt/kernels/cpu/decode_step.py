"""Run the decode step of a model on a CPU in one call of compiled code: all layers and the output layer.

Separate operations of PyTorch spend most of a small model's step on being called. `decode_step.cpp` has the code; it computes in float32,
whatever the type of the weights.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import Tensor

from srt.kernels.build.cpu_library import load_library
from srt.utils.layer_spec import NO_SCALES, FeedForward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from srt.layers.embedding import ParallelLMHead
    from srt.layers.linear import LinearLayer
    from srt.layers.quantization.weight import Float8Matrix, IntegerMatrix, LinearWeight
    from srt.mem_cache.memory_pool import FeaturePool, MHATokenToKVPool, ReqToTokenPool
    from srt.model_executor.forward_batch_info import ForwardBatch
    from srt.models.causal_lm import CausalLM
    from srt.models.decoder import Decoder, DecoderLayer
    from srt.utils.model_config import ModelConfig

KINDS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 3}
_SIZES: Final = {kind: dtype.itemsize for dtype, kind in KINDS.items()}
DTYPES: Final = (torch.float32, torch.bfloat16)
"""What embeddings, norms, keys and values can be."""
MOST_ROWS: Final = 32
"""Steps of more rows are left to PyTorch."""
FEW_TOKENS: Final = 8
"""The most prompt tokens of a step that this code computes for a model that is not small: with more, PyTorch may be faster."""
SMALL_BYTES: Final = 32 << 20
"""The most bytes of a small model's weights. To call PyTorch's operations takes longer than to read these."""
LANES: Final = 8
_PAIRED_LANES: Final = 2 * LANES
"""What the number of inputs must be a multiple of if weights are integers."""


class _Matrix(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("values", "bias", "scales", "input_scale")),
        *((name, c_int64) for name in ("num_outputs", "num_inputs", "group", "rounded")),
        *((name, c_int32) for name in ("kind", "most")),
    )


class CpuLayer(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, _Matrix) for name in ("qkv", "o", "gate_up", "down")),
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_int64) for name in ("window", "group")),
    )


class CpuHeads(Structure):
    _fields_ = (("num_heads", c_int64), ("num_kv_heads", c_int64), ("head_dim", c_int64), ("scale", c_float))


class CpuModel(Structure):
    _fields_ = (
        ("layers", POINTER(CpuLayer)),
        ("num_layers", c_int64),
        *((name, c_void_p) for name in ("embedding", "final_norm", "frequencies")),
        ("head", _Matrix),
        ("heads", CpuHeads),
        ("hidden_size", c_int64),
        ("page_size", c_int64),
        ("eps", c_float),
        ("angle_factor", c_float),
        ("kind", c_int32),
        ("num_taps", c_int32),
        ("taps", POINTER(c_int64)),
        ("fuse", _Matrix),
        *((name, c_void_p) for name in ("fuse_norm", "features")),
        ("fuse_eps", c_float),
        ("embedding_norm", c_void_p),
        ("begins_normed", c_int32),
        ("ends_normed", c_int32),
    )


class _PageTable(Structure):
    _fields_ = (("pages", c_void_p), ("stride", c_int64), ("locations", c_void_p))


class _Rows(Structure):
    _fields_ = (
        ("num_rows", c_int64),
        *((name, c_void_p) for name in ("ids", "positions", "slots")),
        ("tables", POINTER(_PageTable)),
        *((name, c_void_p) for name in ("logits", "taps", "vectors", "streams")),
    )


class CpuDecodeStep:
    """The compiled decode step of one model and its memory. Its results are those of the model but for rounding."""

    def __init__(self, library: ctypes.CDLL, model: CausalLM, config: ModelConfig, pool: MHATokenToKVPool) -> None:
        """Reads all tensors in place: they must not move while this object lives."""
        self._kept: list[
            tuple[Tensor, Tensor]
        ] = []  # tensors that the compiled code reads, and the weights they are copies of
        self._head_copy: tuple[IntegerMatrix, ParallelLMHead] | None = (
            None  # of the output layer in 8 bits, if it has one
        )
        decoder = cast("Decoder", model.model)
        layers = [self._layer_of(index, layer, pool) for index, layer in enumerate(_layers_of(decoder))]
        self._layers = (CpuLayer * len(layers))(*layers)
        spec, rope = config.layers[0].attention, decoder.rotary_emb
        heads = CpuHeads(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale)
        self._model = CpuModel(
            layers=self._layers,
            num_layers=len(layers),
            embedding=address_of(decoder.embed_tokens.weight),
            final_norm=self._floats(decoder.norm.weight),
            frequencies=self._floats(rope.frequencies),
            head=self._head_of(model.lm_head, config),
            heads=heads,
            hidden_size=config.hidden_size,
            page_size=pool.page_size,
            eps=config.norm.eps,
            angle_factor=rope.attention_factor,
            kind=KINDS[pool.dtype],
        )
        self._taps = None if pool.features is None else self._tap(pool.features, config.hidden_size)
        self._dtype = pool.dtype
        self._num_bytes = sum(
            matrix.num_outputs * matrix.num_inputs * _SIZES[matrix.kind]
            for layer in layers
            for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down)
        )
        self.library = library
        self._run = library.srt_run
        self._runner: int | None = library.srt_new_runner(ctypes.byref(self._model), torch.get_num_threads())
        weakref.finalize(self, library.srt_delete_runner, self._runner)
        self._rows: dict[
            int, tuple[_Rows, ForwardBatch, Tensor]
        ] = {}  # by number of rows: a batch's tensors stay the same

    @property
    def runner(self) -> int:
        """The address of the compiled code's own object, valid while this object lives."""
        assert self._runner is not None, "`of` returns no step without it"
        return self._runner

    def new_logits(self, num_rows: int) -> Tensor:
        """Allocate memory for the logits [rows, vocabulary] of a step."""
        return torch.empty((num_rows, self._model.head.num_outputs), dtype=self._dtype)

    @property
    def few_tokens(self) -> int:
        """The most tokens of prompts in a step that this code runs in less time than PyTorch's operations."""
        return MOST_ROWS if self._num_bytes <= SMALL_BYTES else FEW_TOKENS

    @property
    def taps(self) -> int | None:
        """The address to which steps write the inputs of tapped layers; None if nothing reads them."""
        return None if self._taps is None else address_of(self._taps)

    def _tap(self, features: FeaturePool, hidden_size: int) -> Tensor:
        """Let steps fuse and store the inputs of tapped layers. Return the memory for these."""
        model, weights = self._model, features.weights
        assert weights is not None, "models of whose output something else is made are not compiled"
        model.num_taps, model.taps = len(features.taps), (c_int64 * len(features.taps))(*features.taps)
        model.fuse, model.features = matrix_of(weights.matrix, None), address_of(features.memory)
        if weights.norm is not None:
            model.fuse_norm, model.fuse_eps = self._floats(weights.norm), weights.eps
        return torch.empty((MOST_ROWS, len(features.taps) * hidden_size))

    @classmethod
    def of(cls, model: CausalLM, config: ModelConfig, pool: MHATokenToKVPool) -> CpuDecodeStep | None:
        """Return the step, or None if the library is not there or cannot run this model."""
        library = load_library() if can_run(model, config, pool) else None
        step = None if library is None else cls(library, model, config, pool)
        return None if step is None or step._runner is None else step  # no runner: the model has too many layers

    def logits_into(self, batch: ForwardBatch, out: Tensor) -> None:
        """Run the step of a batch in which every row decodes, and write its logits [rows, vocabulary]."""
        num_rows = batch.batch_size
        if num_rows not in self._rows:
            self._rows[num_rows] = self._rows_of(batch, out), batch, out
        rows, known, _ = self._rows[num_rows]
        assert known is batch, f"another batch of {num_rows} rows has the addresses that were looked up"
        self._run(self._runner, ctypes.byref(rows))

    def logits_of(self, batch: ForwardBatch, slots: Tensor) -> Tensor:
        """Run a batch of several tokens a row, with the slot of each token. Return the logits [tokens, vocabulary] of all tokens.

        Each token gets what a step of its own would give it, bit for bit. Tokens of a slot follow each other.
        """
        out = self.new_logits(len(slots))
        rows = self._rows_of(batch, out)
        rows.num_rows, rows.slots = len(slots), address_of(slots)
        self._run(self._runner, ctypes.byref(rows))
        return out

    def _rows_of(self, batch: ForwardBatch, out: Tensor) -> _Rows:
        rows = _rows_of(batch, out)
        rows.taps = self.taps
        return rows

    def read_weights_again(self) -> None:
        """Bring copies up to date, because the model's weights were replaced in place."""
        for kept, values in self._kept:
            kept.copy_(values)
        if self._head_copy is not None:
            integers, head = self._head_copy
            latest = head.in_8_bits()
            integers.numbers.copy_(latest.numbers)
            integers.scales.copy_(latest.scales)

    def _layer_of(self, index: int, layer: DecoderLayer, pool: MHATokenToKVPool) -> CpuLayer:
        attention, mlp = layer.self_attn, layer.gated_mlp
        q_norm, k_norm = attention.q_norm, attention.k_norm
        keys, values = pool.get_kv(index)
        return CpuLayer(
            input_norm=self._floats(layer.input_layernorm.weight),
            post_norm=self._floats(layer.post_attention_layernorm.weight),
            q_norm=None if q_norm is None else self._floats(q_norm.weight),
            k_norm=None if k_norm is None else self._floats(k_norm.weight),
            qkv=self._product_of(attention.qkv_proj),
            o=self._product_of(attention.o_proj),
            gate_up=self._product_of(mlp.gate_up_proj),
            down=self._product_of(mlp.down_proj),
            keys=address_of(keys),
            values=address_of(values),
            window=attention.attn.window or 0,
            group=pool.group_of[index],
        )

    def _product_of(self, linear: LinearLayer) -> _Matrix:
        bias = None if linear.bias is None else self._floats(linear.bias)
        integers = linear.weight.integer_matrix
        if integers is not None:
            return _integer_matrix(integers, bias)
        numbers = linear.weight.float8_matrix
        if numbers is not None:
            return _float8_matrix(numbers, bias)
        matrix = linear.affine.matrix
        assert matrix is not None, "`can_run` lets no other weights pass"
        return matrix_of(matrix, bias)

    def _head_of(self, head: ParallelLMHead, config: ModelConfig) -> _Matrix:
        """With --quantization int8 decoding reads a copy of the output layer in 8 bits, because it is a large part of a small model."""
        if config.weight_formats.method != "int8" or head.weight.shape[1] % _PAIRED_LANES:
            return matrix_of(head.weight, None)
        integers = head.in_8_bits()
        self._head_copy = integers, head
        return _integer_matrix(integers, None)

    def _floats(self, values: Tensor) -> int:
        """Return the address of the values as float32, which this object keeps."""
        kept = values.float().contiguous()
        self._kept.append((kept, values))
        return address_of(kept)


def can_run(model: CausalLM, config: ModelConfig, pool: MHATokenToKVPool) -> bool:
    """Return whether the compiled step computes what these layers do, with weights and memory of these types and sizes."""
    decoder, dtype = cast("Decoder", model.model), model.lm_head.weight.dtype
    if dtype not in DTYPES or pool.dtype != dtype or config.scales != NO_SCALES:
        return False
    if any(not isinstance(layer.feed_forward, FeedForward) for layer in config.layers):
        return False
    linears = [
        linear
        for layer in _layers_of(decoder)
        for linear in (
            layer.self_attn.qkv_proj,
            layer.self_attn.o_proj,
            layer.gated_mlp.gate_up_proj,
            layer.gated_mlp.down_proj,
        )
    ]
    widths = config.hidden_size, *(layer.feed_forward.size for layer in config.layers)
    return (
        all(_is_readable(linear.weight, dtype) for linear in linears)
        and _is_regular(model.lm_head.weight, dtype)
        and all(width % LANES == 0 for width in widths)
        and all(layer.attention.head_dim % (2 * LANES) == 0 for layer in config.layers)
        and 2 * decoder.rotary_emb.frequencies.numel() == config.layers[0].attention.head_dim
    )


def _layers_of(decoder: Decoder) -> Sequence[DecoderLayer]:
    return cast("list[DecoderLayer]", list(decoder.layers))


def _is_readable(weight: LinearWeight, dtype: torch.dtype) -> bool:
    if weight.integer_matrix is not None:
        return weight.shape[1] % _PAIRED_LANES == 0
    if weight.float8_matrix is not None:
        return weight.shape[1] % LANES == 0
    return weight.matrix is not None and _is_regular(weight.matrix, dtype)


def _is_regular(matrix: Tensor, dtype: torch.dtype) -> bool:
    return matrix.dtype == dtype and matrix.is_contiguous() and matrix.shape[1] % LANES == 0


def matrix_of(matrix: Tensor, bias: int | None) -> _Matrix:
    outputs, inputs = matrix.shape
    return _Matrix(
        values=address_of(matrix), bias=bias, num_outputs=outputs, num_inputs=inputs, kind=KINDS[matrix.dtype]
    )


def _integer_matrix(integers: IntegerMatrix, bias: int | None) -> _Matrix:
    """Inputs become integers of 8 or 16 bits, or of fewer than 16 where a sum, of which each lane has an eighth, would not fit in 32."""
    numbers, scales, rounds_inputs = integers
    largest_sum, products = 2**31 - 1, numbers.shape[1] // LANES
    most = 127 if rounds_inputs else min(2**15 - 1, largest_sum // (128 * products))
    matrix = matrix_of(numbers, bias)
    matrix.scales, matrix.most = address_of(scales), most
    return matrix


def _float8_matrix(weight: Float8Matrix, bias: int | None) -> _Matrix:
    matrix = matrix_of(weight.numbers, bias)
    matrix.scales, matrix.group, matrix.rounded = address_of(weight.scales), weight.group_size, weight.rounded_inputs
    matrix.input_scale = None if weight.input_scale is None else address_of(weight.input_scale)
    return matrix


def _rows_of(batch: ForwardBatch, out: Tensor) -> _Rows:
    tables: ReqToTokenPool = batch.req_to_token_pool
    locations = batch.out_cache_loc, *batch.window_locations
    page_tables = [
        _PageTable(address_of(table), table.stride(0), address_of(where))
        for table, where in zip(tables.page_tables, locations, strict=True)
    ]
    return _Rows(
        batch.batch_size,
        address_of(batch.input_ids),
        address_of(batch.positions),
        address_of(batch.req_pool_indices),
        (_PageTable * len(page_tables))(*page_tables),
        address_of(out),
    )


def address_of(tensor: Tensor) -> int:
    assert tensor.is_contiguous(), "the compiled code reads whole tensors"
    return tensor.data_ptr()
