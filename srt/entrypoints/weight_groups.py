"""Routes by which a trainer sends weights over a process group: it is rank 0, and the server's ranks follow."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from srt.entrypoints.answers import Succeeded, UpdatedWeights
from srt.entrypoints.exchange import Exchange
from srt.entrypoints.request_schema import NAME, NOT_EMPTY, RequestBody, bad_parameter, described
from srt.entrypoints.service import Service
from srt.entrypoints.weights import check_done
from srt.managers.tokenizer_manager.api_types import RequestError
from srt.protocol.engine_work import JoinUpdateGroup, LeaveUpdateGroup, ReceiveWeights
from srt.sampling.parameter_checks import show
from srt.utils.checkpoint import ITEM_BYTES

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "uint8": "U8",
    "int8": "I8",
    "int32": "I32",
    "int64": "I64",
}
"""Types of tensors, and their names in safetensors files."""
MAX_BUCKET_BYTES = 1 << 36
GROUP = "weight_update_group"


class InitGroupBody(RequestBody):
    """POST /init_weights_update_group."""

    FAMILY: ClassVar[str] = "init_weights_update_group"

    master_address: str = described("The host of rank 0, which is the trainer.", ..., string={"minLength": 1})
    master_port: int = described("The port at which rank 0 listens.", ..., minimum=1, maximum=65535)
    rank_offset: int = described("The rank in the group of the server's first rank.", ..., minimum=1)
    world_size: int = described("The number of all ranks in the group.", ..., minimum=2)
    group_name: str = described("The name of the group.", GROUP, string=NAME)
    backend: Literal["nccl", "gloo"] | None = described("Null: nccl on GPUs, gloo on a CPU.")


class DestroyGroupBody(RequestBody):
    """POST /destroy_weights_update_group."""

    FAMILY: ClassVar[str] = "destroy_weights_update_group"

    group_name: str = described("The name of the group.", GROUP, string=NAME)


class ReceiveBody(RequestBody):
    """POST /update_weights_from_distributed."""

    FAMILY: ClassVar[str] = "update_weights_from_distributed"

    names: list[str] = described("The names of the tensors in the checkpoint.", ..., array=NOT_EMPTY)
    dtypes: list[str] = described("The type of each, as PyTorch names it.", ..., array=NOT_EMPTY)
    shapes: list[list[int]] = described("The shape of each.", ..., integer={"minimum": 0})
    group_name: str = described("The name of the group.", GROUP, string=NAME)
    load_format: Literal["flattened_bucket"] | None = described(
        "Null: rank 0 broadcasts the tensors one after the other. flattened_bucket: it broadcasts one tensor of bytes, those of all"
        " tensors in their order."
    )
    abort_all_requests: bool = described(
        "End what runs. Otherwise running requests are computed again with the new weights.", False
    )
    weight_version: str | None = described("The name of the new weights; null keeps the present one.", string=NAME)
    flush_cache: bool = described(
        "Must be true: what is cached of the old weights would give wrong answers with the new ones.", True
    )


async def init_weights_update_group(exchange: Exchange, service: Service) -> None:
    """Join the group of a trainer, which must create its side meanwhile; a 400 if it has not within about a minute."""
    await exchange.send_json(await join(InitGroupBody.parse(await exchange.read_json()), service))


async def destroy_weights_update_group(exchange: Exchange, service: Service) -> None:
    """Leave a group."""
    await exchange.send_json(await leave(DestroyGroupBody.parse(await exchange.read_json(if_empty={})), service))


async def update_weights_from_distributed(exchange: Exchange, service: Service) -> None:
    """Replace some weights by tensors that the trainer broadcasts meanwhile, and keep the others.

    A model may come in several calls: pause generation before the first one, and continue it after the last one. After a 400 the weights
    are the old ones. If the tensors did not come, the group is closed as well.
    """
    await exchange.send_json(await receive(ReceiveBody.parse(await exchange.read_json()), service))


async def join(body: InitGroupBody, service: Service) -> Succeeded:
    if not 1 <= body.master_port <= 65535:
        raise bad_parameter("master_port", "must be from 1 to 65535")
    if service.args.dp_size > 1:
        raise RequestError(
            400, "Replicas of --dp-size cannot join a group: use /update_weights_from_disk, which reaches all of them."
        )
    num_ranks = service.args.num_ranks
    if not (body.rank_offset >= 1 and body.rank_offset + num_ranks <= body.world_size):
        raise bad_parameter(
            "rank_offset", f"must be at least 1, and the server's {num_ranks} ranks must be within world_size"
        )
    work = JoinUpdateGroup(
        body.group_name, body.master_address, body.master_port, body.rank_offset, body.world_size, body.backend or ""
    )
    for reply in (await service.engine().ask_ranks(work)).values():
        check_done(reply)
    return {"success": True, "message": f"The group {body.group_name} is connected."}


async def leave(body: DestroyGroupBody, service: Service) -> Succeeded:
    for reply in (await service.engine().ask_ranks(LeaveUpdateGroup(body.group_name))).values():
        check_done(reply)
    return {"success": True, "message": f"The group {body.group_name} is closed."}


async def receive(body: ReceiveBody, service: Service) -> UpdatedWeights:
    if not body.flush_cache:
        raise bad_parameter("flush_cache", "must be true: what is cached of the old weights would give wrong answers")
    if not len(body.names) == len(body.dtypes) == len(body.shapes) >= 1:
        raise bad_parameter("names", "must have as many entries as dtypes and as shapes, and at least one")
    if len(set(body.names)) < len(body.names):
        raise bad_parameter("names", "must not have the same name twice")
    dtypes = [one.removeprefix("torch.") for one in body.dtypes]
    unknown = [one for one in dtypes if one not in DTYPES]
    if unknown:
        raise bad_parameter("dtypes", f"may be {', '.join(DTYPES)}, not {show(unknown[0])}")
    if any(size < 0 for shape in body.shapes for size in shape):
        raise bad_parameter("shapes", "must have no negative number")
    # Without the zeros, because PyTorch multiplies the other sizes of an empty tensor, too.
    if any(math.prod(size for size in shape if size) >= 1 << 63 for shape in body.shapes):
        raise bad_parameter("shapes", "must have sizes whose product is below 2 ** 63")
    codes = [DTYPES[one] for one in dtypes]
    if sum(math.prod(s) * ITEM_BYTES[c] for s, c in zip(body.shapes, codes, strict=True)) > MAX_BUCKET_BYTES:
        raise bad_parameter("shapes", f"may have {MAX_BUCKET_BYTES >> 30} GiB in all: send several calls")
    work = ReceiveWeights(body.group_name, body.names, codes, body.shapes, body.load_format is not None)
    done, sentence, num_paused = await service.engine().update_weights(
        work, body.weight_version or "", body.abort_all_requests
    )
    if not done:
        raise RequestError(400, sentence.replace("The checkpoint from", "What came from"))
    return {"success": True, "message": "The tensors are in place.", "num_paused_requests": num_paused}
