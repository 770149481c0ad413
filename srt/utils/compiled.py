"""Load the mypyc-compiled form of the scheduler's modules, if it was built from exactly these sources.

    python -m scripts.compile_scheduler        builds it; an installation builds it too if there is a C compiler

The result is in `srt/compiled/`, in a folder named after a hash of the sources and of the interpreter. It is used only if that hash
still matches, so it cannot be out of date: after an edit the sources run uncompiled.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

SWITCH = "SRT_COMPILED"  # 0: never use the compiled form; a folder: use the build in it, whatever the sources are
GROUP = "srt_scheduler__mypyc"  # the library with all of the code; each module's own file only refers to it
SUFFIX = EXTENSION_SUFFIXES[0]  # names the interpreter's version and the machine
PACKAGE = Path(__file__).parents[1]
MODULES = (
    "srt.managers.scheduler.clients",
    "srt.managers.scheduler.counters",
    "srt.managers.scheduler.deadlines",
    "srt.managers.scheduler.draft_length",
    "srt.managers.scheduler.engine_changes",
    "srt.managers.scheduler.forecast",
    "srt.managers.scheduler.kv_memory",
    "srt.managers.scheduler.outbox",
    "srt.managers.scheduler.retry_after",
    "srt.managers.scheduler.plan_draft",
    "srt.managers.scheduler.planner",
    "srt.managers.scheduler.pauses",
    "srt.managers.scheduler.ranking",
    "srt.managers.scheduler.preempted",
    "srt.managers.scheduler.core",
    "srt.managers.scheduler.request",
    "srt.managers.scheduler.needs",
    "srt.managers.scheduler.resources",
    "srt.managers.scheduler.results",
    "srt.managers.scheduler.scheduler",
    "srt.managers.scheduler.slots",
    "srt.managers.scheduler.step_times",
    "srt.managers.scheduler.trials",
    "srt.managers.scheduler.waiting",
    "srt.managers.scheduler.worker_stream",
    "srt.mem_cache.allocator",
    "srt.mem_cache.radix_cache",
    "srt.mem_cache.window_pages",
    "srt.protocol.arrays",
)
# Not compiled, but read by the compiler: the types that compiled code takes from them are checked and converted as written there.
TYPED = (
    "srt.constrained.constraint",
    "srt.managers.scheduler.effects",  # msgspec structs: compiled, their class keywords (`frozen`, `gc`) would be lost
    "srt.mem_cache.tables_hash",
    "srt.protocol.engine_work",
    "srt.protocol.host_messages",
    "srt.protocol.labels",
    "srt.protocol.messages",
    "srt.protocol.resource",
    "srt.protocol.views",
    "srt.protocol.wire",
    "srt.sampling.draw_checks",
    "srt.sampling.foreign_fields",
    "srt.sampling.foreign_table",
    "srt.sampling.parameter_checks",
    "srt.sampling.sampling_params",
    "srt.server_args",
    "srt.utils.config_values",
    "srt.utils.deterministic",
    "srt.utils.errors",
    "srt.utils.host_options",
    "srt.utils.lora_options",
    "srt.utils.model_error",
    "srt.utils.option",
    "srt.utils.pipeline_stage",
    "srt.utils.quantization",
    "srt.utils.rank_options",
    "srt.utils.speculation",
    "srt.version",
)


def source(name: str) -> Path:
    return PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py")


def built_folder() -> Path:
    """Return the folder for the compiled form of these exact sources and this interpreter; it exists only if it was built."""
    import hashlib  # imported here because every process imports this module and few call this function

    digest = hashlib.blake2b(SUFFIX.encode(), digest_size=8)
    for name in (*MODULES, *TYPED):
        digest.update(source(name).read_bytes())
    return PACKAGE / "compiled" / digest.hexdigest()


class CompiledFinder(MetaPathFinder):
    """Finds the compiled form of a module, if there is one. The sources are hashed at the first import of a listed module."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._has_looked = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES and fullname != GROUP:
            return None
        if not self._has_looked:
            self._has_looked = True
            self._folder = _usable_folder()
        if self._folder is None:
            return None
        file = self._folder / (fullname + SUFFIX)
        return spec_from_file_location(fullname, file, loader=ExtensionFileLoader(fullname, str(file)))


def install_finder() -> None:
    """Make later imports of these modules use their compiled form if it matches the sources."""
    sys.meta_path.insert(0, CompiledFinder())


def _usable_folder() -> Path | None:
    switch = os.environ.get(SWITCH, "")
    if switch == "0":
        return None
    folder = Path(switch) if switch else built_folder()
    return folder if folder.is_dir() else None


def plain_modules() -> list[str]:
    """Name those of MODULES that this process runs as Python; all are imported for it."""
    return [name for name in MODULES if not is_compiled(import_module(name))]


def is_compiled(module: ModuleType) -> bool:
    return str(module.__file__).endswith(SUFFIX)
