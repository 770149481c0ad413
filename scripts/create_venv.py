"""Create the project's virtual environment: `python3 scripts/create_venv.py .venv`.

It sees the packages of the host when those include a PyTorch that setup.py accepts (on a GPU host, usually the build
made for its driver). Otherwise it stands alone.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
import venv
from pathlib import Path

SETUP = Path(__file__).parent.parent / "setup.py"


def host_torch_is_in_range() -> bool:
    """Whether this interpreter has a PyTorch that setup.py would not replace, and can share it."""
    if sys.prefix != sys.base_prefix:
        return False  # a virtual environment's packages are not shared with those made from it
    bounds = re.search(r'"torch>=(\d+)\.(\d+),<(\d+)\.(\d+)"', SETUP.read_text("utf-8"))
    if bounds is None:
        raise SystemExit("setup.py does not name the range of torch in the form that this script reads")
    least, limit = (int(bounds[1]), int(bounds[2])), (int(bounds[3]), int(bounds[4]))
    try:
        major, minor = importlib.metadata.version("torch").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return False
    return least <= (int(major), int(minor)) < limit


def main() -> None:
    """Create the environment in the folder named on the command line."""
    if sys.version_info < (3, 11):  # noqa: UP036  (older interpreters run this file, and should say why they cannot)
        raise SystemExit(
            f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}; choose one with PYTHON=..."
        )
    if importlib.util.find_spec("ensurepip") is None:
        raise SystemExit("this Python cannot create environments with pip in them; on Debian, install python3-venv")
    (folder,) = sys.argv[1:]
    shares_host = host_torch_is_in_range()
    venv.create(folder, with_pip=True, clear=True, symlinks=True, system_site_packages=shares_host)
    print(f"created {folder}, " + ("with the packages of the host and its PyTorch" if shares_host else "on its own"))


if __name__ == "__main__":
    main()
