"""Create the drafter that guesses next tokens, as the options say."""

from __future__ import annotations

from dataclasses import replace

from srt.model_executor.graphs.decode_runner import DecodeRunner
from srt.model_executor.graphs.step_graphs import StepGraphs
from srt.model_executor.loaded_model import LoadedModel, load_model
from srt.model_executor.memory.device_state import DeviceState
from srt.model_executor.model_drafter import ModelDrafter, drafting_state
from srt.model_executor.model_runner import ModelRunner
from srt.model_executor.step.step_sampler import StepSampler
from srt.speculative.drafter import Drafter
from srt.speculative.ngram import NgramDrafter
from srt.utils.draft_model import draft_model_args
from srt.utils.model_config import ModelConfig


def start_drafter(loaded: LoadedModel, state: DeviceState) -> Drafter:
    """Create the drafter of a model's server. A smaller model is loaded here."""
    args = loaded.args
    folder = args.speculative_draft_model_path
    if folder is None:
        least, longest = args.speculative_ngram_min_match_window_size, args.speculative_ngram_max_match_window_size
        return NgramDrafter(state.req_to_token_pool.token_table, least, longest)
    draft_args = draft_model_args(args)
    config = replace(ModelConfig.served_from(folder, draft_args), context_length=loaded.config.context_length)
    small = load_model(draft_args, config, folder, loaded.tp, loaded.device)
    small_state = drafting_state(small, state)
    decodes = DecodeRunner.of(small, small_state, None, None)
    return ModelDrafter(ModelRunner(small, small_state, StepSampler(small, small_state), StepGraphs(small, decodes)))
