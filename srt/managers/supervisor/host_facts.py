"""What must be the same on all hosts of a server: the sources, the checkpoint and most options."""

from __future__ import annotations

import hashlib
from pathlib import Path

import srt
from srt.managers.supervisor.preflight import ServerPlan
from srt.protocol.host_messages import HostHello
from srt.utils.checkpoint import HUB_PATTERNS, TORCH_PATTERNS
from srt.utils.host_options import OWN_OPTIONS

COMPARED_BYTES = 1 << 16  # of each end of a file: whole configurations, and the headers of weights


def facts_of(plan: ServerPlan) -> HostHello:
    """Return what this host says of itself when it joins, and what host 0 compares it with."""
    drafting = plan.args.speculative_draft_model_path  # a folder by now, of the model itself if its own layer drafts
    scales = plan.args.quantization_param_path
    return HostHello(
        plan.args.node_rank,
        _hash_of(sorted(Path(srt.__file__).parent.rglob("*.py")), Path(srt.__file__).parent),
        _hash_of_checkpoint(plan.model_folder),
        {name: str(value) for name, value in plan.args.public_values().items() if name not in OWN_OPTIONS},
        "" if drafting is None else _hash_of_checkpoint(Path(drafting)),
        "" if scales is None else hashlib.sha256(Path(scales).read_bytes()).hexdigest()[:16],
    )


def difference(ours: HostHello, theirs: HostHello) -> str | None:
    """Return a sentence that says why a host cannot join; None if it can."""
    # Who mistook the number of hosts mistook others too.
    for name in sorted(ours.options, key=lambda name: name != "nnodes"):
        value, other = ours.options[name], theirs.options.get(name)
        if other != value:
            return f"--{name.replace('_', '-')} is {value} on host 0 and {other} on host {theirs.rank}: give all hosts the same."
    if ours.code != theirs.code:
        return f"Host {theirs.rank} runs other code of srt than host 0: install the same version on both."
    if ours.weights != theirs.weights:
        return f"The checkpoint of host {theirs.rank} differs from that of host 0: copy the same files to both."
    if ours.drafts != theirs.drafts:
        return (
            f"The model of host {theirs.rank} that drafts (--speculative-draft-model-path) differs from that of host 0: copy the"
            " same files to both."
        )
    if ours.scales != theirs.scales:
        return f"The file of --quantization-param-path on host {theirs.rank} differs from that of host 0: copy the same file to both."
    return None


def _hash_of_checkpoint(folder: Path) -> str:
    patterns = (*HUB_PATTERNS, *TORCH_PATTERNS)
    return _hash_of(sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}), folder)


def _hash_of(files: list[Path], folder: Path) -> str:
    """Hash the names, the sizes and both ends of these files; not their times, which differ between hosts."""
    whole = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        whole.update(f"{path.relative_to(folder)} {size}\n".encode())
        with path.open("rb") as file:
            whole.update(file.read(COMPARED_BYTES))
            if size > COMPARED_BYTES:
                file.seek(max(COMPARED_BYTES, size - COMPARED_BYTES))
                whole.update(file.read(COMPARED_BYTES))
    return whole.hexdigest()[:16]
