"""`srt health` asks every server of this user on this host for its /health, whatever its address; meant for a container's health check.

Exit code 0 if there is a server and all are well, else 1.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from srt.managers.supervisor.run_dir import ADDRESS_FILE, PREFIX, is_in_use

TIMEOUT_S = 4.0


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each server: its address and its answer. Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words:
        sys.stdout.write(f"usage: srt health\n\n{__doc__}")
        return 0 if words[0] in ("--help", "-h") else 2
    addresses = _addresses(Path(tempfile.gettempdir()))
    troubles = [_trouble_of(address) for address in addresses]
    for address, trouble in zip(addresses, troubles, strict=True):
        sys.stdout.write(f"{address}: {trouble or 'well'}\n")
    if not addresses:
        sys.stdout.write("No server of this user listens on this host.\n")
    return 0 if addresses and not any(troubles) else 1


def _addresses(folder: Path) -> list[str]:
    found = []
    for run_dir in sorted(folder.glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):  # a Runtime that does not listen, or a server that is just ending
            if is_in_use(run_dir):
                found.append((run_dir / ADDRESS_FILE).read_text("ascii"))
    return found


def _trouble_of(address: str) -> str | None:
    """Ask the server for its /health; return None if it is well, else the reason."""
    url = urlsplit(address)
    connection: http.client.HTTPConnection
    if url.scheme == "https":
        trust = ssl.create_default_context()
        # The certificate is for a public name, not for the local address.
        trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(url.hostname or "", url.port, timeout=TIMEOUT_S, context=trust)
    else:
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=TIMEOUT_S)
    try:
        with contextlib.closing(connection):
            connection.request("GET", "/health")
            response = connection.getresponse()
            body = response.read()
            return None if response.status == 200 else f"{json.loads(body)['reason']} ({response.status})"
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        return str(error) or type(error).__name__
