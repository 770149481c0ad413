"""Run SGLang's benchmark as its package has it, without the server's half: `python bench_serving.py --backend …`.

The benchmark imports one constant and the module `network` from the server's half, which would bring kernels, TorchVision and
FlashInfer along. Two packages are therefore entered without their own `__init__`; what the benchmark sends and reads is untouched.
"""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType


def enter_without_init(package: str, folder: Path) -> ModuleType:
    """Register a package of this folder: its modules can be imported, and nothing in its `__init__` is run."""
    module = ModuleType(package)
    module.__path__ = [str(folder)]
    sys.modules[package] = module
    return module


def main() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    server_half = Path(spec.submodule_search_locations[0]) / "srt"
    enter_without_init("sglang.srt.utils", server_half / "utils")
    enter_without_init("sglang.srt.disaggregation", server_half / "disaggregation")
    name = "sglang.srt.disaggregation.utils"
    source = (server_half / "disaggregation/utils.py").read_text("utf-8")
    constant = re.search(r'^FAKE_BOOTSTRAP_HOST = "([^"]+)"$', source, re.MULTILINE)
    assert constant is not None, "the constant that the benchmark imports is written differently now"
    sys.modules[name] = ModuleType(name)
    sys.modules[name].FAKE_BOOTSTRAP_HOST = constant[1]  # type: ignore[attr-defined]
    runpy.run_module("sglang.bench_serving", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
