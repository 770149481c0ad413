"""Save a rank's weights while the server runs, on all ranks of a replica or on none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from srt.model_executor.loaded_model import LoadedModel
from srt.model_loader.sharded_state import cpu_layout, is_repacked, rank_in_replica, write_rank
from srt.protocol.engine_work import SaveWeights
from srt.protocol.messages import Scalar
from srt.utils.errors import UpdateError


def save_weights(loaded: LoadedModel, work: SaveWeights, report: Callable[[], None]) -> dict[str, Scalar]:
    """Write this rank's part. UpdateError on every rank if one of them cannot. `report` is called whenever there is progress."""
    error, repacked = "", False
    try:
        if loaded.device.type != "cpu":
            raise UpdateError("Weights are saved by rank on a CPU only.")
        repacked = is_repacked(loaded.our_model)
        rank = rank_in_replica(loaded.tp, loaded.stage)
        write_rank(loaded.our_model, Path(work.folder), rank, work.most_bytes or None, report)
    except UpdateError as reason:
        error = str(reason)
    except OSError as reason:
        error = f"The weights cannot be written to {work.folder}: {reason.strerror}."
    if not loaded.on_all_ranks(not error):
        raise UpdateError(error or "Another rank could not write its weights.")
    is_for_all = loaded.on_all_ranks(not repacked)
    return {"packed_for": "" if is_for_all else cpu_layout()}
