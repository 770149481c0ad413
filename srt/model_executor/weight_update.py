"""Update a rank's weights while the server runs, on all ranks of a replica or on none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from srt.model_executor.loaded_model import LoadedModel, resolve_ops
from srt.model_executor.update_groups import NO_STAGES, UpdateGroups
from srt.model_loader.sharded_state import ShardedUpdate, cpu_layout, rank_in_replica
from srt.model_loader.weight_sources import FolderSource, TensorSource, WeightSource
from srt.model_loader.weight_update import WeightUpdate
from srt.models.causal_lm import CausalLM
from srt.protocol.engine_work import LoadWeights, NewWeights, ReceiveWeights
from srt.utils.checkpoint import is_sharded, version_of
from srt.utils.errors import StartError, UpdateError
from srt.utils.model_config import ModelConfig
from srt.utils.sharded_state import check_sharded


def update_weights(loaded: LoadedModel, work: NewWeights, groups: UpdateGroups, report: Callable[[], None]) -> str:
    """Replace this rank's weights by those in a folder or from a group; return the version of the files (`version_of`), if there are any.

    UpdateError on every rank if one of them cannot. Any other error leaves the weights mixed, so that the process must end. `report` is
    called whenever there is progress.
    """
    update: WeightUpdate | ShardedUpdate | None = None
    files, error = "", ""
    try:
        check_supported(loaded)
        if isinstance(work, LoadWeights):
            files = version_of(work.folder)
        update = _update_of(loaded, work, groups, report)
        update.check()
        if isinstance(work, LoadWeights) and version_of(work.folder) != files:
            raise UpdateError(f"The files in {work.folder} were changed while they were read.")
    except (UpdateError, StartError) as reason:
        error = str(reason)
    except (MemoryError, OSError, RuntimeError) as reason:  # among them PyTorch's for too little memory
        error = f"The new weights cannot be loaded: {type(reason).__name__}: {reason}"
    if not loaded.tp.min_int(int(not error)):
        raise UpdateError(error or "Another rank could not load the weights.")
    assert update is not None
    update.write()
    return files


def _update_of(
    loaded: LoadedModel, work: NewWeights, groups: UpdateGroups, report: Callable[[], None]
) -> WeightUpdate | ShardedUpdate:
    is_partial = isinstance(work, ReceiveWeights) or work.is_partial
    if isinstance(work, ReceiveWeights):
        source: WeightSource = TensorSource(groups.receive(work, report), f"from the group {work.group}")
    else:
        if not work.is_partial:
            _check_config(loaded, work.folder)
        if is_sharded(work.folder):
            return _sharded_update(loaded, Path(work.folder), report)
        source = FolderSource(work.folder)
    ops = resolve_ops(loaded.args, loaded.device)
    place = loaded.our_model, loaded.config, loaded.tp, ops, loaded.dtype, source
    return WeightUpdate(*place, is_partial=is_partial, report=report)


def _sharded_update(loaded: LoadedModel, folder: Path, report: Callable[[], None]) -> ShardedUpdate:
    if loaded.device.type != "cpu":
        raise UpdateError(f"The weights in {folder} are saved by rank, which a CPU can load only: use a checkpoint.")
    check_sharded(folder, loaded.args, loaded.config, cpu_layout())
    return ShardedUpdate(loaded.our_model, folder, rank_in_replica(loaded.tp, loaded.stage), report)


def check_supported(loaded: LoadedModel) -> None:
    """Raise UpdateError for models of which an update would not reach everything."""
    if not isinstance(loaded.model, CausalLM):
        raise UpdateError("Weights of models that the library transformers runs cannot be updated: restart the server.")
    if loaded.args.speculative_algorithm is not None and loaded.device.type != "cpu":
        raise UpdateError(
            "Weights cannot be updated on GPUs with --speculative-algorithm: restart the server with the new checkpoint."
        )
    if loaded.pipeline.num_stages > 1:
        raise UpdateError(NO_STAGES)
    if loaded.tp.exchange is not None:
        raise UpdateError(
            "Weights cannot be updated with --enable-dp-attention, whose groups would have different experts meanwhile: restart the"
            " server with the new checkpoint."
        )
    if loaded.kv_scales is not None:
        raise UpdateError("Weights cannot be updated beside scales of keys and values: restart the server.")
    if loaded.args.load_format == "dummy":
        raise UpdateError("Weights cannot be updated with --load-format dummy: restart the server with a checkpoint.")


def _check_config(loaded: LoadedModel, folder: str) -> None:
    other = ModelConfig.served_from(folder, loaded.args)
    # The type in which a checkpoint is stored is no matter: weights are converted to that of the server.
    if replace(other, torch_dtype=loaded.config.torch_dtype).config_hash() != loaded.config.config_hash():
        raise UpdateError(f"The config.json in {folder} describes another model than the one that is served.")
