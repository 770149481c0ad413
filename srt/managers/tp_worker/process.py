"""A worker process, one rank of the engine: `python -m srt.managers.tp_worker`, started by the supervisor.

The main thread receives plans and executes them in order; other threads send heartbeats and listen to the supervisor. torch and all
that needs it is imported only after the phase "imports" was reported, since it takes seconds.
"""

from __future__ import annotations

import gc
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, assert_never

from srt.distributed.errors import CollectiveError
from srt.managers.process.child import Child, SupervisorGone
from srt.managers.process.replica_layout import ReplicaLayout, previous_generation, start_number
from srt.managers.process.tracer import DEVICE, STEP, Tracer
from srt.managers.tp_worker.adapters import AdapterLoader
from srt.managers.tp_worker.constrained_rows import ConstrainedRows, GrammarLoader, SamplingRow, without_least_length
from srt.managers.tp_worker.output_waiter import OutputWaiter
from srt.managers.tp_worker.resources import Loader, ResourceThreads
from srt.managers.tp_worker.worker_link import WorkerLink
from srt.managers.tp_worker.worker_times import WorkerTimes
from srt.protocol.codec import protocol_hash
from srt.protocol.engine_work import (
    CaptureGraph,
    InspectTables,
    InspectWeights,
    JoinUpdateGroup,
    LeaveUpdateGroup,
    LoadWeights,
    ReceiveWeights,
    ReleaseMemory,
    ResetTables,
    ResumeMemory,
    SaveWeights,
    WeightsSource,
    Work,
)
from srt.protocol.links import calls_path
from srt.protocol.messages import (
    ChildStart,
    PlanSection,
    Prepare,
    Release,
    Scalar,
    StepAck,
    StepPlan,
    StepResult,
    ToWorker,
    WorkDone,
    WorkerFault,
    WorkerHello,
    WorkPlan,
)
from srt.utils.errors import StartError, UpdateError
from srt.utils.model_config import ModelConfig

if TYPE_CHECKING:
    import torch

    from srt.constrained.vocabulary import Vocabulary
    from srt.distributed.expert_exchange import ExpertExchange
    from srt.distributed.rendezvous import TcpMeeting
    from srt.model_executor.memory.memory_loan import MemoryLoan
    from srt.model_executor.model_runner import ModelRunner
    from srt.model_executor.step.step_output import StepOutput

# A worker polls the device without a pause for SPIN_S after a step began or ended: few decode steps take longer. After that it pauses
# for NAP_S between two polls.
SPIN_S = 2e-3
NAP_S = 50e-6
MAINTAIN_EVERY = 50  # steps with constrained rows between two calls of `maintain`
LOCK_S = 5e-4  # GIL switch interval: the longest time for which the launching thread waits until another thread gives up the GIL


class _InFlight(NamedTuple):
    """A step that was launched and whose result was not sent yet."""

    step: int
    output: StepOutput
    launched_s: float
    constrained: list[SamplingRow]


class TpWorker:
    """Executor of the scheduler's plans, in order. On a GPU the next step is launched before the last one is answered."""

    def __init__(
        self,
        rank: int,
        runner: ModelRunner,
        link: WorkerLink,
        window: int = 2,
        tracer: Tracer | None = None,
        num_ranks: int = 1,
        grammars: GrammarLoader | None = None,
        adapters: AdapterLoader | None = None,
        draws: bool = True,
        loan: MemoryLoan | None = None,
    ) -> None:
        """Without `grammars`, requests with a grammar are refused, and without `adapters` those with an adapter.

        `draws` is False for a stage of a pipeline that samples nothing.
        """
        self._trace = tracer or Tracer()
        self._rank = rank
        self._is_alone = num_ranks == 1
        self._runner = runner
        self._link = link
        self._times = WorkerTimes(window)
        known: tuple[GrammarLoader | AdapterLoader | None, ...] = grammars, adapters
        loaders: dict[str, Loader] = {loader.kind: loader for loader in known if loader is not None}
        self._resources = ResourceThreads(loaders, link.wake)
        self._loan = loan
        self._constrained = None if grammars is None or not draws else ConstrainedRows(grammars)
        self._num_constrained_steps = 0
        self._waiter = OutputWaiter(link.wake)
        self._in_flight: deque[_InFlight] = deque()
        self._step = -1
        self._busy_since_s: float | None = None
        self._done_s = 0.0  # when the last completed step was noticed

    @property
    def step(self) -> int:
        """Number of the step begun last."""
        return self._step

    def progress_age_s(self) -> float:
        """Return the seconds since a step was last begun or completed; 0 while idle. May be called by any thread."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def serve(self) -> None:
        """Execute plans until the supervisor says stop, then answer the steps already launched."""
        while (plan := self._next_plan()) is not None:
            match plan:
                case Prepare(resource):
                    self._resources.prepare(resource)
                case Release(key):
                    self._resources.release(key)
                case StepPlan():
                    self._step, self._busy_since_s = plan.step, time.monotonic()
                    self._launch(plan, self._busy_since_s)
                case WorkPlan():
                    self._step, self._busy_since_s = plan.step, time.monotonic()
                    self._answer_all()
                    self._link.send(self._done(plan))
                case _:
                    assert_never(plan)
        self._answer_all()

    def _next_plan(self) -> ToWorker | None:
        """Wait for the next plan. Meanwhile answer completed steps and prepared resources, and join steps of other attention groups.

        A plan that has come is preferred to joining without tokens.
        """
        while True:
            for prepared in self._resources.pop_answers():
                self._link.send(prepared)
            if self._in_flight and self._in_flight[0].output.is_ready():
                self._answer()
                continue
            if not self._in_flight:
                self._busy_since_s = None
            wakes = not self._in_flight or self._in_flight[0].output.must_be_awaited
            is_called = self._runner.is_called
            try:
                return self._link.next_plan(block=wakes and not is_called)
            except queue.Empty:
                if is_called:
                    self._busy_since_s = time.monotonic()
                    self._runner.join()
                elif self._in_flight and not wakes and self.progress_age_s() > SPIN_S:
                    time.sleep(NAP_S)

    def _launch(self, plan: StepPlan, arrived_s: float) -> None:
        assert len(plan.sections) == 1, f"the plan has {len(plan.sections)} sections, but this worker runs one"
        (section,) = plan.sections
        output, constrained = self._run(section)
        if self._trace.is_on:
            self._trace.slice("launch", arrived_s, step=plan.step)
            self._trace.arrow("t", STEP, plan.step, arrived_s)
        num_decodes = 0 if len(section.extend_slots) else len(section.decode_slots)
        self._times.launched(plan.step, num_decodes, arrived_s, time.monotonic(), is_busy=bool(self._in_flight))
        self._in_flight.append(_InFlight(plan.step, output, arrived_s, constrained))
        if output.must_be_awaited:
            self._waiter.wait_for(output)

    def _run(self, section: PlanSection) -> tuple[StepOutput, list[SamplingRow]]:
        """Launch a step. Return a handle to its output, and the list of its rows that follow a grammar.

        What such a row may draw depends on its last token, which the step before has drawn. The forward pass needs no masks: it is
        launched first, and runs while the earlier steps are answered and the masks are filled.
        """
        rows = self._constrained
        if rows is None or not rows.are_in(section):
            return self._runner.launch(section), []
        executed = self._runner.execute(without_least_length(section))
        rows.admit(section)
        constrained = rows.sampling(section)
        if not constrained:
            return self._runner.sample(executed), []
        self._num_constrained_steps += 1
        if self._num_constrained_steps % MAINTAIN_EVERY == 0:
            self._resources.maintain(rows.loader)
        self._answer_all()
        buffers = self._runner.mask_buffers
        masked = rows.fill(constrained, buffers.words)
        return self._runner.sample(executed, buffers.upload(masked) if masked else None), constrained

    def _answer_all(self) -> None:
        while self._in_flight:
            self._answer()

    def _answer(self) -> None:
        """Wait for the oldest step and report it."""
        done = self._in_flight.popleft()
        done.output.wait()
        now_s = time.monotonic()
        rows = done.output.result()
        ConstrainedRows.accept(done.constrained, rows)
        # The device runs one step at a time, so a step's own time begins when the step before it is done.
        begun_s = max(done.launched_s, self._done_s)
        step_us = int((now_s - begun_s) * 1e6)
        self._busy_since_s = self._done_s = now_s
        if self._trace.is_on:
            self._trace.slice("forward", begun_s, now_s, DEVICE, step=done.step, num_tokens=len(rows.ids))
        ids_hash = 0 if self._is_alone else rows.ids_hash()
        if self._rank == 0:
            wants_capture = self._runner.graphs.is_missing_one
            self._link.send(
                StepResult(
                    *(done.step, rows.counts, rows.ids, ids_hash, rows.logprobs, step_us, wants_capture),
                    *self._experts(now_s),
                )
            )
        else:
            self._link.send(StepAck(done.step, self._rank, ids_hash, step_us))
        if self._trace.is_on:
            self._trace.slice("answer", now_s, step=done.step)
        self._times.answered(done.step, begun_s, now_s, time.monotonic())

    def _experts(self, now_s: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return (the distinct experts, the peak load) of each layer with experts: about once a second, else nothing."""
        loads = self._runner.expert_loads.poll(now_s)
        distinct, peaks = tuple(load.distinct for load in loads), tuple(load.peak for load in loads)
        if loads and self._trace.is_on:
            for name, values in (("distinct experts", distinct), ("peak load of experts", peaks)):
                self._trace.count(
                    name, now_s, {f"layer {layer}": round(value, 2) for layer, value in enumerate(values)}
                )
        return distinct, peaks

    def _done(self, plan: WorkPlan) -> WorkDone:
        """Do work other than a step, and return its answer."""
        try:
            return WorkDone(plan.step, self._rank, self._work(plan.work))
        except UpdateError as error:
            return WorkDone(plan.step, self._rank, {}, str(error))

    def _note_progress(self) -> None:
        self._busy_since_s = time.monotonic()

    def _memory_loan(self) -> MemoryLoan:
        if self._loan is None:
            raise UpdateError("Memory cannot be released: start the server with --enable-memory-saver.")
        return self._loan

    def _work(self, work: Work) -> dict[str, Scalar]:
        match work:
            case ResetTables():
                self._runner.reset()
                if self._constrained is not None:
                    self._constrained.clear()
                return {}
            case InspectTables():
                return self._runner.inspect() | self._times.pop()
            case CaptureGraph():
                graphs = self._runner.graphs
                size = graphs.capture_next()
                if not graphs.num_left:
                    gc.collect()
                    gc.freeze()
                return {"size": size, "num_left": graphs.num_left}
            case LoadWeights() | ReceiveWeights():
                update = self._runner.update_weights if self._loan is None else self._loan.update_weights
                return {"files": update(work, self._note_progress)}
            case InspectWeights():
                return self._runner.inspect_weights(work, self._note_progress)
            case SaveWeights():
                return self._runner.save_weights(work, self._note_progress)
            case JoinUpdateGroup():
                self._runner.update_groups.join(work, self._note_progress)
                return {}
            case LeaveUpdateGroup():
                self._runner.update_groups.leave(work.name)
                return {}
            case ReleaseMemory():
                return {"num_bytes": self._memory_loan().release(work.tags, work.weights, self._note_progress)}
            case ResumeMemory():
                self._memory_loan().resume(work.tags, work.weights, self._note_progress)
                return {}
            case _:
                assert_never(work)


def main(child: Child) -> None:
    runner = load_runner(child)
    import torch  # load_runner has loaded it

    from srt.model_executor.startup.warm_up import warm_up

    naming_lost_peer = runner.loaded.naming_lost_peer
    with naming_lost_peer():
        child.report_phase("warm-up")
        warm_up(runner)
    link = WorkerLink(child)
    runner.when_called(link.wake)
    args = child.start.args
    layout = ReplicaLayout.of(args, child.start.replica)
    rank = layout.rank_of(child.start.index)
    loaded, grammars = runner.loaded, _grammar_loader(child, runner)
    adapters = None if loaded.adapters is None else AdapterLoader(loaded.adapters)
    draws = loaded.stage.is_last
    loan = _memory_loan(child, runner)
    worker = TpWorker(rank, runner, link, args.window, child.tracer, layout.num_ranks, grammars, adapters, draws, loan)
    link.send(hello_of(rank, args.page_size, runner))
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(LOCK_S)
    child.start_heartbeats(worker.progress_age_s)
    child.report_ready(facts_of(runner))
    try:
        with naming_lost_peer(), torch.inference_mode():  # once, not in each step
            worker.serve()
    except SupervisorGone:
        raise
    except Exception as error:
        sentence = " ".join(
            f"Worker {child.start.index} failed in step {worker.step}: {type(error).__name__}: {error}".split()
        )
        link.send(WorkerFault(rank, worker.step, sentence))
        link.close()
        if isinstance(error, CollectiveError):  # usually another rank's fault, so this rank's traceback would not help
            raise StartError(sentence) from error
        raise
    link.close()


def _memory_loan(child: Child, runner: ModelRunner) -> MemoryLoan | None:
    """Return the owner of memory that can be released, if the options ask for it, with that released which the ledger says."""
    start = child.start
    if not start.args.enable_memory_saver:
        return None
    from srt.model_executor.memory.memory_loan import memory_loan

    loan = memory_loan(runner, WeightsSource(start.model_folder, start.checkpoint_version))
    if start.ledger.released:
        loan.release(start.ledger.released, start.ledger.weights, lambda: None)
    return loan


def _grammar_loader(child: Child, runner: ModelRunner) -> GrammarLoader:
    """Return the loader of grammars. It reads the tokenizer when the first grammar comes."""
    start, config = child.start, runner.loaded.config

    def read_vocabulary() -> Vocabulary:
        from srt.constrained.vocabulary import Vocabulary
        from srt.utils.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(start.args.tokenizer_path or start.model_folder)
        return Vocabulary(tokenizer, config.vocab_size, config.eos_token_ids)

    return GrammarLoader(read_vocabulary)


def load_runner(child: Child) -> ModelRunner:
    """Import torch, connect to the other ranks, load the weights and set up the memory."""
    start = child.start
    child.report_phase("imports")
    import torch

    from srt.distributed.rendezvous import init_pipeline, init_tensor_parallel
    from srt.model_executor.loaded_model import link_stages, most_divided_bytes, most_sum_bytes, resolve_device
    from srt.model_executor.startup.start_runner import start_runner

    # A worker's operations run one after the other, so threads that run several at once would only take cores. The number of threads
    # in one operation is OMP_NUM_THREADS, which child_process.py sets.
    torch.set_num_interop_threads(1)
    args = start.args
    layout = ReplicaLayout.of(args, start.replica)
    rank = layout.rank_of(start.index)
    config = ModelConfig.served_from(start.model_folder, args)
    device = resolve_device(args, start.index)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        threading.Thread(target=_hash_compiler, name="compiler's hash", daemon=True).start()
    child.report_phase("communicator")
    stage, tp_rank = layout.stage_of(rank), layout.tp_rank_of(rank)
    meeting_of = _meetings(start, rank)
    exchange = _meet_experts(start, layout, device) if layout.groups > 1 else None
    tp = init_tensor_parallel(
        tp_rank,
        layout.tp,
        meeting_of("" if layout.pp == 1 else f"stage-{stage}-"),
        "gloo" if device.type == "cpu" else "nccl",
        device,
        args.dist_timeout,
        maps_peers=not args.disable_custom_all_reduce,
        expert_groups=1 if exchange is not None else args.ep_size,
        exchange=exchange,
        most_sum_bytes=most_sum_bytes(args, config),
        most_divided_bytes=most_divided_bytes(args, config),
    )
    pipeline = init_pipeline(
        stage, layout.pp, meeting_of(f"pipeline-{tp_rank}-"), args.dist_timeout, args.window + layout.pp - 1
    )
    link_stages(args, config, pipeline, device)
    child.report_phase("weights")
    with tp.naming_lost_peer():
        return start_runner(
            args,
            config,
            start.model_folder if start.ledger.weights is None else start.ledger.weights.folder,
            tp,
            device,
            report_weights=_Throttled(lambda done, total: child.report_phase("weights", done, total)),
            report_phase=child.report_phase,
            num_tokens=start.num_tokens,
            pipeline=pipeline,
        )


def _meet_experts(start: ChildStart, layout: ReplicaLayout, device: torch.device) -> ExpertExchange:
    """Meet the ranks of all attention groups, and delete the files at which those of the engine before have met."""
    from srt.distributed.rendezvous import init_expert_exchange

    number, args = start_number(start.generation, start.args.dp_size), start.args
    Path(calls_path(start.run_dir, start.index, number - 1)).unlink(missing_ok=True)

    def meeting(purpose: str) -> str:
        _file_of(start, f"{purpose}-rendezvous-", number - 1).unlink(missing_ok=True)
        return str(_file_of(start, f"{purpose}-rendezvous-", number))

    return init_expert_exchange(
        start.index,
        [calls_path(start.run_dir, rank, number) for rank in range(args.tp_size)],
        layout.groups,
        meeting,
        device,
        args.dist_timeout,
        maps_peers=not args.disable_custom_all_reduce,
        expert_groups=args.ep_size,
    )


def _file_of(start: ChildStart, name: str, number: int) -> Path:
    return Path(start.run_dir, f"{name}{number}")


def _meetings(start: ChildStart, rank: int) -> Callable[[str], str | TcpMeeting]:
    """Return a function that says where the ranks of a group meet: at a port if they are on several hosts, else at a file."""
    from srt.distributed.rendezvous import TcpMeeting

    points = start.meeting
    if points is None or not points.ranks:
        return lambda group: _rendezvous(start, group)
    return TcpMeeting(points.ranks, points.address, start.args.dist_timeout, leads=rank == 0).named


def _rendezvous(start: ChildStart, group: str) -> str:
    """Return the file at which the ranks of a group of this generation meet, and delete that of the generation before."""
    before = previous_generation(start.generation, start.args.dp_size)
    _file_of(start, f"{group}rendezvous-", before).unlink(missing_ok=True)
    return str(_file_of(start, f"{group}rendezvous-", start.generation))


def _hash_compiler() -> None:
    """Compute the hash of Triton's files early. The first kernel needs it, and it covers hundreds of megabytes.

    This runs in a thread, beside the main one: hashing releases the GIL.
    """
    from triton.runtime.cache import triton_key

    triton_key()


def hello_of(rank: int, page_size: int, runner: ModelRunner) -> WorkerHello:
    loaded, state = runner.loaded, runner.state
    return WorkerHello(
        rank=rank,
        protocol_hash=protocol_hash(),
        config_hash=loaded.config.config_hash(),
        dtype=str(loaded.dtype).removeprefix("torch."),
        page_size=page_size,
        num_pages=state.num_pages,
        num_slots=state.num_slots,
        num_stages=loaded.stage.num_stages,
        max_request_tokens=state.max_request_tokens,
        vocab_size=loaded.config.vocab_size,
        max_row_tokens=runner.max_row_tokens,
        num_graphs=runner.graphs.num_left,
        windows=list(state.windows),
        window_pages=list(state.window_pages),
    )


def facts_of(runner: ModelRunner) -> dict[str, Scalar]:
    loaded, state = runner.loaded, runner.state
    return {
        "device": str(loaded.device),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "attention_backend": loaded.attention.name,
        "max_total_num_tokens": state.max_total_num_tokens,
        "max_request_tokens": state.max_request_tokens,
        "num_pages": state.num_pages,
        "weight_bytes": loaded.weight_bytes,
        "kv_bytes": state.kv_bytes,
    }


class _Throttled:
    """Filter that passes on at most ten reports a second, and the last one."""

    def __init__(self, report: Callable[[int, int], None]) -> None:
        self._report = report
        self._next_s = 0.0

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s or done == total:
            self._next_s = now_s + 0.1
            self._report(done, total)
