"""Store a step's draws in the token table, where the next step reads them, and in host memory, where the host polls for them.

On a GPU a kernel writes them to pinned memory of the host, so there is no copy to launch and no event to record.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch

from srt.kernels.cpu.row_operations import row_operations
from srt.layers.sampler import Draws
from srt.model_executor.graphs.cuda_graph_runner import Work
from srt.protocol.messages import Int32Array
from srt.utils.numbered_words import TAG_BITS, pairs_of, read_values, tag_of

RING: Final = 8  # least number of stores whose ids are kept
LOOKS: Final = 256  # polls without a result after which the device is asked for its state

Launch = Callable[..., bool]
"""A function with the arguments and the effect of `store_draws_reference`, in the order of launches. Returns False if the store does not
run because it is only captured in a graph or precompiled."""


class DrawStore:
    """Launches stores of draws and reads their ids. The device numbers the stores that it runs, the host those that it launches, from 1 on.

    Entry `number % ring` of `words` [ring, max_rows] int64 holds `number << 32 | id` for each row of that store. A word is written in one
    piece, so an id has arrived when its word contains the expected number.

    Both counts must agree. `store` and `replay` are the only ways to launch a store, and both count it: also in warm-ups, for padding, and
    if its ids are never read, but not if it is only captured in a graph or precompiled. Stores run in the order of their launches. A
    wrong count is detected: waiting for ids asserts that they are there once the device is idle, and launching a store asserts that the
    device has not run one of that number.
    """

    def __init__(self, words: torch.Tensor, last: torch.Tensor, launch: Launch, is_idle: Callable[[], bool]) -> None:
        """Both tensors must be zero. `last` [1] int64, on the device, is the number of the last store that it ran; kernels may read it.

        `is_idle` returns whether the device has done everything that was launched, and raises the error if the device has failed.
        """
        self.is_idle = is_idle
        self.last = last
        self._words = words
        self._ring = len(words)  # number of stores whose ids are kept
        self._launch = launch
        self._entries = list(pairs_of(words.numpy()))
        self._number = 0  # number of the last store that was launched

    @classmethod
    def allocate(cls, device: torch.device, max_rows: int, window: int) -> DrawStore:
        """Create a store for steps on the current stream, at most `window` of them in flight."""
        is_cuda = device.type == "cuda"
        words = torch.zeros((max(RING, window + 1), max_rows), dtype=torch.int64, pin_memory=is_cuda)
        last = torch.zeros(1, dtype=torch.int64, device=device)
        if not is_cuda:
            compiled = row_operations()
            return cls(words, last, store_draws_reference if compiled is None else compiled.store, lambda: True)
        return cls(words, last, cuda_launch(), torch.cuda.current_stream(device).query)

    def store(self, draws: Draws, row_slots: torch.Tensor, positions: torch.Tensor, token_table: torch.Tensor) -> None:
        """Store the draws. Row i drew its id for position `positions[i]` of slot `row_slots[i]`."""
        self._check_count()
        if self._launch(draws.ids, draws.values, row_slots, positions, token_table, self._words, self.last):
            self._number += 1

    def replay(self, graph: Work) -> None:
        """Launch a graph that contains one store, or a test's stand-in for it that calls `store`."""
        self._check_count()
        before = self._number
        graph()
        self._number = before + 1

    @property
    def next_number(self) -> int:
        """Number of the store that will be launched next."""
        return self._number + 1

    def has_run(self, number: int) -> bool:
        """Return whether the device has run this store, which must be among the last `ring` launched; True for numbers below 1."""
        return number < 1 or self._entries[number % self._ring].item(1) == tag_of(number)

    def latest(self, num_rows: int) -> StepIds:
        """Return the ids of the first rows of the last store that was launched; zeros if none ever was."""
        return StepIds(self, self._number, num_rows)

    def read(self, number: int, num_rows: int) -> Int32Array | None:
        """Return the ids of this store's first rows, -1 where the value was not finite; None until all of them have arrived."""
        ids = read_values(self._entries[number % self._ring], number, num_rows)
        if ids is None:
            return None
        ahead = self._number - number
        assert ahead < self._ring, (
            f"the ids of store {number} may be overwritten: {ahead} stores were launched after it"
        )
        return ids

    def words_of(self, number: int) -> torch.Tensor:
        """Return the words [max_rows] int64 of this store, for kernels that are launched behind it."""
        return self._words[number % self._ring]

    def _check_count(self) -> None:
        """Assert that the device has not run a store that the host did not count: its ids would be taken for those of the next store."""
        number = self._number + 1
        tag = self._entries[number % self._ring].item(1)
        assert tag != tag_of(number), f"the device has run store {number}, but only {number - 1} were launched"


class StepIds:
    """A step's ids on their way to the host. Raises if the device fails, and asserts if it becomes idle without having stored them."""

    def __init__(self, store: DrawStore, number: int, num_rows: int) -> None:
        self._store = store
        self._number = number
        self._num_rows = num_rows
        self._ids: Int32Array | None = None
        self._num_looks = 0

    @property
    def words(self) -> torch.Tensor:
        """The words [rows] int64 of these ids in host memory, for kernels that are launched behind the store."""
        return self._store.words_of(self._number)[: self._num_rows]

    def is_ready(self) -> bool:
        """Return whether `wait` would return at once. Cheap enough to be polled."""
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
                f"the device is idle, but {self._num_rows} ids of store {self._number} have not arrived"
            )


def cuda_launch() -> Launch:
    """Return the function that launches the kernel."""
    # Imported here because Triton is installed only with PyTorch for CUDA.
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
    """Do what the kernel `store_draws` does, in plain PyTorch and at once."""
    token_table[row_slots, positions] = ids.to(torch.int32)
    told = ids.masked_fill(~torch.isfinite(values), -1)
    last += 1
    words[int(last) % len(words), : len(ids)] = (last << TAG_BITS) | (told & 0xFFFFFFFF)
    return True
