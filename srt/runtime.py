"""`Runtime`: the engine in a Python program.

    with srt.Runtime(model_path="Qwen/Qwen3-8B", tp_size=2) as runtime:
        print(runtime.generate("The capital of France is", {"max_new_tokens": 8})["text"])

The engine runs in separate processes, as for a server; this process has one more frontend, on an event loop in its own thread. So it
works in a script without a `__main__` guard, in any thread, and in a notebook whose event loop is running.
"""

from __future__ import annotations

import importlib
import weakref
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from srt.entrypoints.engine_process import EngineProcess
from srt.server_args import ArgumentError, ServerArgs, from_keywords
from srt.utils.checkpoint import DEFAULT_MODEL

if TYPE_CHECKING:
    from srt.entrypoints.answers import RenamedWeights, Succeeded, UpdatedWeights, WeightHashes
    from srt.entrypoints.local_engine import Answer, Chunks, LocalEngine

HTTP_ONLY = (
    *("host", "api_key", "admin_api_key", "tokenizer_worker_num", "served_model_name", "enable_cache_report"),
    *("enable_metrics", "cors_allow_origins", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password"),
)

ELSEWHERE = MappingProxyType(
    {
        "add_request": "async_generate with stream=True does the same",
        "async_encode": "encode does the same in a thread, as asyncio.to_thread(runtime.encode, texts)",
        **dict.fromkeys(
            ("load_lora_adapter_async", "unload_lora_adapter_async"),
            "the method without _async does the same in a thread, by asyncio.to_thread",
        ),
        "endpoint": "this engine has no language for programs of its own; url and generate_url are there",
        "collective_rpc": "this engine runs nothing but its own steps in its workers",
    }
)


class Runtime:
    """A running engine. The keywords are the server's options (`tp_size=2` is `--tp-size 2`); `port=` serves HTTP as well.
    Without `model_path` it runs the model that ships with the project.

    Any thread may call any method. `RequestError` names the parameter that is wrong; every call that is running when the engine ends
    raises `EngineDied`. In a fork of the process that created the Runtime, calls raise `EngineDied` too, and `shutdown` does nothing; the
    engine ends with the process that created it. Only errors are printed, unless `log_level` is "info" or "debug", and what
    `log_requests` and `decode_log_interval` ask for.
    """

    def __init__(self, *, launch_timeout: float | None = None, **server_args: Any) -> None:
        """Start the engine and wait until it takes requests.

        StartError or ArgumentError say in a sentence why it cannot start, or that it did not within `launch_timeout` seconds; then no
        process of it is left.
        """
        if launch_timeout is not None and not (type(launch_timeout) in (int, float) and launch_timeout > 0):
            raise ArgumentError(f"launch_timeout must be a positive number of seconds, not {launch_timeout!r}.")
        http = "port" in server_args
        for name in HTTP_ONLY:
            if name in server_args and not http:
                raise ArgumentError(f"{name} needs port: without it a Runtime serves no HTTP.")
        self.server_args: ServerArgs = from_keywords({"model_path": DEFAULT_MODEL, "log_level": "error", **server_args})
        process = EngineProcess(self.server_args, http=http)
        from srt.entrypoints.local_engine import LocalEngine  # here, while the engine loads its modules

        self._engine = LocalEngine(process, self.server_args)
        # Runs at the interpreter's end, too, and when the last reference is dropped, so it must not refer to self.
        self._finalizer = weakref.finalize(self, self._engine.shutdown)
        try:
            self._engine.start(launch_timeout)
        except BaseException:
            self.shutdown()
            raise

    @property
    def url(self) -> str | None:
        """The address at which HTTP is served; None if no port was asked for."""
        return self._engine.started.url

    @property
    def generate_url(self) -> str | None:
        return None if self.url is None else self.url + "/generate"

    @property
    def pid(self) -> int:
        """The process id of the supervisor, the parent of all processes of the engine."""
        return self._engine.process.pid

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        return_logprob: bool | list[bool] = False,
        logprob_start_len: int | list[int] = -1,
        top_logprobs_num: int | list[int] = 0,
        token_ids_logprob: list[int] | list[list[int]] | None = None,
        stream: bool = False,
        rid: str | list[str] | None = None,
        **more: Any,
    ) -> Any:
        """Generate as POST /generate does: returns a dict, or a list of them for a list of prompts or n > 1; with `stream`, an iterator.

        `more` are the other fields of /generate (`return_text_in_logprobs`, `cache_salt`, …).
        """
        body = {
            "text": prompt,
            "sampling_params": sampling_params,
            "input_ids": input_ids,
            "return_logprob": return_logprob,
            "logprob_start_len": logprob_start_len,
            "top_logprobs_num": top_logprobs_num,
            "token_ids_logprob": token_ids_logprob,
            "rid": rid,
            **more,
        }
        if not stream:
            return self._engine.run(self._engine.answer(body))
        return GenerateStream(self, self._engine, self._engine.run(self._engine.open_stream(body)))

    async def async_generate(
        self, prompt: str | list[str] | None = None, sampling_params: Any = None, *, stream: bool = False, **fields: Any
    ) -> Any:
        """Generate from a coroutine, with the parameters of `generate`: `await` it for the answer, or with `stream` for an asynchronous
        iterator. Cancelling aborts the request."""
        body = {"text": prompt, "sampling_params": sampling_params, **fields}
        if not stream:
            return await self._engine.run_async(self._engine.answer(body))
        return GenerateStream(self, self._engine, await self._engine.run_async(self._engine.open_stream(body)))

    def encode(
        self,
        prompt: str | list[str] | None = None,
        *,
        input_ids: list[int] | list[list[int]] | None = None,
        dimensions: int | None = None,
        rid: str | None = None,
    ) -> Any:
        """Embed as POST /encode does: returns a dict with `embedding`, or a list of them for a list of prompts."""
        body = {"text": prompt, "input_ids": input_ids, "dimensions": dimensions, "rid": rid}
        return self._engine.run(self._engine.encode(body))

    def classify(
        self,
        prompt: str | list[str] | None = None,
        *,
        input_ids: list[int] | list[list[int]] | None = None,
        rid: str | None = None,
    ) -> Any:
        """Score the labels of a classifier as POST /classify does: returns a dict whose `embedding` holds the scores, or a list."""
        return self._engine.run(self._engine.classify({"text": prompt, "input_ids": input_ids, "rid": rid}))

    def rerank(
        self, query: str, documents: list[str], *, top_n: int | None = None, return_documents: bool = True
    ) -> Any:
        """Rank documents as POST /v1/rerank does: returns a list of dicts, the best document first."""
        body = {"query": query, "documents": documents, "top_n": top_n, "return_documents": return_documents}
        return self._engine.run(self._engine.rerank(body))

    def score(
        self,
        query: str | list[int] | None = None,
        items: str | list[str] | list[list[int]] | None = None,
        label_token_ids: list[int] | list[list[int]] | None = None,
        apply_softmax: bool = False,
        item_first: bool = False,
    ) -> Any:
        """Score items as POST /v1/score does: returns a dict with `scores`, a list for each item."""
        body = {"query": query, "items": items, "label_token_ids": label_token_ids}
        return self._engine.run(self._engine.score({**body, "apply_softmax": apply_softmax, "item_first": item_first}))

    def cache_prefix(self, prefix: str) -> None:
        """Compute a prefix that prompts will share, so that the first of them finds it in the cache."""
        self.generate(prefix, {"max_new_tokens": 0})

    def flush_cache(self) -> bool:
        """Drop the prefix cache; False, without effect, if requests are running."""
        return self._engine.run(self._engine.flush_cache())

    def abort(self, rid: str = "", abort_all: bool = False) -> int:
        """End the live requests named `rid`, or all. Returns their number."""
        if not rid and not abort_all:
            raise ArgumentError("rid is required, unless abort_all is true.")
        return self._engine.run(self._engine.abort("" if abort_all else rid))

    def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool = False) -> dict[str, str]:
        """Load a LoRA adapter as POST /load_lora_adapter does. Returns the folders of all adapters by name."""
        return self._engine.run(self._engine.load_adapter(lora_name, lora_path, pinned))

    def unload_lora_adapter(self, lora_name: str) -> dict[str, str]:
        """Forget a LoRA adapter; requests that run with it go on. Returns the folders of the others by name."""
        return self._engine.run(self._engine.unload_adapter(lora_name))

    def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str | None = None,
        abort_all_requests: bool = False,
        weight_version: str | None = None,
    ) -> UpdatedWeights:
        """Replace the weights as POST /update_weights_from_disk does. RequestError says why they could not be, and are the old ones."""
        body = {
            "model_path": model_path,
            "load_format": load_format,
            "abort_all_requests": abort_all_requests,
            "weight_version": weight_version,
        }
        return self._engine.run(self._engine.update_weights(body))

    def update_weights_from_tensor(
        self, safetensors: bytes, abort_all_requests: bool = False, weight_version: str = ""
    ) -> UpdatedWeights:
        """Replace the weights in a safetensors file, as `safetensors.torch.save` returns it; the others stay as they are.

        Processes cannot be replaced afterwards, because no folder has these weights, until `update_weights_from_disk` is called.
        """
        return self._engine.run(self._engine.update_tensors(safetensors, weight_version, abort_all_requests))

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "weight_update_group",
        backend: str | None = None,
    ) -> None:
        """Join the group of a trainer, as POST /init_weights_update_group does. It must create its side meanwhile, in another thread."""
        body = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        self._engine.run(self._engine.join_update_group(body))

    def update_weights_from_distributed(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str = "weight_update_group",
        abort_all_requests: bool = False,
        weight_version: str | None = None,
        load_format: str | None = None,
    ) -> UpdatedWeights:
        """Replace these weights by tensors that the trainer broadcasts meanwhile, as POST /update_weights_from_distributed does."""
        body = {
            "names": names,
            "dtypes": dtypes,
            "shapes": shapes,
            "group_name": group_name,
            "abort_all_requests": abort_all_requests,
            "weight_version": weight_version,
            "load_format": load_format,
        }
        return self._engine.run(self._engine.receive_weights(body))

    def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> None:
        """Leave a group."""
        self._engine.run(self._engine.leave_update_group({"group_name": group_name}))

    def release_memory_occupation(self, tags: list[str] | None = None, refuse_requests: bool = False) -> None:
        """Give memory back, as POST /release_memory_occupation does. Calls of `generate` wait until all of it is back."""
        self._engine.run(self._engine.release_memory({"tags": tags, "refuse_requests": refuse_requests}))

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        """Take memory again that was released, as POST /resume_memory_occupation does."""
        self._engine.run(self._engine.resume_memory({"tags": tags}))

    def save_sharded_model(self, path: str, pattern: None = None, max_size: int | None = None) -> Succeeded:
        """Save the weights as each rank holds them, as POST /save_sharded_model does, for `load_format="sharded_state"`."""
        return self._engine.run(self._engine.save_weights({"path": path, "pattern": pattern, "max_size": max_size}))

    def weights_checker(self) -> WeightHashes:
        """Return a hash of each weight of each rank, as POST /weights_checker does."""
        return self._engine.run(self._engine.weight_hashes())

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        """Return the first rows of one tensor of the checkpoint."""
        return self._engine.run(self._engine.named_weight({"name": name, "truncate_size": truncate_size}))

    def update_weight_version(self, new_version: str, abort_all_requests: bool = True) -> RenamedWeights:
        """Give the present weights another name, after ending all requests unless `abort_all_requests` is false."""
        body = {"new_version": new_version, "abort_all_requests": abort_all_requests}
        return self._engine.run(self._engine.rename_weights(body))

    def get_server_info(self) -> dict[str, Any]:
        """Return what GET /server_info answers: options, limits, counters."""
        return self._engine.run(self._engine.server_info())

    def get_model_info(self) -> dict[str, Any]:
        """Return what GET /model_info answers."""
        return self._engine.run(self._engine.model_info())

    def start_profile(self, output_dir: str | None = None, num_steps: int | None = None) -> str:
        """Record what the engine's processes do, until `stop_profile` or for `num_steps` steps. Returns the path of the future file."""
        return self._engine.run(self._engine.start_profile(output_dir, num_steps))

    def stop_profile(self) -> dict[str, Any]:
        """End the recording and wait until its file is written. Returns its `path`, `num_events` and what is missing."""
        return self._engine.run(self._engine.stop_profile())

    def freeze_gc(self) -> None:
        """Exclude the objects that the engine's processes hold now from later garbage collections (gc.freeze)."""
        self._engine.run(self._engine.freeze_gc())

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer from transformers. The first call loads transformers, which takes seconds."""
        folder = self.server_args.tokenizer_path or self._engine.started.model_folder
        # Imported by name, so that no other code of this process depends on transformers.
        return importlib.import_module("transformers").AutoTokenizer.from_pretrained(folder)

    def shutdown(self) -> None:
        """End the engine and wait until it is gone. Pending calls raise EngineDied. A second call does nothing."""
        self._finalizer()

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse, with the reason, names that other engines with this interface have and this one lacks."""
        from srt.entrypoints.native import UNSUPPORTED

        plain = name.removeprefix("async_").removesuffix("_async")
        reason = ELSEWHERE.get(name) or next(
            (f"this engine {why}" for path, why in UNSUPPORTED.items() if path.rpartition("/")[2] == plain), None
        )
        if reason is not None:
            raise AttributeError(f"Runtime.{name} is not supported: {reason}.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


Engine = Runtime  # the name in other engines


class GenerateStream:
    """The chunks of a streamed answer, for `for` or for `async for`. Closing or dropping it aborts what still runs."""

    def __init__(self, runtime: Runtime, engine: LocalEngine, chunks: Chunks) -> None:
        self._runtime = runtime  # keeps the engine alive
        self._engine = engine
        self._chunks = chunks
        self._finalizer = weakref.finalize(self, engine.close_stream, chunks)

    def __iter__(self) -> GenerateStream:
        return self

    def __next__(self) -> Answer:
        chunk = self._engine.run(self._chunks.next())
        if chunk is None:
            raise StopIteration
        return chunk

    def __aiter__(self) -> GenerateStream:
        return self

    async def __anext__(self) -> Answer:
        chunk = await self._engine.run_async(self._chunks.next())
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def close(self) -> None:
        self._finalizer()

    async def aclose(self) -> None:
        self._finalizer()
