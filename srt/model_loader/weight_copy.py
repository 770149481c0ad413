"""Copy tensors from a checkpoint's files to parameters on any device: several threads read blocks and upload them as they arrive.

file ── read ──> a thread's buffer (pinned for a GPU) ── its stream ──> device ── cut, converted ──> parameter

Blocks that are stored as they are used are uploaded into the parameter, and on a CPU read into it. Blocks that follow each other in a
file are read at once. The first are read while parameters of later ones are allocated.
"""

from __future__ import annotations

import math
import os
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock

import torch

from srt.layers.weights import WeightPiece
from srt.utils.checkpoint import ITEM_BYTES, TensorHeader
from srt.utils.host import usable_cores
from srt.utils.model_error import ModelError

BLOCK_BYTES = 16 << 20
CHECKED_BYTES = 1 << 20  # fit in a core's cache
MOST_THREADS = 12
MOST_OPEN_FILES = 64
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}


@dataclass(frozen=True, slots=True)
class _Block:
    """Some whole rows of a stored tensor, contiguous in its file, and the part of a parameter that they fill."""

    file: Path
    offset: int  # in the file
    num_bytes: int
    dtype: torch.dtype
    width: int  # elements per row
    columns: slice  # the columns that this rank needs
    target: torch.Tensor  # [rows, columns]
    quantise: Callable[[torch.Tensor], None] | None  # stores the rows, unless they are stored as they are

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes

    @property
    def needed_bytes(self) -> int:
        return self.num_bytes * self.target.shape[1] // self.width

    @property
    def is_stored_as_used(self) -> bool:
        """Whether the block and its target have the same bytes."""
        target = self.target
        return (
            self.quantise is None
            and target.dtype == self.dtype
            and target.shape[1] == self.width
            and target.is_contiguous()
        )


@dataclass(frozen=True, slots=True)
class _Span:
    """Blocks that follow each other in a file."""

    blocks: list[_Block]

    @property
    def file(self) -> Path:
        return self.blocks[0].file

    @property
    def offset(self) -> int:
        return self.blocks[0].offset

    @property
    def num_bytes(self) -> int:
        return self.blocks[-1].end - self.offset

    @property
    def needed_bytes(self) -> int:
        return sum(block.needed_bytes for block in self.blocks)

    def is_followed_by(self, block: _Block) -> bool:
        """Return whether this block can be read with the span, and be viewed as what it is then."""
        return (
            block.file == self.file
            and block.offset == self.blocks[-1].end
            and block.end - self.offset <= BLOCK_BYTES
            and (block.offset - self.offset) % block.dtype.itemsize == 0
        )


def copy_weights(
    headers: Mapping[str, TensorHeader],
    pieces: Sequence[WeightPiece],
    device: torch.device,
    progress: Callable[[int, int], None],
    prepare: Callable[[WeightPiece], None] = lambda piece: None,
) -> None:
    """Fill the pieces on `device`, and return when all are complete; ModelError for a file that cannot be read.

    `prepare` is called for each piece before it is filled, while others are. It may allocate the parameter, but not compute with it.
    """
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    _in_threads(headers, pieces, progress, prepare, lambda files: _Copier(device, stream, files).run)


def read_weights(
    headers: Mapping[str, TensorHeader], pieces: Sequence[WeightPiece], progress: Callable[[int, int], None]
) -> None:
    """Read what would fill the pieces, and keep nothing of it; ModelError for a file that cannot be read."""
    _in_threads(headers, pieces, progress, lambda piece: None, lambda files: partial(_read_all, files))


class _Files:
    """Files that stay open until all is read, up to a number; what is beyond it is opened for each read."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._lock = Lock()

    def read(self, file: Path, offset: int, into: Sequence[torch.Tensor]) -> None:
        """Fill tensors of bytes, one after the other, from a file; ModelError if it cannot be read or is too short."""
        try:
            with self._opened(file) as descriptor:
                _fill(descriptor, file, offset, into)
        except OSError as error:
            raise ModelError(f"{file} cannot be read: {error.strerror}.") from error

    @contextmanager
    def _opened(self, file: Path) -> Iterator[int]:
        with self._lock:
            kept = self._descriptors.get(file)
            if kept is None and len(self._descriptors) < MOST_OPEN_FILES:
                kept = self._descriptors[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        if kept is not None:
            yield kept
            return
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)


_Report = Callable[[int], None]
_Spans = queue.SimpleQueue[_Span | None]
"""Of which each thread takes what it can, until it takes None."""


def _in_threads(
    headers: Mapping[str, TensorHeader],
    pieces: Sequence[WeightPiece],
    progress: Callable[[int, int], None],
    prepare: Callable[[WeightPiece], None],
    new_work: Callable[[_Files], Callable[[_Spans, _Report], None]],
) -> None:
    """Divide the pieces into spans, which threads take as soon as they are known."""
    total = sum(piece.num_elements * ITEM_BYTES[headers[piece.name].dtype] for piece in pieces)
    progress(0, total)
    spans: _Spans = queue.SimpleQueue()
    done, lock = 0, Lock()

    def report(num_bytes: int) -> None:
        nonlocal done
        with lock:
            done += num_bytes
            progress(done, total)

    num_threads = min(MOST_THREADS, usable_cores(), max(1, -(-total // BLOCK_BYTES)))
    with closing(_Files()) as files, ThreadPoolExecutor(num_threads) as pool:
        threads = [pool.submit(lambda: new_work(files)(spans, report)) for _ in range(num_threads)]
        try:
            for span in _in_spans(_in_file_order(headers, pieces, prepare)):
                spans.put(span)
        finally:
            for _ in threads:
                spans.put(None)
        for thread in threads:
            thread.result()
    progress(total, total)


def _in_file_order(
    headers: Mapping[str, TensorHeader], pieces: Sequence[WeightPiece], prepare: Callable[[WeightPiece], None]
) -> Iterator[_Block]:
    for piece in sorted(pieces, key=lambda p: (str(headers[p.name].file), headers[p.name].start)):
        prepare(piece)
        if piece.size:
            yield from _blocks_of(piece, headers[piece.name])


def _in_spans(blocks: Iterator[_Block]) -> Iterator[_Span]:
    span: _Span | None = None
    for block in blocks:
        if span is not None and span.is_followed_by(block):
            span.blocks.append(block)
            continue
        if span is not None:
            yield span
        span = _Span([block])
    if span is not None:
        yield span


def _blocks_of(piece: WeightPiece, header: TensorHeader) -> Iterator[_Block]:
    """Yield the blocks that fill `piece`. A vector or a number is treated as a matrix of one row."""
    shape = piece.stored_shape
    assert piece.dim < 2 >= len(shape), (piece.name, piece.shape, piece.dim)
    height, width = shape if len(shape) == 2 else (1, math.prod(shape))
    first_row, num_rows, columns = piece.start, piece.size, slice(0, width)
    if len(shape) < 2 or piece.stored_dim == 1:
        first_row, num_rows, columns = 0, height, piece.stored_range
    else:
        assert piece.step == 1, f"{piece.name}: rows apart from each other"
    target = piece.target().view(1, -1) if len(shape) < 2 else piece.target()
    target_row = 0 if piece.dim == 1 else piece.target_start
    row_bytes = width * ITEM_BYTES[header.dtype]
    first_row += (piece.stored_index or 0) * height
    rows_at_once = max(1, BLOCK_BYTES // row_bytes)
    for begin in range(0, num_rows, rows_at_once):
        count = min(rows_at_once, num_rows - begin)
        yield _Block(
            header.file,
            header.start + (first_row + begin) * row_bytes,
            count * row_bytes,
            DTYPES[header.dtype],
            width,
            columns,
            target[begin : begin + count],
            None if piece.quantise is None else partial(piece.quantise, target_row + begin),
        )


class _Copier:
    """Work of one thread, with two buffers: one is read into while the other is uploaded."""

    def __init__(self, device: torch.device, after: torch.cuda.Stream | None, files: _Files) -> None:
        """On a GPU, nothing is written before what is under way on the stream `after`."""
        self._device = device
        self._files = files
        self._is_cuda = after is not None
        self._buffers = [self._new_buffer(0) for _ in range(2 if self._is_cuda else 1)]
        self._uploaded = [torch.cuda.Event() if self._is_cuda else None for _ in self._buffers]
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None
        if self._stream is not None and after is not None:
            self._stream.wait_stream(after)

    def run(self, spans: _Spans, report: _Report) -> None:
        """Copy spans until none are left."""
        turn = 0
        # Inference mode and the current stream are per thread.
        with torch.inference_mode(), torch.cuda.stream(self._stream) if self._stream else nullcontext():
            while (span := spans.get()) is not None:
                self._copy(span, turn)
                report(span.needed_bytes)
                turn = (turn + 1) % len(self._buffers)
        if self._stream is not None:
            self._stream.synchronize()

    def _copy(self, span: _Span, turn: int) -> None:
        uploaded = self._uploaded[turn]
        if uploaded is not None:
            uploaded.synchronize()
        if span.num_bytes > len(self._buffers[turn]):
            self._buffers[turn] = self._new_buffer(max(span.num_bytes, BLOCK_BYTES))
        stored = self._buffers[turn][: span.num_bytes]
        parts = [stored[block.offset - span.offset :][: block.num_bytes] for block in span.blocks]
        if self._is_cuda:
            self._files.read(span.file, span.offset, [stored])
        else:
            targets = zip(span.blocks, parts, strict=True)
            into = [_bytes_of(b.target) if b.is_stored_as_used else part for b, part in targets]
            self._files.read(span.file, span.offset, into)
        for block, part in zip(span.blocks, parts, strict=True):
            if self._is_cuda or not block.is_stored_as_used:
                self._store(block, part.view(block.dtype).view(-1, block.width))
        if uploaded is not None:
            uploaded.record()

    def _store(self, block: _Block, rows: torch.Tensor) -> None:
        if block.is_stored_as_used:
            block.target.copy_(rows, non_blocking=True)
            return
        needed = rows.to(self._device, non_blocking=True)[:, block.columns]
        if block.quantise is None:
            block.target.copy_(needed)
        else:
            block.quantise(needed)

    def _new_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _read_all(files: _Files, spans: _Spans, report: _Report) -> None:
    buffer = torch.empty(CHECKED_BYTES, dtype=torch.uint8)
    while (span := spans.get()) is not None:
        for begin in range(0, span.num_bytes, CHECKED_BYTES):
            files.read(span.file, span.offset + begin, [buffer[: span.num_bytes - begin]])
        report(span.needed_bytes)


def _fill(descriptor: int, file: Path, offset: int, into: Sequence[torch.Tensor]) -> None:
    for tensor in into:
        left = tensor.numpy().data
        while left:
            count = os.preadv(descriptor, [left], offset)
            if count == 0:
                raise ModelError(f"{file} was cut short while it was read.")
            left, offset = left[count:], offset + count
