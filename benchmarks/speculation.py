"""Drafts that are verified: tokens a step and ms a token by number of rows, beside the same steps without drafts and beside the limit.

    python -m benchmarks.speculation --model-path qwen3-8b --load-format dummy --rows 1,64 --accept 2
                                     --speculative-algorithm NGRAM --speculative-num-draft-tokens 4 [any option of the server]

The number of drafts that are right in each step is forced, so that time and luck are apart: of its drafts every row keeps the first
`--accept`. All rows bring all drafts that the options allow. With a smaller model or a head its steps are timed too; without one drafts
cost nothing.

The limit of a step is the time for the bytes that it and its drafts read, or for their products (`speculation_limits.py`), at the rates of
the device in this run. Where bytes rule both limits, that of the gain does not depend on the rate.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks import limits, models
from benchmarks.decode_steps import WARM_UP, Steps, print_kernels
from benchmarks.speculation_limits import RoundShape
from srt.distributed.parallel_state import TensorParallel
from srt.layers.sampler import Draws
from srt.model_executor.graph_speculation import GraphSpeculatingRunner
from srt.model_executor.graphs.verified_tokens import OFFSETS, SLOTS
from srt.model_executor.graphs.verify_runner import VerifyRunner
from srt.model_executor.loaded_model import resolve_device
from srt.model_executor.model_runner import ModelRunner
from srt.model_executor.startup.start_runner import start_runner
from srt.protocol.messages import PlanSection
from srt.server_args import ServerArgs, parse_args
from srt.speculative.drafter import DraftLimits, DraftRows, Ints
from srt.utils.model_config import ModelConfig


class FixedLimits(DraftLimits):
    """All rows always bring as many drafts as they may."""

    def note(self, slots: Ints, num_drafts: Ints, num_right: Ints) -> None:
        """Learn nothing."""


class AnyDrafter:
    """Drafts whatever the tables hold."""

    def reset(self) -> None:
        """Do nothing."""

    def enter_changes(self, changes: PlanSection) -> None:
        """Do nothing."""

    def read_prompts(self, section: PlanSection) -> None:
        """Do nothing."""

    def enter_pages(self, changes: PlanSection) -> None:
        """Do nothing."""

    def can_draft_ahead(self, slots: Ints) -> bool:
        return True

    def draft(self, rows: DraftRows) -> Ints:
        return rows.most

    def draft_ahead(self, rows: DraftRows) -> Ints:
        return rows.most

    def note_lengths(self, slots: Ints, lengths: Ints) -> None:
        """Do nothing."""


def force(verifier: VerifyRunner, num_right: int) -> None:
    """Make the draws behind a row's first `num_right` tokens equal its drafts, and the next differ. Call it before graphs are captured."""
    accept, tables = verifier.accept, verifier._tables

    def forced(draws: Draws) -> None:
        size = len(draws.ids)
        staged = verifier._staged.tensor[:, :size]
        drafted = tables.tokens(staged[SLOTS], verifier.next_positions(size))
        other = torch.where(drafted > 0, drafted - 1, drafted + 1)
        ids = torch.where(staged[OFFSETS] < num_right, drafted, torch.where(draws.ids == drafted, other, draws.ids))
        accept(Draws(ids, torch.where(torch.isfinite(draws.values), draws.values, 0.0)))

    verifier.accept = forced  # type: ignore[method-assign]


def runner_of(args: ServerArgs, folder: str) -> ModelRunner:
    config = ModelConfig.from_folder(
        folder, args.model_overrides(), quantization=args.quantization, model_impl=args.model_impl
    )
    device = resolve_device(args, 0)
    return start_runner(args, config, folder, TensorParallel(0, 1, None, torch.device("cpu")), device)


@dataclass(frozen=True, slots=True)
class Timed:
    """A step as measured."""

    ms: float
    context: float  # tokens before each row, in the middle of the measurement


def measure(runner: ModelRunner, sizes: list[int], options: Any, tokens_a_step: int, kept: int) -> dict[int, Timed]:
    """Return the fastest round's step by number of rows. A step computes up to `tokens_a_step` tokens of a row, and keeps `kept`."""
    runner.graphs.capture_all()
    most = (len(sizes) * options.rounds * (WARM_UP + options.steps + 4) + 2) * tokens_a_step
    steps = Steps(runner, [options.context] * sizes[0], most)
    found = {}
    for num_rows in sizes:
        rounds = []
        for _ in range(options.rounds):
            steps.run(num_rows, WARM_UP)
            # Lengths grow by one in each step here, however many tokens it keeps
            num_before = float(steps.lengths[:num_rows].mean()) - options.context
            context = options.context + kept * (num_before + options.steps / 2)
            rounds.append(Timed(steps.run(num_rows, options.steps) / options.steps * 1e3, context))
        found[num_rows] = min(rounds, key=lambda timed: timed.ms)
        if options.kernels and tokens_a_step > 1:
            print_kernels(steps, num_rows)
    return found


def measure_drafts(args: ServerArgs, folder: str, sizes: list[int], options: Any) -> dict[int, Timed]:
    runner = runner_of(args, folder)
    if not isinstance(runner, GraphSpeculatingRunner):
        raise SystemExit("This benchmark times the steps of a GPU, and there is none.")
    runner._limits = FixedLimits(runner.state.num_slots, args.num_drafts)
    if args.speculative_draft_model_path is None:
        runner._drafter = AnyDrafter()
    force(runner._verifier, options.accept)
    return measure(runner, sizes, options, 1 + args.num_drafts, 1 + options.accept)


def figure_of(
    num_rows: int, plain: Timed, drafted: Timed, kept: int, shapes: Sequence[RoundShape], device: limits.Device
) -> dict[str, float]:
    """Return what was measured for these rows beside the limits. `shapes` are those of a plain step and of one with drafts."""
    plain_limit_ms, limit_ms = (
        shape.round_s(device, num_rows, timed.context) * 1e3
        for shape, timed in zip(shapes, (plain, drafted), strict=True)
    )
    gain, limit_gain = kept * plain.ms / drafted.ms, kept * plain_limit_ms / limit_ms
    return {
        "rows": num_rows,
        "plain_ms": plain.ms,
        "drafts_ms": drafted.ms,
        "gain": gain,
        "context": drafted.context,
        "plain_limit_ms": plain_limit_ms,
        "drafts_limit_ms": limit_ms,
        "limit_gain": limit_gain,
        "of_limit": gain / limit_gain,
    }


def text_of(figure: Mapping[str, float], kept: int) -> str:
    step_ms, drafts_ms = figure["plain_ms"], figure["drafts_ms"]
    return (
        f"{figure['rows']:4.0f} rows of {figure['context']:.0f}: step {step_ms:7.3f} ms (limit {figure['plain_limit_ms']:.3f}), with drafts"
        f" {drafts_ms:7.3f} ms (limit {figure['drafts_limit_ms']:.3f}), {drafts_ms / step_ms:.2f} ×; {drafts_ms / kept:7.3f} ms a token,"
        f" {figure['gain']:.2f} × as fast (limit {figure['limit_gain']:.2f} ×, ratio {figure['of_limit']:.2f})"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="qwen3-0.6b", help="a shape in benchmarks/configs, or any model")
    parser.add_argument("--draft", help="likewise, of the smaller model")
    parser.add_argument("--rows", type=limits.numbers, default="64,32,1", help="numbers of rows")
    parser.add_argument("--accept", type=int, default=2, help="drafts that are right in each step")
    parser.add_argument("--context", type=int, default=512, help="positions of a row at first")
    parser.add_argument("--steps", type=int, default=30, help="of a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kernels", action="store_true", help="also the kernels that take the most time with drafts")
    parser.add_argument("--jsonl", help="append the result to this file")
    options, server_options = parser.parse_known_args()
    sizes = sorted(set(options.rows), reverse=True)
    if min(*sizes, options.context, options.steps, options.rounds) < 1:
        parser.error("--rows, --context, --steps and --rounds take numbers from 1 on")
    folder = models.folder_of(options.model_path)
    given = ["--max-running-requests", str(sizes[0]), "--cuda-graph-bs", *map(str, sizes), *server_options]
    if options.draft:
        given += ["--speculative-draft-model-path", models.folder_of(options.draft)]
    args = parse_args(["--model-path", folder, *given])
    if not 0 <= options.accept <= args.num_drafts:
        parser.error(f"--accept takes numbers up to that of drafts, which is {args.num_drafts}")
    plain_args = replace(
        args,
        speculative_algorithm=None,
        speculative_draft_model_path=None,
        speculative_num_steps=None,
        speculative_num_draft_tokens=None,
    )
    device, shapes = limits.measured(), (RoundShape.of(plain_args), RoundShape.of(args))
    plain = measure(runner_of(plain_args, folder), sizes, options, 1, 1)
    gc.collect()  # the first runner's memory
    torch.cuda.empty_cache()
    drafted = measure_drafts(args, folder, sizes, options)
    kept = 1 + options.accept
    print(f"{options.model_path}, {args.num_drafts} drafts, {kept} tokens a step; {limits.versions()}")
    print(f"{device.name}: {device.read_bytes_s / 1e12:.2f} TB/s, {device.matmul_flops_s / 1e12:.0f} TFLOP/s")
    figures = []
    for num_rows in sizes:
        figures.append(figure_of(num_rows, plain[num_rows], drafted[num_rows], kept, shapes, device))
        print(text_of(figures[-1], kept), flush=True)
    record = {"benchmark": "speculation", "model": options.model_path, "draft": options.draft, "accept": options.accept}
    limits.write_jsonl(
        options.jsonl,
        {
            **record,
            "options": server_options,
            "steps": figures,
            "device": asdict(device),
            "versions": limits.versions(),
        },
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
