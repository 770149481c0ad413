"""Create what guesses next tokens and verifies the guesses, as the options say."""

from __future__ import annotations

from dataclasses import replace

from srt.model_executor.device_ngram import DeviceNgramDrafter
from srt.model_executor.graph_drafter import GraphDrafter
from srt.model_executor.graph_speculation import GraphSpeculatingRunner
from srt.model_executor.graphs.cuda_graph_runner import Capture
from srt.model_executor.graphs.decode_runner import DecodeRunner
from srt.model_executor.graphs.draft_runner import DraftRunner
from srt.model_executor.graphs.step_graphs import StepGraphs
from srt.model_executor.graphs.verify_runner import VerifyRunner
from srt.model_executor.loaded_model import LoadedModel, load_model
from srt.model_executor.memory.device_state import DeviceState
from srt.model_executor.memory.memory_profile import most_verified_tokens
from srt.model_executor.model_drafter import ModelDrafter, drafting_state
from srt.model_executor.model_runner import ModelRunner
from srt.model_executor.speculating_runner import SpeculatingRunner
from srt.model_executor.step.step_sampler import StepSampler
from srt.speculative.drafter import DeviceDrafter
from srt.speculative.ngram import NgramDrafter
from srt.utils.draft_model import draft_model_args
from srt.utils.model_config import ModelConfig

VERIFY_SIZES = (2, 4, 5, 8, 10, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # numbers of tokens to capture
DRAFT_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # numbers of rows to capture


def load_small_model(loaded: LoadedModel) -> LoadedModel | None:
    """Load the smaller model that drafts, if the options name one."""
    args, folder = loaded.args, loaded.args.speculative_draft_model_path
    if folder is None:
        return None
    draft_args = draft_model_args(args)
    config = replace(ModelConfig.served_from(folder, draft_args), context_length=loaded.config.context_length)
    return load_model(draft_args, config, folder, loaded.tp, loaded.device)


def speculating_runner(
    loaded: LoadedModel, state: DeviceState, sampler: StepSampler, graphs: StepGraphs, small: LoadedModel | None
) -> SpeculatingRunner:
    """Create the runner of a server on a CPU that speculates."""
    num_drafts, table = loaded.args.num_drafts, state.req_to_token_pool.token_table
    if small is None:
        ngrams = NgramDrafter(table, *_match_windows(loaded))
        return SpeculatingRunner(loaded, state, sampler, graphs, ngrams, num_drafts)
    small_state = drafting_state(small, state)
    decodes = DecodeRunner.of(small, small_state, None, None)
    drafter = ModelDrafter(ModelRunner(small, small_state, StepSampler(small, small_state), StepGraphs(small, decodes)))
    return SpeculatingRunner(loaded, state, sampler, graphs, drafter, num_drafts)


def graph_speculating_runner(
    loaded: LoadedModel,
    state: DeviceState,
    sampler: StepSampler,
    graphs: StepGraphs,
    small: LoadedModel | None,
    capture: Capture | None,
) -> GraphSpeculatingRunner:
    """Create the runner of a server on a GPU that speculates. Its graphs are added to `graphs`."""
    num_drafts, max_tokens = loaded.args.num_drafts, most_verified_tokens(loaded.args)
    verifier = VerifyRunner(loaded, state, max_tokens, 1 + num_drafts, _sizes_up_to(max_tokens, VERIFY_SIZES), capture)
    drafter: DeviceDrafter
    if small is None:
        drafter = DeviceNgramDrafter(state.req_to_token_pool, *_match_windows(loaded), num_drafts)
        drafter.run_padding()
    else:
        small_state = drafting_state(small, state)
        sizes = _sizes_up_to(state.num_slots, DRAFT_SIZES)
        steps = DraftRunner(small, small_state, state.req_to_token_pool.seq_lens, num_drafts, sizes, capture)
        drafter = GraphDrafter(
            ModelRunner(small, small_state, StepSampler(small, small_state), StepGraphs(small)), steps
        )
        steps.run_padding(1)
        graphs.add(steps)
    verifier.run_padding(max_tokens)
    graphs.add(verifier)
    # All steps of the smaller model are one graph, which takes about as long for few rows as for some more.
    may_rest = small is None
    return GraphSpeculatingRunner(loaded, state, sampler, graphs, verifier, drafter, num_drafts, may_rest=may_rest)


def _match_windows(loaded: LoadedModel) -> tuple[int, int]:
    args = loaded.args
    return args.speculative_ngram_min_match_window_size, args.speculative_ngram_max_match_window_size


def _sizes_up_to(most: int, sizes: tuple[int, ...]) -> list[int]:
    return sorted({size for size in sizes if size < most} | {most})
