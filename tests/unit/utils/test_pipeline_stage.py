"""Which layers each stage runs, and which divisions are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from srt.managers.process.replica_layout import ReplicaLayout, layouts_of
from srt.server_args import ServerArgs
from srt.utils.errors import StartError
from srt.utils.option import ArgumentError
from srt.utils.pipeline_stage import Stage, stages_of


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "counts", "expected"),
    [
        (4, 1, (), [range(4)]),
        (7, 3, (), [range(3), range(3, 5), range(5, 7)]),
        (7, 2, (2, 5), [range(2), range(2, 7)]),
    ],
)
def test_stages_have_all_layers_in_order(
    num_layers: int, num_stages: int, counts: tuple[int, ...], expected: list[range]
) -> None:
    stages = stages_of(num_layers, num_stages, counts)
    assert [stage.layers for stage in stages] == expected
    assert [stage.is_first for stage in stages] == [True] + [False] * (num_stages - 1)
    assert [stage.is_last for stage in stages] == [False] * (num_stages - 1) + [True]


def test_the_embedding_is_on_the_stages_that_use_its_weight() -> None:
    stages = stages_of(3, 3)
    assert [stage.has_embedding(is_tied=False) for stage in stages] == [True, False, False]
    assert [stage.has_embedding(is_tied=True) for stage in stages] == [True, False, True]
    assert stages_of(5, 1) == [Stage.whole(5)]


def test_divisions_that_do_not_fit_the_model_are_refused() -> None:
    with pytest.raises(StartError, match=r"^--pp-size 3 is more than the 2 layers of the model: choose at most 2\.$"):
        stages_of(2, 3)
    with pytest.raises(StartError, match=r"^--pp-layer-partition 1 2 has 3 layers in all, but the model has 4\.$"):
        stages_of(4, 2, (1, 2))


def test_rank_0_is_of_the_last_stage() -> None:
    layout = ReplicaLayout(tp=2, replica=1, pp=3)
    assert [layout.stage_of(rank) for rank in range(6)] == [2, 2, 1, 1, 0, 0]
    assert [layout.tp_rank_of(rank) for rank in range(6)] == [0, 1, 0, 1, 0, 1]
    assert [worker.index for worker in layout.workers] == [6, 7, 8, 9, 10, 11]


def test_attention_groups_divide_the_ranks_and_refuse_what_they_do_not_support() -> None:
    args = ServerArgs(model_path="m", tp_size=4, dp_size=2, ep_size=4, enable_dp_attention=True)
    args.check()
    layouts = layouts_of(args)
    assert [(layout.tp, layout.num_ranks, layout.groups) for layout in layouts] == [(2, 2, 2), (2, 2, 2)]
    assert [worker.index for layout in layouts for worker in layout.workers] == [0, 1, 2, 3]
    cases: dict[str, dict[str, Any]] = {
        "needs --dp-size of at least 2": {"dp_size": 1},
        "into 3 groups of --dp-size, which is not possible": {"dp_size": 3},
        "not with --pp-size": {"pp_size": 2},
        "--speculative-algorithm does not work with --enable-dp-attention": {"speculative_algorithm": "NGRAM"},
        "--enable-lora does not work with": {"enable_lora": True},
        "--enable-memory-saver does not work with": {"enable_memory_saver": True},
        "--load-format sharded_state does not work with": {"load_format": "sharded_state"},
        "choose another --chunked-prefill-size than -1": {"chunked_prefill_size": -1},
        "--ep-size 3 must divide --tp": {"ep_size": 3},
    }
    for said, options in cases.items():
        with pytest.raises(ArgumentError, match=said):
            replace(args, **options).check()
