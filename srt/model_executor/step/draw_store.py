"""Where a step's draws go: into the token table, where the next step reads them, and to the host, which sees them arrive.

On a GPU the kernel that stores them writes to page-locked memory of the host: there is no copy to launch, and no event.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from srt.layers.sampler import Draws
from srt.model_executor.graphs.cuda_graph_runner import Work
from srt.protocol.messages import Int32Array

RING: Final = 8  # stores whose ids are kept
LOOKS: Final = 256  # at a step whose ids do not come; then the device is asked how it is
TAG_BITS: Final = 32

Launch = Callable[..., bool]
"""Takes what `store_draws_reference` takes, and does the same in the order of launches. Whether it does: False if it is only recorded
or compiled."""


class DrawStore:
    """Stores are numbered from 1 on, by the device as it runs them and by the host as it launches them.

    `words` [RING, max_rows] int64 hold `number << 32 | id` of the store `number` in entry `number % RING`: a word is written at once,
    so a row's id is there when its word has the number that is expected.

    Both sides count the same. There are two ways to launch a store, `store` and `replay`, and each counts where it launches: warm-ups
    and padding too, but not what a graph records or a precompiling compiles. Whose ids are never read was counted all the same. Stores
    run one after the other, in the order of their launches. A fault in this is found: whoever waits for ids asserts when the device is
    idle, and whoever launches a store asserts that the device has not run one of that number.
    """

    def __init__(self, words: torch.Tensor, last: torch.Tensor, launch: Launch, is_idle: Callable[[], bool]) -> None:
        """Both tensors begin with zeros; `last` [1] int64, on the device, is the number of its last store, for others to read.
        `is_idle` says whether the device has done all that was launched, and raises what made it fail."""
        self.is_idle = is_idle
        self.last = last
        self._words = words
        self._launch = launch
        # [rows, 2] int32 each, as little-endian words lie there: the id, then the number's low half.
        self._entries = list(words.numpy().view(np.int32).reshape(*words.shape, 2))
        self._number = 0  # of the last store that was launched

    @classmethod
    def allocate(cls, device: torch.device, max_rows: int, window: int) -> DrawStore:
        """For steps on the current stream, as many at a time as the window says."""
        assert window < RING, f"{window} steps at a time, and the ids of {RING} are kept"
        is_cuda = device.type == "cuda"
        words = torch.zeros((RING, max_rows), dtype=torch.int64, pin_memory=is_cuda)
        last = torch.zeros(1, dtype=torch.int64, device=device)
        if not is_cuda:
            return cls(words, last, store_draws_reference, lambda: True)
        return cls(words, last, cuda_launch(), torch.cuda.current_stream(device).query)

    def store(self, draws: Draws, row_slots: torch.Tensor, positions: torch.Tensor, token_table: torch.Tensor) -> None:
        """Row i drew its id for position `positions[i]` of slot `row_slots[i]`."""
        self._check_count()
        if self._launch(draws.ids, draws.values, row_slots, positions, token_table, self._words, self.last):
            self._number += 1

    def replay(self, graph: Work) -> None:
        """Launch a graph that holds one `store`, or what stands in for it and calls `store`."""
        self._check_count()
        before = self._number
        graph()
        self._number = before + 1

    @property
    def next_number(self) -> int:
        """Of the store that will be launched next."""
        return self._number + 1

    def has_run(self, number: int) -> bool:
        """Whether the device has run this store, one of the last RING that were launched; there is none below 1."""
        return number < 1 or self._entries[number % RING].item(1) == _tag(number)

    def latest(self, num_rows: int) -> StepIds:
        """Of the last store that was launched, the first rows; zeros where none ever was."""
        return StepIds(self, self._number, num_rows)

    def read(self, number: int, num_rows: int) -> Int32Array | None:
        """The ids that this store was given for its first rows, -1 where a value was not finite; None until all of them are there."""
        pairs, tag = self._entries[number % RING], _tag(number)
        if pairs.item(2 * num_rows - 1) != tag:  # which is all that most looks cost
            return None
        # First all numbers, then the ids: between them lies more than a processor has under way, so no id is older than its number. To copy
        # both at once is no good, as memory may be moved in pieces of words. By bytes, as arithmetic on arrays is dear in cold caches.
        if pairs[:num_rows, 1].tobytes() != tag.to_bytes(4, "little", signed=True) * num_rows:
            return None
        ids = np.frombuffer(pairs[:num_rows, 0].tobytes(), np.int32)
        ahead = self._number - number
        assert ahead < RING, f"the ids of store {number} may be overwritten: {ahead} were launched behind it"
        return ids

    def _check_count(self) -> None:
        """Ids that nobody counted would be taken for those of the next store."""
        number = self._number + 1
        tag = self._entries[number % RING].item(1)
        assert tag != _tag(number), f"the device has run a store {number}, and {number - 1} were launched"


def _tag(number: int) -> int:
    """The low half of the number, as an int32."""
    low = number & 0xFFFFFFFF
    return low - (low >> 31 << TAG_BITS)


class StepIds:
    """A step's ids on their way to the host. A device that fails raises, and one that is done without having stored them asserts."""

    def __init__(self, store: DrawStore, number: int, num_rows: int) -> None:
        self._store = store
        self._number = number
        self._num_rows = num_rows
        self._ids: Int32Array | None = None
        self._num_looks = 0

    def is_ready(self) -> bool:
        """Whether `wait` returns at once. Costs next to nothing until it does."""
        if self._ids is None:
            self._ids = self._store.read(self._number, self._num_rows)
            self._num_looks += 1
            if self._ids is None and self._num_looks % LOOKS == 0:
                self._ask_device()
        return self._ids is not None

    def wait(self) -> Int32Array:
        while not self.is_ready():
            time.sleep(0)  # other threads may run
        assert self._ids is not None
        return self._ids

    def _ask_device(self) -> None:
        if self._store.is_idle():
            self._ids = self._store.read(self._number, self._num_rows)
            assert self._ids is not None, (
                f"the device is done, and {self._num_rows} ids of store {self._number} are not there"
            )


def cuda_launch() -> Launch:
    """The kernel. A store that a graph records or a precompiling compiles does not run."""
    # Triton is not there on every host: it is imported where there is a GPU.
    from srt.kernels.build.precompile import is_precompiling
    from srt.kernels.elementwise.gather_decode import store_draws

    def launch(*tensors: torch.Tensor) -> bool:
        store_draws(*tensors)
        return not (is_precompiling() or torch.cuda.is_current_stream_capturing())

    return launch


def store_draws_reference(
    ids: torch.Tensor,
    values: torch.Tensor,
    row_slots: torch.Tensor,
    positions: torch.Tensor,
    token_table: torch.Tensor,
    words: torch.Tensor,
    last: torch.Tensor,
) -> bool:
    """What the kernel `store_draws` does, in plain PyTorch, and at once."""
    token_table[row_slots, positions] = ids.to(torch.int32)
    told = ids.masked_fill(~torch.isfinite(values), -1)
    last += 1
    words[int(last) % len(words), : len(ids)] = (last << TAG_BITS) | (told & 0xFFFFFFFF)
    return True
