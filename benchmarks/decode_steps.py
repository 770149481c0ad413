"""Decode steps of a worker by themselves, without the other processes: ms a step by number of rows, and the kernels that it is made of.

    python -m benchmarks.decode_steps --model-path qwen3-8b --load-format dummy [--rows 256,64] [--mixed] [--kernels] [any option
                                      of the server]

For comparing two states of the kernels, in processes one after the other on one machine: everything else is left out. The rows' earlier
positions are random and were never computed. With more than one round the first shows a cool device, the last one that has run for a while;
its clock and power say whether it could not run faster. Steps of few rows come last: rows get longer all the time.

With --tp N there are N ranks, which --ep-size may divide. With --enable-dp-attention --dp-size G the rows are divided between G groups.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from benchmarks import limits, models
from benchmarks.gpu_readings import watched
from benchmarks.step_ranks import connect, other_ranks
from srt.distributed.parallel_state import TensorParallel
from srt.layers.moe.expert_load import ExpertLoads
from srt.model_executor.loaded_model import resolve_device
from srt.model_executor.model_runner import ModelRunner
from srt.model_executor.startup.start_runner import start_runner
from srt.model_executor.step.step_output import StepOutput
from srt.protocol.messages import Admission, LogprobSpec, PageDelta, PlanSection, SamplingSpec, int32_array
from srt.server_args import ServerArgs, parse_args
from srt.utils.model_config import ModelConfig
from srt.utils.page_groups import first_column

SHORTEST, LONGEST = 128, 2048  # positions of mixed rows
WARM_UP = 4  # steps before each round
PROFILED = 4
LISTED = 14
LEAST_EXPERTS = 0.95  # share of the distinct experts of even routing that a step must read
E4M3_BELOW_2 = 0xBF  # bits of a number, of which others may be none


class Steps:
    """A runner whose slots all hold a request that never ends."""

    def __init__(
        self,
        runner: ModelRunner,
        lengths: list[int],
        most_steps: int,
        temperature: float = 0.6,
        adapters: Sequence[str] | None = None,
    ) -> None:
        """`adapters` are the keys of the slots' adapters; without it no slot has one."""
        self._runner = runner
        self.lengths = np.array(lengths)
        empty, ones, slots = int32_array(), np.ones(len(lengths), np.int32), int32_array(range(len(lengths)))
        rng = np.random.default_rng(0)
        num_pages = -(-(self.lengths + most_steps + 1) // runner.state.page_size)
        pages = int32_array(rng.permutation(int(num_pages.sum())))  # anywhere
        spec = SamplingSpec(max_new_tokens=most_steps + 2, temperature=temperature)
        admissions = [
            Admission(
                slot,
                int32_array(rng.integers(0, 100, length)),
                length,
                length - 1,
                slot,
                spec,
                LogprobSpec(),
                adapter=adapters[slot] if adapters else "",
            )
            for slot, length in enumerate(lengths)
        ]
        deltas = [PageDelta(slots, num_pages.astype(np.int32), pages)]
        for window in runner.state.windows:
            first = [first_column(length - 1, window, runner.state.page_size) for length in lengths]
            counts = num_pages - int32_array(first)
            deltas.append(PageDelta(slots, counts.astype(np.int32), int32_array(rng.permutation(int(counts.sum())))))
        self._empty = [PageDelta(empty, empty, empty) for _ in deltas]
        starts = (self.lengths - 1).astype(np.int32)
        self._run(PlanSection(admissions, deltas, slots, starts, ones, ones, empty)).result()

    def run(self, num_rows: int, count: int) -> float:
        """Seconds that so many steps of the first rows take, one of them always ahead of what is read."""
        empty = int32_array()
        section = PlanSection(
            [], self._empty, empty, empty, empty, empty, int32_array(range(num_rows)), self._runner.max_row_tokens
        )
        begin_s, before = time.perf_counter(), None
        for _ in range(count):
            step = self._run(section)
            if before is not None:
                before.result()
            before = step
        if before is not None:
            before.result()
        self.lengths[:num_rows] += count
        return time.perf_counter() - begin_s

    def _run(self, section: PlanSection) -> StepOutput:
        return self._runner.sample(self._runner.execute(section))


def distinct_experts(reader: ExpertLoads) -> float:
    """Return how many experts a step read in a layer since the last call, on average over layers and steps; 0 if there are none."""
    loads = reader.read()
    return sum(load.distinct for load in loads) / len(loads) if loads else 0.0


def experts_text(found: float, expected: float) -> str:
    """Say how many experts were read beside what even routing gives, and whether these are enough for the figure to count."""
    if not expected:
        return ""
    verdict = "" if found >= LEAST_EXPERTS * expected else ", too few: this does not count"
    return f"  experts {found:.1f} of {expected:.1f}{verdict}"


@torch.inference_mode()
def fill_kv_memory(runner: ModelRunner) -> None:
    """Fill it with random numbers: zeros would take less power."""
    for layer in range(runner.loaded.config.num_layers):
        for buffer in runner.state.token_to_kv_pool.get_kv(layer):
            if buffer.dtype.itemsize > 1:
                buffer.normal_()
            else:
                buffer.view(torch.uint8).random_(0, 256).bitwise_and_(E4M3_BELOW_2)


def print_kernels(steps: Steps, num_rows: int) -> None:
    """What takes the most time; quantiles, as one kernel serves several products."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        steps.run(num_rows, PROFILED)
    times: defaultdict[str, list[float]] = defaultdict(list)
    for event in profile.events() or []:
        if "CUDA" in str(event.device_type):
            times[event.name].append(event.device_time)
    for name, found in sorted(times.items(), key=lambda one: -sum(one[1]))[:LISTED]:
        quantiles = " ".join(f"{value:6.1f}" for value in np.quantile(found, (0.05, 0.25, 0.5, 0.75, 0.95)))
        each = len(found) / PROFILED
        print(f"  {sum(found) / PROFILED / 1e3:8.3f} ms {each:6.1f} × µs {quantiles}  {name[:90]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="qwen3-0.6b", help="a shape in benchmarks/configs, or any model")
    parser.add_argument("--rows", type=limits.numbers, default="256,128,64,16", help="numbers of rows, the most first")
    parser.add_argument("--context", type=int, default=1024, help="positions of a row at first")
    parser.add_argument("--mixed", action="store_true", help=f"{SHORTEST} to {LONGEST - 1} positions instead")
    parser.add_argument("--steps", type=int, default=30, help="of a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kernels", action="store_true", help="also the kernels that take the most time")
    parser.add_argument("--plain", action="store_true", help="without the layers' fast paths")
    parser.add_argument("--jsonl", help="append the result to this file")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", default="", help=argparse.SUPPRESS)
    options, server_options = parser.parse_known_args()
    sizes = sorted(set(options.rows), reverse=True)
    if min(*sizes, options.context, options.steps, options.rounds) < 1:
        parser.error("--rows, --context, --steps and --rounds take numbers from 1 on")
    if options.kernels and not torch.cuda.is_available():
        parser.error("--kernels needs a GPU, and PyTorch sees none: leave the option out")
    words = ["--model-path", models.folder_of(options.model_path)]
    groups = num_groups(parse_args([*words, *server_options]))
    sizes = sorted({max(1, size // groups) for size in sizes}, reverse=True)
    given = ["--max-running-requests", str(sizes[0]), "--cuda-graph-bs", *map(str, sizes)]
    args = parse_args([*words, *given, *server_options])
    if args.tp_size == 1 or options.rank:
        return measure(options, args, sizes, server_options)
    with other_ranks("benchmarks.decode_steps", sys.argv[1:], args.tp_size) as options.meeting:
        return measure(options, args, sizes, server_options)


def num_groups(args: ServerArgs) -> int:
    """Return how many attention groups the rows are divided between."""
    return args.dp_size if args.enable_dp_attention else 1


def measure(options: argparse.Namespace, args: ServerArgs, sizes: list[int], server_options: list[str]) -> int:
    """Measure decode steps on one rank; `sizes` are rows of an attention group. What other ranks than the first print is thrown away."""
    groups = num_groups(args)
    most_steps = len(sizes) * (options.rounds * (WARM_UP + options.steps) + PROFILED)
    lengths = [options.context] * sizes[0]
    if options.mixed:
        lengths = np.random.default_rng(1).integers(SHORTEST, LONGEST, sizes[0]).tolist()
    device = resolve_device(args, options.rank)
    config = ModelConfig.from_folder(
        args.model_path, args.model_overrides(), quantization=args.quantization, model_impl=args.model_impl
    )
    if options.plain:
        config = replace(config, layers=tuple(replace(layer, fast_paths=()) for layer in config.layers))
    hardware = limits.Device("", 1.0, 1.0) if options.rank else limits.measured()
    shape = limits.Shape.of(args.model_path, args.kv_cache_dtype, args.model_overrides(), args.quantization)
    of_all = shape.in_groups(groups)
    tp = TensorParallel(0, 1, None, torch.device("cpu"))
    if options.meeting:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        tp = connect(args, options.rank, options.meeting, device)
    runner = start_runner(args, config, args.model_path, tp, device)
    runner.graphs.capture_all()
    fill_kv_memory(runner)
    experts_read = ExpertLoads(runner.loaded.model)
    steps = Steps(runner, lengths, most_steps)
    print(f"{options.model_path} on {hardware.name}; {limits.versions()}")
    figures = []
    for num_rows in sizes:
        for _ in range(options.rounds):
            steps.run(num_rows, WARM_UP)
            distinct_experts(experts_read)
            context, all_rows = float(steps.lengths[:num_rows].mean()) + options.steps / 2, groups * num_rows
            with watched(device) as readings:
                step_ms = steps.run(num_rows, options.steps) / options.steps * 1e3
            distinct = distinct_experts(experts_read)
            limit_ms = of_all.decode_s(hardware.of_ranks(args.tp_size), all_rows, context, distinct) * 1e3
            experts = experts_text(distinct, shape.distinct_experts(all_rows))
            said = f"limit {limit_ms:8.3f}  ratio {step_ms / limit_ms:.2f}{experts}{readings.text()}"
            print(f"{all_rows:4} rows of {context:7.1f} {step_ms:8.3f} ms  {said}", flush=True)
            figure = {"rows": all_rows, "context": context, "step_ms": step_ms, "limit_ms": limit_ms}
            figures.append(figure | ({"distinct_experts": distinct} if distinct else {}))
        if options.kernels:
            print_kernels(steps, num_rows)
    record = {"benchmark": "decode_steps", "model": options.model_path, "options": server_options, "steps": figures}
    if not options.rank:
        limits.write_jsonl(options.jsonl, {**record, "is_mixed": options.mixed, "versions": limits.versions()})
    tp.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
