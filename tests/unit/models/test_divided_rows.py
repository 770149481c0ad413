"""Steps whose rows two ranks divide compute what others do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from srt.distributed.parallel_state import TensorParallel
from srt.models import decoder
from srt.protocol.messages import LogprobSpec
from tests.support.checkpoints import CheckpointFactory
from tests.support.host_division import divide_from
from tests.support.ranks import run_ranks
from tests.support.runners import logits_in, make_runner
from tests.support.sections import admission, section

LAYERS, DIVIDED = 3, 30
FIRST, SECOND = list(range(5, 28)), list(range(60, 77))


def logits_of_steps(tp: TensorParallel, folder: Path, fewest: int, reports: bool = False) -> list[torch.Tensor]:
    """The logits of a chunk of two prompts, of a chunk of the rest of one with a decode, and of decodes.

    If a request reports logprobs of its prompt, its chunk has the hidden states of all tokens, so it is not divided.
    """
    made, logprobs = divide_from(tp, fewest), LogprobSpec(prompt_start=0 if reports else -1)
    runner = make_runner(folder, 4, tp, max_running_requests=4)
    found = []
    pages = [(0, list(range(20))), (1, list(range(20, 40)))]
    steps = (
        section(
            [admission(0, FIRST, logprobs=logprobs), admission(1, SECOND * 3)], pages, [(0, 0, 23, 1), (1, 0, 17, 0)]
        ),
        section([], [], [(1, 17, 34, 1)], [0]),
        section([], [], [], [0, 1]),
    )
    for step in steps:
        executed = runner.execute(step)
        found.append(logits_in(executed).clone())
        runner.sample(executed).result()
    for division in made:
        assert division.num_sums == division.num_waits == 2 * (LAYERS - 1)
    assert len(made) == (0 if fewest > DIVIDED else 1 if reports else 2)
    return found


@pytest.mark.parametrize(("family", "reports"), [("llama", False), ("qwen2", False), ("qwen3", False), ("qwen3", True)])
def test_a_divided_step_draws_from_the_same_logits(
    family: str, reports: bool, checkpoint: CheckpointFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "DIVIDED_PRODUCTS", 0)
    folder = checkpoint(family, num_layers=LAYERS)
    whole = run_ranks(2, tmp_path, lambda tp: logits_of_steps(tp, folder, 1 << 30, reports))
    divided = run_ranks(2, tmp_path, lambda tp: logits_of_steps(tp, folder, DIVIDED, reports))
    for rank in range(2):
        for one, other in zip(whole[rank], divided[rank], strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


def test_small_layers_are_not_divided(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    """Their products end before the next layer is launched."""
    folder = checkpoint("llama", num_layers=LAYERS)

    def num_divided(tp: TensorParallel) -> int:
        made = divide_from(tp, DIVIDED)
        make_runner(folder, 4, tp).execute(section([admission(0, FIRST * 2)], [(0, [0] * 12)], [(0, 0, 46, 1)]))
        return len(made)

    assert run_ranks(2, tmp_path, num_divided) == [0, 0]
