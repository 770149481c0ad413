"""What reading and multiplying by themselves take of a GPU's power: kernels that do nothing else, for seconds each.

    python -m benchmarks.power [--seconds 3] [--models qwen3-8b …] [--jsonl FILE]

A GPU that is at its power limit lowers its clock, and is slower than what it reads and multiplies would let it be. So beside each way
of doing either stand watts, clock and picojoules for a byte or an operation, all that the GPU takes included. Then, for each model, how
long steps would take whose bytes and operations follow each other at the most watts that were seen, with the least that a byte and an
operation took. That is no bound: both at the same time would share what the GPU takes anyway. Hopper only, as the instruction is.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks import limits, models
from benchmarks.gpu_readings import watched
from srt.kernels.build.hopper import launch, runs_on, source_of, with_alignment

FOLDER = Path(__file__).parent
MEMORY = 1 << 33  # bytes
SIDE = 8192  # of cuBLAS's product
LINE = 128  # bytes of a row of a block of 64 columns
TURNS = 3000
STEPS = ((1, 384), (64, 1152), (256, 1152))  # rows, and the positions that each is behind
LATE = 0.6  # of the time of a measurement: readings lag by up to a second


@dataclass(frozen=True, slots=True)
class Read:
    """Blocks into shared memory, and from there to the tensor cores or not. Processors that have no program may rest."""

    block: int  # bytes
    ring: int  # blocks
    programs: int  # of a processor
    multiplies: bool = False
    eighths: int = 8  # of the processors

    name = "power_read"
    cluster = 1
    num_threads = 160

    @property
    def text(self) -> str:
        by = "" if self.eighths == 8 else f", by {self.eighths}/8 of the processors"
        return f"read, blocks of {self.block >> 10} KiB{', multiplied' if self.multiplies else ''}{by}"

    @property
    def source(self) -> str:
        return source_of(FOLDER / f"{self.name}.cu")

    @property
    def shared_bytes(self) -> int:
        return with_alignment(self.block * self.ring)

    @property
    def constants(self) -> Mapping[str, int]:
        numbers = {"BLOCK": self.block, "RING": self.ring, "PROGRAMS": self.programs}
        return {**numbers, "MULTIPLIES": int(self.multiplies)}


@dataclass(frozen=True, slots=True)
class Multiply:
    """By one instruction after the other, of operands that stay in shared memory."""

    columns: int  # of the instruction
    warpgroups: int
    stages: int = 3

    name = "power_multiply"
    cluster = 1

    @property
    def text(self) -> str:
        return f"multiply, {self.columns} columns, {self.warpgroups} warpgroups"

    @property
    def source(self) -> str:
        return source_of(FOLDER / f"{self.name}.cu", self.columns)

    @property
    def num_threads(self) -> int:
        return 128 * self.warpgroups

    @property
    def shared_bytes(self) -> int:
        return with_alignment(self.stages * (64 * self.warpgroups + self.columns) * LINE)

    @property
    def constants(self) -> Mapping[str, int]:
        return {"COLUMNS": self.columns, "WARPGROUPS": self.warpgroups, "STAGES": self.stages}

    @property
    def operations(self) -> int:
        """Of a turn of one program."""
        return 2 * 64 * self.warpgroups * self.columns * 64 * self.stages


READS = (
    *(Read(*cut, multiplies) for cut in ((8192, 8, 2), (2048, 32, 2)) for multiplies in (False, True)),
    *(Read(16384, 12, 1, True, eighths) for eighths in (8, 7, 6, 5, 4)),
)
PRODUCTS = tuple(Multiply(*cut) for cut in ((64, 2), (128, 2), (192, 3), (256, 2)))


@dataclass(frozen=True, slots=True)
class Found:
    """One way of doing it. The amount is of bytes or of operations."""

    what: str
    reads: bool
    per_s: float
    watts: float
    mhz: float

    @property
    def picojoules(self) -> float:
        return self.watts / self.per_s * 1e12

    @property
    def line(self) -> str:
        unit, each = ("TB/s", "a byte") if self.reads else ("TFLOP/s", "an operation")
        return (
            f"{self.what:60} {self.per_s / 1e12:8.2f} {unit:8} {self.watts:4.0f} W {self.mhz:5.0f} MHz "
            f"{self.picojoules:8.2f} pJ {each}"
        )


def measure(what: str, reads: bool, amount: float, work: Callable[[], object], seconds: float) -> Found:
    """Of work that is launched again and again."""
    work()
    torch.cuda.synchronize()
    begin_s, count = time.perf_counter(), 0
    with watched(torch.device("cuda")) as readings:
        while (took_s := time.perf_counter() - begin_s) < seconds:
            for _ in range(4):
                work()
            torch.cuda.synchronize()
            count += 4
    return Found(what, reads, amount * count / took_s, readings.watts_from(LATE), readings.mhz_from(LATE))


def all_found(seconds: float) -> Iterator[Found]:
    device = torch.device("cuda")
    memory = torch.empty(MEMORY // 2, dtype=torch.bfloat16, device=device)
    for part in memory.split(1 << 29):
        part.normal_()  # zeros would take less
    out = torch.zeros(1024, device=device)
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count

    def launched(variant: Read | Multiply, programs: int, count: int) -> Callable[[], None]:
        return partial(launch, variant, (programs, 1, 1), (), (memory, out, count))

    for read in READS:
        work = launched(read, num_processors * read.eighths // 8 * read.programs, MEMORY // read.block)
        yield measure(read.text, True, MEMORY, work, seconds)
    for product in PRODUCTS:
        work = launched(product, num_processors, TURNS)
        yield measure(product.text, False, product.operations * TURNS * num_processors, work, seconds)
    a, b = (memory[i * SIDE**2 : (i + 1) * SIDE**2].view(SIDE, SIDE) for i in range(2))
    multiply = partial(torch.mm, a, b.t(), out=torch.empty_like(a))
    yield measure("multiply, cuBLAS", False, 2 * SIDE**3, multiply, seconds)


def step_s(found: list[Found], shape: limits.Shape, rows: int, context: float) -> float:
    """One after the other: all bytes, then all operations."""
    watts = max(one.watts for one in found)
    byte, operation = (min(one.picojoules for one in found if one.reads == reads) for reads in (True, False))
    device = limits.Device("joules, not seconds", 1e12 / byte, 1e12 / operation)
    return (shape.read_s(device, rows, context) + shape.products_s(device, rows)) / watts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument(
        "--models", nargs="*", default=["qwen3-0.6b", "qwen3-8b", "qwen3-14b"], help="shapes in configs"
    )
    parser.add_argument("--jsonl", help="append the result to this file")
    options = parser.parse_args()
    if options.seconds < 0.5:
        parser.error("--seconds: power is read as the mean of a while; take 0.5 or more")
    if not torch.cuda.is_available() or not runs_on(torch.device("cuda"), READS[0]):
        parser.error("This needs a GPU of compute capability 9.0.")
    try:
        at_rest = torch.cuda.power_draw() / 1e3
    except ModuleNotFoundError:
        parser.error("Without nvidia-ml-py power cannot be read.")
    shapes = {name: limits.Shape.of(models.folder_of(name)) for name in options.models}
    print(f"{torch.cuda.get_device_name()}, {at_rest:.0f} W at rest; {limits.versions()}")
    found = []
    for one in all_found(options.seconds):
        print(one.line, flush=True)
        found.append(one)
    for name, shape in shapes.items():
        steps = ", ".join(f"{rows} × {at}: {step_s(found, shape, rows, at) * 1e3:.2f}" for rows, at in STEPS)
        print(f"{name}, ms of steps whose bytes and operations follow each other: {steps}")
    lines = [asdict(one) for one in found]
    limits.write_jsonl(options.jsonl, {"benchmark": "power", "lines": lines, "versions": limits.versions()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
