"""Run the steps that plans describe: one rank's model, on its device's state."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property

import numpy as np
import torch

from srt.kernels.cpu.decode_step import MOST_ROWS
from srt.layers.attention.base import Reading
from srt.layers.logits_processor import LogitsProcessorOutput, Logprobs
from srt.layers.moe.expert_load import ExpertLoads
from srt.layers.token_masks import MaskBuffers, TokenMasks
from srt.mem_cache.tables_hash import tables_hash
from srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from srt.model_executor.graphs.step_graphs import StepGraphs
from srt.model_executor.loaded_model import LoadedModel
from srt.model_executor.memory.device_state import DeviceState
from srt.model_executor.step.executed_step import (
    DecodeOutput,
    ExecutedStep,
    ModelRunnerOutput,
    VerifiedRows,
    VerifyOutput,
)
from srt.model_executor.step.plan_arrays import PlanArrays, write_tables
from srt.model_executor.step.step_output import StepOutput
from srt.model_executor.step.step_planner import DecodeStep, HostStep, StepPlanner
from srt.model_executor.step.step_sampler import LogprobParts, StepSampler
from srt.model_executor.update_groups import UpdateGroups
from srt.model_executor.weight_inspection import inspect_weights
from srt.model_executor.weight_saving import save_weights
from srt.model_executor.weight_update import update_weights
from srt.protocol.engine_work import InspectWeights, NewWeights, SaveWeights
from srt.protocol.messages import PlanSection, Scalar, int32_array
from srt.sampling.sampling_batch_info import SamplingBatchInfo

NO_SLOTS = int32_array()


class ModelRunner:
    """Runs steps one after the other. Ranks of a replica make the same calls in the same order.

    `startup/start_runner.py` creates it. A worker's process calls `launch` for every step, or the two halves of it, `execute` and
    `sample`. Between steps the process may call `reset`, `inspect` and `graphs.capture_next`. It also reads `loaded` and `state`.
    """

    def __init__(self, loaded: LoadedModel, state: DeviceState, sampler: StepSampler, graphs: StepGraphs) -> None:
        """Without `graphs.decodes` decode steps run like any other step; so they do in startup/trial_runner.py, which has no graphs."""
        self.loaded = loaded
        self.state = state
        self.graphs = graphs
        self._sampler = sampler
        self._decode_runner = graphs.decodes
        self._adapters = None if loaded.adapters is None else loaded.adapters.step
        self.update_groups = UpdateGroups(loaded)
        self._planner = self._new_planner()
        self._inspected_loads = ExpertLoads(loaded.model)
        self.expert_loads = ExpertLoads(loaded.model)
        """For the worker's process, which reports them. Inspections have a reader of their own."""

    def _new_planner(self) -> StepPlanner:
        state = self.state
        return StepPlanner(state.num_slots, state.num_pages, state.page_size, state.windows, state.window_pages)

    @property
    def planner(self) -> StepPlanner:
        """The host's record of the slots."""
        return self._planner

    def write_changes(self, section: PlanSection) -> None:
        """Write a section's admissions and pages into the tables. Its rows, if it has any, are not run."""
        changes = PlanSection(section.admissions, section.pages, NO_SLOTS, NO_SLOTS, NO_SLOTS, NO_SLOTS, NO_SLOTS)
        write_tables(self.loaded.staging.copy(self._planner.plan(changes).arrays), self.state.req_to_token_pool)

    def launch(self, section: PlanSection) -> StepOutput:
        """Run both halves of a step. The caller must be in inference mode.

        This method does not enter that mode for each step, because entering it takes as long as planning a decode step.
        """
        return self._sample(self._execute(section), None)

    @torch.inference_mode()
    def execute(self, section: PlanSection) -> ExecutedStep:
        """Apply the plan's changes to the tables, run the model, and compute the logits of the rows that sample."""
        return self._execute(section)

    @torch.inference_mode()
    def sample(self, step: ExecutedStep, masks: TokenMasks | None = None) -> StepOutput:
        """Draw an id for every row that samples, and store it in the token table, where the next step reads it.

        `masks`, if given, says which tokens some of the rows may draw.
        """
        return self._sample(step, masks)

    def warming_up(self) -> AbstractContextManager[None]:
        """Inside, what drafts runs only as many layers as together use all of its kernels."""
        return nullcontext()

    @torch.inference_mode()
    def reset(self) -> None:
        """Empty all tables on the host and on the device. The KV memory is not cleared, because no page refers to it any more."""
        self.state.req_to_token_pool.clear()
        if self._adapters is not None:
            self._adapters.clear()
        self._planner = self._new_planner()

    @torch.inference_mode()
    def update_weights(self, work: NewWeights, report: Callable[[], None]) -> str:
        """Replace the weights in place (weight_update.py), and whatever was made of them. Return the version of the files, if any."""
        files = update_weights(self.loaded, work, self.update_groups, report)
        step = None if self._decode_runner is None else self._decode_runner.cpu_step
        if step is not None:
            step.read_weights_again()
        return files

    @torch.inference_mode()
    def inspect_weights(self, work: InspectWeights, report: Callable[[], None]) -> dict[str, Scalar]:
        """Return hashes of the weights, or values of one (weight_inspection.py)."""
        return inspect_weights(self.loaded, work, report)

    @torch.inference_mode()
    def save_weights(self, work: SaveWeights, report: Callable[[], None]) -> dict[str, Scalar]:
        """Write this rank's weights to a folder (weight_saving.py)."""
        return save_weights(self.loaded, work, report)

    @property
    def is_called(self) -> bool:
        """Whether ranks of other attention groups wait for this one, which is to call `join`. A model without such groups has none."""
        return False

    def when_called(self, notify: Callable[[], None]) -> None:
        """Let another thread call `notify` whenever `is_called` becomes true."""

    def join(self) -> None:
        """Take part in a step of other attention groups, without tokens."""

    @property
    def max_row_tokens(self) -> int:
        """The most ids that a decode row gets in one step."""
        return 1

    @cached_property
    def mask_buffers(self) -> MaskBuffers:
        """The memory for masks of tokens, allocated when the first row needs one."""
        loaded = self.loaded
        return MaskBuffers(self.state.num_slots, loaded.config.vocab_size, loaded.device)

    def inspect(self) -> dict[str, Scalar]:
        """Return a hash of the page table, as WorkDone defines it, the number of slots in it, and the number of compiled decode steps."""
        tables, slots = self.state.req_to_token_pool.page_tables.cpu().numpy(), self._planner.slots
        pages = {
            slot: np.concatenate([table[slot, slots.first_column(n, slot) : end] for n, table in enumerate(tables)])
            for slot, end in slots.num_pages_of_admitted().items()
        }
        values: dict[str, Scalar] = {"tables_hash": tables_hash(pages), "num_slots_seen": len(pages)}
        if self._decode_runner is not None and self._decode_runner.compiled is not None:
            values["num_compiled_steps"] = self._decode_runner.compiled.num_steps
        return values | self._expert_values()

    def _expert_values(self) -> dict[str, Scalar]:
        """Return, for models with experts, what its layers took since the last inspection: means of steps, layer after layer."""
        loads = self._inspected_loads.read()
        if not loads:
            return {}
        return {
            "distinct_experts": round(sum(load.distinct for load in loads) / len(loads), 2),
            "distinct_experts_of_layers": " ".join(f"{load.distinct:.2f}" for load in loads),
            "peak_loads_of_layers": " ".join(f"{load.peak:.2f}" for load in loads),
        }

    # ---- The model

    def _execute(self, section: PlanSection) -> ExecutedStep:
        if self._adapters is not None:
            self._adapters.admit(section.admissions)
            if self._adapters.are_in(section):
                return self._execute_adapted(section)
        decodes = None if self._decode_runner is None else self._planner.plan_decodes(section)
        if decodes is not None:
            return self.forward_decode(decodes)
        return self._execute_planned(self._planner.plan(section))

    def _execute_adapted(self, section: PlanSection) -> ExecutedStep:
        assert self._adapters is not None
        if self._decode_runner is not None and self._adapters.of_decodes is not None:
            decodes = self._planner.plan_decodes(section)
            if decodes is not None:
                return self.forward_decode(decodes._replace(reading=Reading.ADAPTED))
        return self._execute_planned(self._planner.plan(section))

    def _execute_planned(self, host: HostStep) -> ModelRunnerOutput:
        state = self.state
        plan = self.loaded.staging.copy(host.arrays)
        write_tables(plan, state.req_to_token_pool)
        batch = ForwardBatch.init_new(
            host.rows, plan.rows, state.req_to_token_pool, state.token_to_kv_pool, self.loaded.attn_backend
        )
        info = sampling_info(plan, batch)
        if self._is_few_tokens(batch, host):
            return ModelRunnerOutput(info, host, plan, LogitsProcessorOutput(self._logits_of_few(batch, plan), None))
        samplers = self._sampler.padded(plan.sample_tokens)
        if not (len(plan.prompt_logprobs.rows) or self._sampler.reads_all_tokens):
            batch.output_tokens = samplers
        with nullcontext() if self._adapters is None else self._adapters.applied(host.rows, batch.output_tokens):
            hidden = self.forward(batch)
        outputs = self._sampler.outputs_of(hidden, batch, samplers, plan.sample_rows)
        logits = None
        if info.num_rows:
            logits = self._sampler.logits_of(outputs)[: info.num_rows]
        output = LogitsProcessorOutput(logits, self._prompt_logprobs(hidden, batch, host, plan))
        return ModelRunnerOutput(info, host, plan, output)

    def _is_few_tokens(self, batch: ForwardBatch, host: HostStep) -> bool:
        """Return whether the code that runs decode steps on a CPU is the fastest for this step, and computes all that it needs."""
        step = None if self._decode_runner is None else self._decode_runner.cpu_step
        if (
            step is None
            or self.graphs.pieces is not None
            or self._adapters is not None
            or host.prompt_logprobs.segments
        ):
            return False
        return 0 < batch.num_extend_tokens <= step.few_tokens and len(batch.input_ids) <= MOST_ROWS

    def _logits_of_few(self, batch: ForwardBatch, plan: PlanArrays[torch.Tensor]) -> torch.Tensor | None:
        """Run such a step. Return the logits of the rows that sample."""
        assert self._decode_runner is not None and self._decode_runner.cpu_step is not None, "`_is_few_tokens` asks"
        slots = torch.cat((plan.rows.token_slots, plan.rows.slots[batch.num_extend_rows :]))
        logits = self._decode_runner.cpu_step.logits_of(batch, slots)
        return logits[plan.sample_tokens].float() if len(plan.sample_tokens) else None

    def forward_decode(self, step: DecodeStep) -> DecodeOutput:
        """Compute the logits of a step in which every row decodes, in fixed buffers; replay a graph if there is one."""
        assert self._decode_runner is not None, "a runner without graphs.decodes has no fixed buffers for decode steps"
        return DecodeOutput(step, self._decode_runner.forward(step))

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the hidden states [tokens, hidden size]: of the batch's `output_tokens`, or of all tokens if that is None."""
        return self.forward_idle() if batch.forward_mode is ForwardMode.IDLE else self.forward_extend(batch)

    def forward_extend(self, batch: ForwardBatch) -> torch.Tensor:
        """Compute the hidden states of any step that has rows. Steps with prompt tokens or admissions come here, others if they must."""
        is_adapted = self._adapters is not None and self._adapters.is_applied
        pieces = self.graphs.adapted_pieces if is_adapted else self.graphs.pieces
        if pieces is not None and pieces.can_run(batch):
            return pieces.replay(batch)
        self.loaded.attn_backend.init_forward_metadata(batch)
        hidden: torch.Tensor = self.loaded.model(batch.input_ids, batch.positions, batch)
        return hidden

    def forward_idle(self) -> torch.Tensor:
        """Return the empty hidden states of a step without rows."""
        loaded = self.loaded
        return torch.empty((0, loaded.config.hidden_size), dtype=loaded.dtype, device=loaded.device)

    def _prompt_logprobs(
        self, hidden: torch.Tensor, batch: ForwardBatch, host: HostStep, plan: PlanArrays[torch.Tensor]
    ) -> Logprobs | None:
        arrays = plan.prompt_logprobs
        if not len(arrays.rows):
            return None
        # The rows are extend tokens, which come first in the batch. Each predicts the token after it.
        tables = self.state.req_to_token_pool
        targets = tables.tokens(plan.rows.token_slots[arrays.rows], batch.positions[arrays.rows] + 1)
        return self.loaded.logits_processor.prompt_logprobs(
            hidden, self.loaded.model.lm_head, arrays, targets, host.prompt_logprobs.top
        )

    # ---- The draws

    def _sample(self, step: ExecutedStep, masks: TokenMasks | None) -> StepOutput:
        assert not isinstance(step, VerifiedRows | VerifyOutput), "only a runner that speculates has such steps"
        if isinstance(step, DecodeOutput):
            return self._sample_decodes(step, masks)
        output, device, draw_store = step.logits_output, self.loaded.device, self.loaded.draw_store
        parts = self._prompt_parts(step)
        ids = None
        if output.next_token_logits is not None:
            info = step.sampling_info
            draws, logprobs = self._sampler.draws_of(step, output.next_token_logits, masks)
            parts += logprobs
            draw_store.store(draws, info.slots, info.positions, self.state.req_to_token_pool.token_table)
            ids = draw_store.latest(info.num_rows)
        return StepOutput(ids, parts, device)

    def _prompt_parts(self, step: ModelRunnerOutput) -> LogprobParts:
        """Return the prompt logprobs of a step with their segments, if it has any."""
        logprobs, segments = step.logits_output.prompt_logprobs, step.host.prompt_logprobs.segments
        if logprobs is None and not segments:
            return []
        return [(logprobs or _no_logprobs(self.loaded.device), segments)]

    def _sample_decodes(self, output: DecodeOutput, masks: TokenMasks | None) -> StepOutput:
        runner, step, loaded = self._decode_runner, output.step, self.loaded
        assert runner is not None, "a runner without graphs.decodes has no fixed buffers for decode steps"
        num_rows = len(step.slots)
        if self._sampler.draws_by_row(step.kind):
            self._sampler.mask(output.logits, masks)
            runner.sample(step)
            return StepOutput(loaded.draw_store.latest(num_rows), [], loaded.device)
        arrays = loaded.staging.copy_sampling(self._planner.sampling_of(step))
        info = runner.sampling_info(step, arrays.sampling)
        logits = output.logits.to(torch.float32)
        draws, logprobs = self._sampler.draw(logits, info, masks, step.output_logprobs, arrays.output_logprobs)
        runner.store(draws)
        return StepOutput(loaded.draw_store.latest(num_rows), logprobs, loaded.device)


def sampling_info(plan: PlanArrays[torch.Tensor], batch: ForwardBatch) -> SamplingBatchInfo:
    """Return the rows that sample in a step of this plan."""
    return SamplingBatchInfo(
        num_rows=len(plan.sample_rows),
        slots=plan.rows.slots[plan.sample_rows],
        positions=batch.positions[plan.sample_tokens] + 1,
        arrays=plan.sampling,
    )


def _no_logprobs(device: torch.device) -> Logprobs:
    floats = torch.empty((0, 0), device=device)
    return Logprobs(floats.view(0), torch.empty((0, 0), dtype=torch.int32, device=device), floats, floats)
