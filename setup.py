"""Packaging. The requirements live here, because the Makefile's environment is rebuilt when this file changes."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent


def read_version() -> str:
    """The one version of the project, read without importing the package."""
    found = re.search(r'^__version__ = "([^"]+)"$', (HERE / "srt/version.py").read_text("utf-8"), re.MULTILINE)
    if found is None:
        raise RuntimeError("srt/version.py does not define __version__")
    return found.group(1)


class Package(Distribution):  # type: ignore[misc]
    """Knows whether anything was compiled, which ties a wheel to this interpreter and this kind of machine."""

    holds_compiled = False

    def has_ext_modules(self) -> bool:
        return self.holds_compiled or bool(super().has_ext_modules())


class BuildPy(build_py):  # type: ignore[misc]
    """Compiles the scheduler and the code for steps on a CPU too, where that can be done. Where it cannot, srt runs without, and slower."""

    def run(self) -> None:
        if not self.editable_mode:  # an earlier build may have left files there that the package no longer has
            shutil.rmtree(Path(self.build_lib, "srt"), ignore_errors=True)
        super().run()
        sys.path.insert(0, str(HERE))
        self._compile_scheduler()
        self._compile_cpu_kernels()

    def _compile_scheduler(self) -> None:
        try:
            from scripts.compile_scheduler import compile_into
            from srt.utils.compiled import built_folder

            folder = built_folder()
            if self.editable_mode and not folder.is_dir():
                shutil.rmtree(folder.parent, ignore_errors=True)
                compile_into(folder)
            elif not self.editable_mode:
                compile_into(Path(self.build_lib).resolve() / folder.relative_to(HERE.resolve()))
                self.distribution.holds_compiled = True
        except (Exception, SystemExit) as error:
            self.warn(f"The scheduler is not compiled and will run as plain Python: {str(error)[:200]}")

    def _compile_cpu_kernels(self) -> None:
        try:
            from scripts.compile_cpu_kernels import compile_library
            from srt.kernels.build.cpu_library import built_library

            path = built_library()
            if self.editable_mode and not path.is_file():
                shutil.rmtree(path.parents[1], ignore_errors=True)
                compile_library(path)
            elif not self.editable_mode:
                compile_library(Path(self.build_lib).resolve() / path.relative_to(HERE.resolve()))
                self.distribution.holds_compiled = True
        except (Exception, SystemExit) as error:
            self.warn(f"Steps on a CPU will run by PyTorch's operations, which is slower: {str(error)[:200]}")


class BdistWheel(bdist_wheel):  # type: ignore[misc]
    """Tags the wheel by what was built: `py3-none-any` only where the scheduler is not compiled."""

    def run(self) -> None:
        self.run_command("build")
        self.root_is_pure = not self.distribution.has_ext_modules()
        super().run()


# torch is capped where an open range would replace a host's build by one with gigabytes of CUDA libraries.
INSTALL_REQUIRES = [
    "google-re2>=1.1",
    "httptools>=0.6,<1",
    "huggingface_hub>=1.3,<3",
    "jinja2>=3.1,<4",
    "llguidance>=1.9,<2",
    "msgspec>=0.20,<1",
    "numpy>=1.26,<3",
    "orjson>=3.10,<4",
    "pydantic>=2.8,<3",
    "pyzmq>=26,<28",
    "safetensors>=0.5,<1",
    "tokenizers>=0.22,<1",
    "torch>=2.11,<2.14",
    "transformers>=5,<6",
    "uvicorn>=0.30,<1",
    "uvloop>=0.20,<1",
]

TEST_REQUIRES = [
    "cuda-bindings>=12.9,<14",
    "httpx>=0.27,<1",
    "hypothesis>=6.100,<7",
    "jsonschema>=4.23,<5",
    "jsonschema-rs>=0.30,<1",
    "mypy>=2,<3",
    "nvidia-cuda-nvrtc>=13,<14",
    "openai>=2,<4",
    "prometheus-client>=0.20,<1",
    "psutil>=6,<8",
    "pytest>=8,<10",
    "pytest-timeout>=2.3,<3",
    "pytest-xdist>=3.6,<4",
    "schemathesis>=4,<5",
    "setuptools>=77",  # with mypy: the scheduler is compiled by tests too
    "triton>=3.3,<4",
]

EXTRAS_REQUIRE = {
    # Triton comes with the CUDA builds of torch, and so do the packages of CUDA.
    "cuda": ["flashinfer-python>=0.6,<0.7", "nvidia-ml-py>=12"],
    "ray": ["ray[serve]>=2.50,<3"],
    "test": TEST_REQUIRES,
    "dev": [
        *TEST_REQUIRES,
        "import-linter>=2.4,<3",
        "pre-commit>=4,<5",
        "ruff>=0.17,<0.18",
    ],
}

setup(
    # The import name is `srt`; on package indexes that name belongs to a subtitle parser.
    name="srt-serve",
    version=read_version(),
    description="A serving runtime for large language models: fast, survivable, and small enough to read",
    long_description=(HERE / "README.md").read_text("utf-8") if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["srt", "srt.*"]),
    # Named, so that an editable install is a line in a .pth file. A finder would be imported by every process.
    package_dir={"": "."},
    package_data={
        "srt": [
            "py.typed",
            "assets/**/*",
            "entrypoints/page/*",
            *(f"kernels/**/*.{end}" for end in ("cu", "cuh", "cpp", "h")),
        ]
    },
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    distclass=Package,
    cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel},
    entry_points={"console_scripts": ["srt = srt.cli.main:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
