"""Documents as rows of tokens for training, and which tokens are learned. Made by worker processes, in the same order for any number."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from recipes.tiny.chat import END, END_OF_TEXT, START
from recipes.tiny.corpus import draw_text
from recipes.tiny.tokenizer import load_tokenizer, token_id

ROWS_PER_SHARD = 16


@dataclass(frozen=True, slots=True)
class Rows:
    ids: NDArray[np.uint16]
    """[rows, tokens]"""
    learned: NDArray[np.bool_]
    """[rows, tokens]: whether the token is what the assistant, or a story, says."""


@dataclass(frozen=True, slots=True)
class ShardTask:
    seed: int
    index: int
    row_tokens: int


class Packer:
    """Turns seeds into rows: documents are never cut, each row begins with one, and the little that is left is padding."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._start, self._end = token_id(tokenizer, START), token_id(tokenizer, END)
        self._padding = token_id(tokenizer, END_OF_TEXT)
        self._assistant = tokenizer.encode("assistant\n").ids

    def shard(self, task: ShardTask) -> Rows:
        rng = random.Random(f"{task.seed} {task.index}")
        documents = self._documents(rng, task.row_tokens * ROWS_PER_SHARD, task.row_tokens)
        ids = np.full((ROWS_PER_SHARD, task.row_tokens), self._padding, np.uint16)
        learned = np.zeros(ids.shape, np.bool_)
        for row, chosen in enumerate(_fill_rows(rng, documents, task.row_tokens)):
            at = 0
            for document in chosen:
                ids[row, at : at + len(document)] = document
                learned[row, at : at + len(document)] = self.learned(document)
                at += len(document)
        return Rows(ids, learned)

    def learned(self, document: list[int]) -> NDArray[np.bool_]:
        """All of a story, but of a conversation only what the assistant says, and that it ends there."""
        mask = np.zeros(len(document), np.bool_)
        if document[0] != self._start:
            mask[:] = True
            return mask
        opening = [self._start, *self._assistant]
        for at, token in enumerate(document):
            if token == self._start and document[at : at + len(opening)] == opening:
                first = at + len(opening)
                mask[first : document.index(self._end, first) + 1] = True
        return mask

    def _documents(self, rng: random.Random, num_tokens: int, longest: int) -> list[list[int]]:
        documents: list[list[int]] = []
        count = 0
        while count < num_tokens:
            batch = self._tokenizer.encode_batch_fast([draw_text(rng) for _ in range(32)], add_special_tokens=False)
            fitting = [encoding.ids for encoding in batch if len(encoding.ids) <= longest]
            documents += fitting
            count += sum(map(len, fitting))
        return documents


def _fill_rows(rng: random.Random, documents: list[list[int]], row_tokens: int) -> list[list[list[int]]]:
    """First fit, the longest first; what does not fit is dropped."""
    rows: list[list[list[int]]] = [[] for _ in range(ROWS_PER_SHARD)]
    free = [row_tokens] * ROWS_PER_SHARD
    for document in sorted(documents, key=len, reverse=True):
        row = next((row for row in range(ROWS_PER_SHARD) if free[row] >= len(document)), None)
        if row is not None:
            rows[row].append(document)
            free[row] -= len(document)
    for chosen in rows:
        rng.shuffle(chosen)
    return rows


def _begin_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism


_packers: dict[str, Packer] = {}


def _make_shard(job: tuple[str, ShardTask]) -> Rows:
    """In a worker process. The tokenizer is read once."""
    folder, task = job
    if folder not in _packers:
        _packers[folder] = Packer(load_tokenizer(Path(folder)))
    return _packers[folder].shard(task)


def stream_shards(
    folder: Path, tasks: Iterator[ShardTask], workers: int, ahead: int = 64
) -> Generator[Rows, None, None]:
    """The shards of `tasks`, in order, made by `workers` processes at most `ahead` before they are taken; 0: made right here.

    Closing the generator ends the processes.
    """
    jobs = ((str(folder), task) for task in tasks)
    if workers == 0:
        yield from map(_make_shard, jobs)
        return
    room, closed = threading.Semaphore(ahead), threading.Event()

    def admitted() -> Iterator[tuple[str, ShardTask]]:
        for job in jobs:
            room.acquire()
            if closed.is_set():
                return
            yield job

    with multiprocessing.get_context("spawn").Pool(workers, _begin_worker) as pool:
        try:
            for rows in pool.imap(_make_shard, admitted()):
                room.release()
                yield rows
        finally:
            # The pool's own thread may wait for room; it would never see that the pool ends.
            closed.set()
            room.release()
