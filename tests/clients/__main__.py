"""Drive the real server with clients from elsewhere, unchanged: `python -m tests.clients ENVIRONMENTS PART…`.

The parts are `current` and `pinned`, which are Python's, and `npm`; `make clients` installs each in a folder of ENVIRONMENTS. The part
`on_ray` needs no server: it starts its own on a Ray cluster, so it also needs the project's folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.server_process import ROOT, ServerProcess

HERE = Path(__file__).parent
MODEL = ROOT / "srt/assets/models/tiny"
# lm-eval's figures agree with another implementation's to 1e-4 only in float32.
SERVER = ["--model-path", str(MODEL), "--served-model-name", "tiny", "--dtype", "float32", "--port", "0"]


def command_of(part: str, environments: Path) -> list[str]:
    """Return the command that runs one part's tests."""
    if part == "npm":
        return [str(environments / "current/bin/node"), "--test", str(HERE / "npm/openai.test.js")]
    return [str(environments / part / "bin/python"), "-m", "pytest", part]


def main() -> int:
    """Start the server, run each part against it, and end it; return 1 when a part or the server's end failed."""
    environments, parts = Path(sys.argv[1]).resolve(), sys.argv[2:]
    # Nothing may reach for the hub, and one thread each leaves the other core to the server.
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with (
        tempfile.TemporaryDirectory(prefix="clients-") as tmp,
        ServerProcess("srt.launch_server", SERVER, Path(tmp), quiet) as server,
    ):
        addresses = {
            "SRT_CLIENTS_URL": server.wait_ready(),
            "SRT_CLIENTS_MODEL": str(MODEL),
            "SRT_CLIENTS_NPM": str(environments / "npm"),
        }
        environment = {**os.environ, **quiet, **addresses}
        of_part = {"on_ray": {"PYTHONPATH": str(ROOT)}}
        failed = [
            part
            for part in parts
            if subprocess.call(command_of(part, environments), cwd=HERE, env={**environment, **of_part.get(part, {})})
        ]
        server.send(signal.SIGINT)
        code = server.wait()
    if failed or code:
        print(
            *server.lines[-100:],
            f"the server ended with {code}; failed: {', '.join(failed) or 'nothing else'}",
            sep="\n",
        )
    return int(bool(failed or code))


if __name__ == "__main__":
    sys.exit(main())
