"""Find arrivals at barriers that overtake loads from shared memory, in the machine code of a kernel for Hopper.

An instruction of Hopper has 16 bytes. One that takes long, as a load, names one of six counters, which changes when it ends. Every
instruction says on which counters it waits before it begins. Loads of one warp from shared memory end in the order in which they begin,
so an instruction that waits for one waits for those before it too.

The code is read from top to bottom, whatever its branches. Loads through generic pointers are not counted.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import triton

DISASSEMBLER: Final = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_NO_COUNTER: Final = 7


@dataclass(frozen=True, slots=True)
class Instruction:
    text: str
    counter: int  # that its result changes, or _NO_COUNTER
    waits_for: int  # a bit for each counter


def instructions_of(code: bytes, folder: Path) -> list[Instruction]:
    file = folder / "kernel.cubin"
    file.write_bytes(code)
    shown = subprocess.run([DISASSEMBLER, "-sass", file], check=True, text=True, capture_output=True).stdout
    found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+([^;]*);\s+/\* 0x[0-9a-f]{16} \*/\s+/\* 0x([0-9a-f]{16}) \*/", shown)
    upper = [(text, int(bits, 16)) for text, bits in found]
    return [Instruction(text, bits >> 46 & 7, bits >> 52 & 63) for text, bits in upper]


def reads_under_way_at_arrivals(instructions: list[Instruction]) -> list[tuple[str, str]]:
    """Return pairs of an arrival and a load before it, in the order of the code, whose end nothing has waited for."""
    found, loads = list[tuple[str, str]](), list[Instruction]()
    for one in instructions:
        ended = [i for i, load in enumerate(loads) if one.waits_for >> load.counter & 1]
        if ended:
            del loads[: ended[-1] + 1]
        name = one.text.split()[1 if one.text.startswith("@") else 0]
        if name == "SYNCS.ARRIVE.TRANS64.A1T0":
            found += [(one.text, load.text) for load in loads]
        elif name.startswith("LDS") and one.counter != _NO_COUNTER:
            loads.append(one)
        elif name == "EXIT" and not one.text.startswith("@"):
            loads.clear()
    return found
