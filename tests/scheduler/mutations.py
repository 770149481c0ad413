"""Bugs to plant in a copy of the scheduler, to see whether the simulation finds them. Each is one change of text that must apply once."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "srt"
LEFT_OUT = ("__pycache__", "assets", "compiled")  # a bug is in the sources; what was built of them has none


@dataclass(frozen=True, slots=True)
class Mutation:
    name: str
    file: str  # in srt/
    anchor: str  # a piece of text that the file has once
    change: str  # what stands in its place

    def plant(self, folder: Path) -> None:
        """Copy the package into this folder, with the bug. AssertionError when the text to change is not there any more."""
        text = self.text()
        shutil.copytree(PACKAGE, folder / "srt", ignore=shutil.ignore_patterns(*LEFT_OUT))
        (folder / "srt" / self.file).write_text(text)

    def text(self) -> str:
        """The file with the bug."""
        text = (PACKAGE / self.file).read_text()
        found = text.count(self.anchor)
        assert found == 1, (
            f"the bug {self.name!r} cannot be planted: srt/{self.file} has the text {self.anchor!r} {found} times, not once;"
            " say in tests/scheduler/mutations.py where it belongs now"
        )
        return text.replace(self.anchor, self.change)


MUTATIONS = (
    Mutation(
        "page visible one plan early",
        "managers/scheduler/planner.py",
        "slots.computed_at[slot] = end\n",
        "slots.computed_at[slot] = end; self._memory.insert_computed(request, request.progress.id_bytes, end)\n",
    ),
    Mutation(
        "slot reset after reuse",
        "managers/scheduler/slots.py",
        "self.num_output_at[slot] = 0",
        "late, self._late = getattr(self, '_late', slot), slot; self.num_output_at[late] = 0",
    ),
    Mutation(
        "forgotten pin",
        "managers/scheduler/kv_memory.py",
        "self.tree.unpin(hold.node)",
        "hold.num_in_tree > 3 or self.tree.unpin(hold.node)",
    ),
    Mutation(
        "double insert",
        "mem_cache/radix_cache.py",
        "child = node.children.get(key)\n            if child is None:",
        "child = node.children.get(key)\n            if child is None or child.pins > 1:",
    ),
    Mutation(
        "off-by-one page at a boundary",
        "managers/scheduler/planner.py",
        "is_lacking = ends > slots.num_pages[rows] * self._memory.page_size",
        "is_lacking = ends > slots.num_pages[rows] * self._memory.page_size + 1",
    ),
    Mutation(
        "lost abort",
        "managers/scheduler/scheduler.py",
        "if choice in (-1, r.choice)]",
        "if choice in (-1, r.choice) and not r.progress.num_preempted]",
    ),
    Mutation(
        "wrong preemption order",
        "managers/scheduler/planner.py",
        "self._preempt(max(self.running(), key=_order))",
        "self._preempt(sorted(self.running(), key=_order)[-2:][0])",
    ),
    Mutation(
        "preempted row's token dropped",
        "managers/scheduler/results.py",
        "                self._planner.preempted.append(request, token)\n",
        "                pass\n",
    ),
    Mutation(
        "resubmission delivered twice",
        "managers/tokenizer_manager/request_ledger.py",
        "choice.is_gap, choice.asked_from, choice.done = False, -1, None",
        "choice.is_gap, choice.asked_from, choice.done, choice.num_released = False, -1, None, 0",
    ),
)


MORE_MUTATIONS = (
    Mutation(
        "a suspect is tried beside what is in flight",
        "managers/scheduler/scheduler.py",
        "if core.planner.trials.are_some_left and not core.stream.is_empty:",
        "if core.planner.trials.are_some_left and core.stream.num_in_flight > 1:",
    ),
    Mutation(
        "a trial is over with the first token",
        "managers/scheduler/trials.py",
        ">= tried.trial_end",
        ">= tried.trial_end - 3",
    ),
    Mutation(
        "others are admitted between two trials",
        "managers/scheduler/trials.py",
        "if tried is None and self._queue:",
        "if tried is None and self._queue and self._on_trial is None:",
    ),
    Mutation(
        "one lone death is enough",
        "managers/tokenizer_manager/request_ledger.py",
        "CONVICTED = 2",
        "CONVICTED = 1",
    ),
    Mutation(
        "whoever was in flight is blamed for what others on the host did",
        "managers/tokenizer_manager/request_ledger.py",
        "is_suspected=choice.was_in_flight and by_request",
        "is_suspected=choice.was_in_flight",
    ),
    Mutation(
        "deaths count together however far a request came in between",
        "managers/tokenizer_manager/request_ledger.py",
        "self.num_deaths = self.num_lone_deaths = 0",
        "pass",
    ),
    Mutation(
        "nobody is alone",
        "managers/scheduler/core.py",
        "LastWord(rids, choices, len(incarnations) == 1)",
        "LastWord(rids, choices, False)",
    ),
    Mutation(
        "last words forget prompts that are not through",
        "managers/scheduler/worker_stream.py",
        "for rows in (one.sampling_incarnations.tolist(), one.extends.values())",
        "for rows in (one.sampling_incarnations.tolist(),)",
    ),
    Mutation(
        "eviction of a pinned page",
        "mem_cache/radix_cache.py",
        "_unlink(node)\n        node.pins += 1",
        "node.serial % 3 == 0 or _unlink(node)\n        node.pins += 1",
    ),
    Mutation(
        "salt ignored",
        "mem_cache/radix_cache.py",
        "return salt.encode() + page if salt and node is self.root else page",
        "return page",
    ),
    Mutation(
        "only the end of a prefix counts as hit",
        "mem_cache/radix_cache.py",
        "            step.num_hits += 1\n            step = step.parent",
        "            step.num_hits += 1\n            step = None",
    ),
    Mutation(
        "most recently used goes first",
        "mem_cache/radix_cache.py",
        "_put_before(self._line, step)",
        "_put_before(self._line if step.serial % 7 else self._line.newer, step)",
    ),
    Mutation(
        "flush keeps a page",
        "mem_cache/radix_cache.py",
        "return self.evict(self.num_pages)",
        "return self.evict(max(self.num_pages - 1, 0))",
    ),
    Mutation(
        "pages leak when a prompt is aborted",
        "managers/scheduler/kv_memory.py",
        "self._free(hold.own_copies + slots",
        "request.progress.prompt_done and self._free(hold.own_copies + slots",
    ),
    Mutation(
        "own copies forgotten",
        "managers/scheduler/kv_memory.py",
        "self._free(hold.own_copies + slots",
        "self._free(slots",
    ),
    Mutation(
        "page in the tree before it is full",
        "managers/scheduler/kv_memory.py",
        "min(computed, len(ids) // ITEM) // self.page_size",
        "min(computed + 1, len(ids) // ITEM) // self.page_size",
    ),
    Mutation(
        "prefix hit of a whole prompt",
        "managers/scheduler/request.py",
        "tokens = self.num_known - 1",
        "tokens = self.num_known",
    ),
    Mutation(
        "resumed choice draws with another's seed",
        "managers/scheduler/request.py",
        "choice_seed(seed, self.choice)",
        "choice_seed(seed, index)",
    ),
    Mutation(
        "resumed request counts its answer as prompt",
        "managers/scheduler/request.py",
        "self.prompt_len: Final = len(prompt) // ITEM",
        "self.prompt_len: Final = (len(prompt) + len(message.output_ids[index])) // ITEM",
    ),
    Mutation(
        "token delivered twice by who loses its slot",
        "managers/scheduler/slots.py",
        "request.delivery.sent = self.sent_at[slot]",
        "request.delivery.sent = max(self.sent_at[slot] - 1, 0)",
    ),
    Mutation(
        "acknowledgement window of nine",
        "managers/scheduler/outbox.py",
        "len(self._unacknowledged) < MAX_UNACKNOWLEDGED",
        "len(self._unacknowledged) <= MAX_UNACKNOWLEDGED",
    ),
    Mutation(
        "lost credit of an acknowledgement",
        "managers/scheduler/outbox.py",
        "while self._unacknowledged and self._unacknowledged[0].number <= number:",
        "if self._unacknowledged and self._unacknowledged[0].number <= number:",
    ),
    Mutation(
        "timeout that does not free its slot",
        "managers/scheduler/scheduler.py",
        "self._core.planner.end(request, keep_prefix=",
        "status == 504 or self._core.planner.end(request, keep_prefix=",
    ),
    Mutation(
        "time that begins anew with each admission",
        "managers/scheduler/planner.py",
        "if progress.started_s is None:",
        "if progress.started_s is None or progress.num_preempted:",
    ),
    Mutation(
        "waiting time counted twice",
        "managers/scheduler/deadlines.py",
        "if now < first.arrived_s + self._waiting_s:",
        "if now < first.arrived_s + 2 * self._waiting_s:",
    ),
    Mutation(
        "priority inversion",
        "managers/scheduler/ranking.py",
        "request.arrived_s - request.priority * self._aging_s",
        "request.arrived_s + request.priority * self._aging_s",
    ),
    Mutation(
        "displaced by one that is hardly more important",
        "managers/scheduler/ranking.py",
        "request.priority - running.priority >= self._threshold",
        "request.priority - running.priority >= 1",
    ),
    Mutation(
        "who comes back stands behind the others",
        "managers/scheduler/waiting.py",
        "not self._line or self._heap[0][0] < self._line[0].place.order",
        "not self._line or self._heap[0][0] > self._line[0].place.order",
    ),
    Mutation(
        "preempted row comes back too early",
        "managers/scheduler/preempted.py",
        "if last_step <= self._answered_step",
        "if last_step <= self._answered_step + 1",
    ),
    Mutation(
        "abort of one choice ends all",
        "managers/scheduler/scheduler.py",
        "if choice in (-1, r.choice)]",
        "if choice >= -1]",
    ),
    Mutation(
        "range asked for begins one too late",
        "managers/scheduler/scheduler.py",
        "max(ask.first, 0))",
        "max(ask.first, 0) + 1)",
    ),
    Mutation(
        "guessed tokens lack a page at a boundary",
        "managers/scheduler/planner.py",
        "np.minimum(self._slots.most_computed[rows] - ends, self.row_tokens)",
        "np.minimum(self._slots.most_computed[rows] - ends, self.row_tokens - 1)",
    ),
    Mutation(
        "plan allows more ids than it has room for",
        "managers/scheduler/planner.py",
        "decodes.astype(np.int32), self.row_tokens)",
        "decodes.astype(np.int32), self._max_row_tokens)",
    ),
    Mutation(
        "ids that a step might bring are counted by the most of any step",
        "managers/scheduler/planner.py",
        "slots.computed[rows] + self.row_tokens",
        "slots.computed[rows] + self._max_row_tokens",
    ),
    Mutation(
        "ids that did not come are counted by the present plan",
        "managers/scheduler/results.py",
        "missing = planned.row_tokens - counts[decoding]",
        "missing = self._planner.row_tokens - counts[decoding]",
    ),
    Mutation(
        "ids that did not come stay counted where a plan allows one",
        "managers/scheduler/results.py",
        "self._slots.computed[rows[decoding]] -= missing",
        "self._slots.computed[rows[decoding]] -= missing * (planned.row_tokens > 2)",
    ),
    Mutation(
        "ids behind a stop are kept",
        "managers/scheduler/results.py",
        "alive[going] = [slot not in ended for slot in rows[going].tolist()]",
        "alive[going] = [slot not in ended or round_ == 1 for slot in rows[going].tolist()]",
    ),
    Mutation(
        "guessed tokens enter the tree",
        "managers/scheduler/planner.py",
        "return min(computed, max(request.progress.num_known, request.prompt_len + request.progress.num_output - 1))",
        "return computed",
    ),
    Mutation(
        "row twice in the pipeline",
        "managers/scheduler/planner.py",
        "max(step - self._num_stages, self._answered_step)",
        "max(step - self._num_stages + 1, self._answered_step)",
    ),
    Mutation(
        "row of the step before twice in the pipeline",
        "managers/scheduler/planner.py",
        "            slots.planned_at[decodes] = step\n",
        "            slots.planned_at[decodes[1:]] = step\n",
    ),
    Mutation(
        "row decodes while its prompt is in the pipeline",
        "managers/scheduler/planner.py",
        "                slots.planned_at[extend_slots] = step\n",
        "                slots.planned_at[extend_slots[:0]] = step\n",
    ),
    Mutation(
        "a step of a pipeline takes the rows of all",
        "managers/scheduler/planner.py",
        "share = -(-len(self._decoding) // self._num_stages)",
        "share = len(self._decoding)",
    ),
    Mutation(
        "a pipeline's window is longer than its stages",
        "managers/scheduler/core.py",
        "self.window = args.window + hello.num_stages - 1",
        "self.window = args.window + 2 * (hello.num_stages - 1)",
    ),
    Mutation(
        "prompts take all the time that there is",
        "managers/scheduler/step_times.py",
        "return self.decode_us + self._stall_us if num_streams",
        "return 8 * self.decode_us + self._stall_us if num_streams",
    ),
    Mutation(
        "every request counts as watched",
        "managers/scheduler/slots.py",
        "            request.stream,\n",
        "            True,\n",
    ),
    Mutation(
        "nobody watches a stream that outlived a scheduler",
        "managers/tokenizer_manager/request_ledger.py",
        "resumed=entry.was_sent,",
        "resumed=entry.was_sent, stream=False,",
    ),
    Mutation(
        "a decode left out of a step with prompts",
        "managers/scheduler/planner.py",
        "wanting: Int64Array = rows[wants] if 0 in wants.tobytes() else rows",
        "wanting: Int64Array = (rows[wants] if 0 in wants.tobytes() else rows)[len(self._prefilling) > 3 :]",
    ),
    Mutation(
        "pause kept by a frontend that is gone",
        "managers/scheduler/scheduler.py",
        "self._pauses.end_of(number)",
        "pass",
    ),
    Mutation(
        "silence counts while the supervisor itself was stopped",
        "managers/supervisor/replacer.py",
        "if life.last_beat_s is not None:\n                life.last_beat_s = now_s",
        "pass",
    ),
    Mutation(
        "who says first that a process is gone is to blame",
        "managers/supervisor/replacer.py",
        "if number and not self.signal:",
        "if False:",
    ),
    Mutation(
        "a slow step counts as standing still",
        "managers/supervisor/replacer.py",
        "progress_age_s > self.stuck_s",
        "progress_age_s > self.stuck_s / 2",
    ),
    Mutation(
        "the scheduler ends before frontends",
        "managers/supervisor/replacer.py",
        '("frontend", grace_s), ("scheduler", ENDING_S)',
        '("scheduler", ENDING_S), ("frontend", grace_s)',
    ),
    Mutation(
        "whoever ends in a drain hands on the word to end",
        "managers/supervisor/replacer.py",
        "not self._of_role(self._stopping_role)",
        "True",
    ),
    Mutation(
        "a gap is asked for from one token too far",
        "managers/tokenizer_manager/request_ledger.py",
        "Send(AskRange(rid, index, missing))",
        "Send(AskRange(rid, index, missing + 1))",
    ),
    Mutation(
        "no pause is ever answered",
        "managers/scheduler/scheduler.py",
        "self._pauses.ask(client, call)",
        "pass",
    ),
    Mutation(
        "a pause is answered while steps are in flight",
        "managers/scheduler/scheduler.py",
        "(core.stream.num_in_flight == 0 or not self._pauses.is_on)",
        "core.stream.num_in_flight < 2",
    ),
    Mutation(
        "cached tokens told wrong",
        "managers/scheduler/kv_memory.py",
        "hold.cached_tokens = min(hold.num_in_tree * self.page_size, request.prompt_len)",
        "hold.cached_tokens = min(7 * hold.num_in_tree * self.page_size + 1, request.prompt_len)",
    ),
    Mutation(
        "turned away though slots are free",
        "managers/scheduler/core.py",
        "self.planner.num_waiting >= self._max_queued + self.slots.num_free",
        "self.planner.num_waiting >= self._max_queued",
    ),
    Mutation(
        "a failed prompt stays in the cache",
        "managers/scheduler/scheduler.py",
        "keep_prefix=status != 500",
        "keep_prefix=True",
    ),
    Mutation(
        "load never told",
        "managers/scheduler/scheduler.py",
        "        effects += self._report_load(self._core, now)\n",
        "",
    ),
    Mutation(
        "captures while requests wait",
        "managers/scheduler/scheduler.py",
        "return is_good and core.stream.can_capture",
        "return core.stream.can_capture",
    ),
    Mutation(
        "workers that compile are asked with every step",
        "managers/scheduler/scheduler.py",
        "self._capture_from_s = self._compiling_until_s = self._now",
        "self._capture_from_s = self._now",
    ),
    Mutation(
        "a graph that is there is still missed",
        "managers/scheduler/worker_stream.py",
        "if rank == 0:  #",
        "if rank > 0:  #",
    ),
    Mutation(
        "the urgent wait like all others",
        "managers/scheduler/ranking.py",
        "            return -inf, request.serial\n",
        "            return 0.0, request.serial\n",
    ),
    # ---- What plans owe
    Mutation(
        "a prompt logprob is lost by who loses its slot",
        "managers/scheduler/request.py",
        "told = computed + 1 ",
        "told = computed + 2 ",
    ),
    Mutation(
        "prompt logprobs are told twice to who loses its slot",
        "managers/scheduler/request.py",
        "told = computed + 1 ",
        "told = computed ",
    ),
    Mutation(
        "top logprobs are forgotten with the slot",
        "managers/scheduler/request.py",
        "replace(self.logprobs, prompt_start=self.prompt_start)",
        "replace(self.logprobs, prompt_start=self.prompt_start, top=0)",
    ),
    Mutation(
        "logprobs of tokens in flight are lost with the slot",
        "managers/scheduler/results.py",
        "            away = self._planner.preempted.find(incarnation)\n",
        "            away = None\n",
    ),
    Mutation(
        "the time in the queue counts to the end",
        "managers/scheduler/scheduler.py",
        "else started_s - request.arrived_s,",
        "else self._now - request.arrived_s,",
    ),
    Mutation(
        "lost slots are not counted",
        "managers/scheduler/request.py",
        "self.num_preempted += 1",
        "self.num_preempted = 1",
    ),
    Mutation(
        "nobody wakes up for a running timeout",
        "managers/scheduler/deadlines.py",
        "if self._running_s is not None:\n            times +=",
        "if self._running_s is None:\n            times +=",
    ),
    Mutation(
        "nobody wakes up for a waiting timeout",
        "managers/scheduler/deadlines.py",
        "times.append(first.arrived_s + self._waiting_s)",
        "pass",
    ),
    Mutation(
        "the time of the preempted stands still",
        "managers/scheduler/planner.py",
        "return [*self.running(), *self.preempted.requests()]",
        "return [*self.running()]",
    ),
    Mutation(
        "the preempted come back before there is room for them",
        "managers/scheduler/planner.py",
        "        if request.progress.num_preempted:\n            return request.max_tokens\n",
        "",
    ),
    Mutation(
        "the urgent displace nobody",
        "managers/scheduler/ranking.py",
        "return not running.urgent",
        "return False",
    ),
    Mutation(
        "all urgent ones are forgotten when one gets a slot",
        "managers/scheduler/planner.py",
        "        self._num_urgent -= request.urgent\n        self._num_admitted",
        "        self._num_urgent = 0\n        self._num_admitted",
    ),
    Mutation(
        "the important displace nobody",
        "managers/scheduler/ranking.py",
        "return self.has_priorities and is_worth_it",
        "return False and is_worth_it",
    ),
    Mutation(
        "a forecast that never forgets",
        "managers/scheduler/forecast.py",
        "            counts[used[oldest]] -= 1\n",
        "",
    ),
    Mutation(
        "the first in rank is displaced",
        "managers/scheduler/planner.py",
        "lower.sort(key=_order, reverse=True)",
        "lower.sort(key=_order)",
    ),
    Mutation(
        "all are displaced whose place may be taken",
        "managers/scheduler/planner.py",
        "while lower and (max(missing) > 0 or (needs_slot and not victims)):",
        "while lower:",
    ),
    Mutation(
        "who found no room is not tried again when one ends",
        "managers/scheduler/planner.py",
        "        request.progress.status = Status.ENDED\n        self._no_room_for = None\n",
        "        request.progress.status = Status.ENDED\n",
    ),
    Mutation(
        "the forecast learns from the urgent",
        "managers/scheduler/planner.py",
        "            if not request.urgent:\n                self._forecast",
        "            if True:\n                self._forecast",
    ),
    Mutation(
        "short prompts wait for long ones",
        "managers/scheduler/planner.py",
        "kept, kept_us = (draft.budget + 1) // 2,",
        "kept, kept_us = draft.budget,",
    ),
    Mutation(
        "two compute the same prefix side by side",
        "managers/scheduler/planner.py",
        "if behind in draft.coming and num_cached <",
        "if False and num_cached <",
    ),
    Mutation(
        "all is evicted when a page is lacking",
        "managers/scheduler/kv_memory.py",
        "some = min(max(missing, self._evicted_at_once), self.tree.num_evictable)",
        "some = self.tree.num_evictable",
    ),
    Mutation(
        "hits are not counted",
        "managers/scheduler/kv_memory.py",
        "        if cached:\n            self.tree.note_hit(node)\n",
        "",
    ),
    Mutation(
        "answers are not cached",
        "managers/scheduler/planner.py",
        "self._memory.insert_computed(request, request.bytes_with_outputs(), self._num_written(request))",
        "self._memory.insert_computed(request, request.progress.id_bytes, self._num_written(request))",
    ),
    Mutation(
        "who loses its slot leaves nothing in the cache",
        "managers/scheduler/planner.py",
        "        self._vacate(request, keep_prefix=True)\n        request.progress.lose",
        "        self._vacate(request, keep_prefix=False)\n        request.progress.lose",
    ),
    Mutation(
        "who asks for a prompt's logprobs finds nothing in the cache",
        "managers/scheduler/request.py",
        "tokens = min(tokens, max(self.prompt_start - 1, 0))",
        "tokens = 0",
    ),
    Mutation(
        "only the end of a prefix counts as used",
        "mem_cache/radix_cache.py",
        "            step.last_used = self._clock\n            if step.pins == 0",
        "            if step is node: step.last_used = self._clock\n            if step.pins == 0",
    ),
    Mutation(
        "the clock of the prefix cache stands still",
        "mem_cache/radix_cache.py",
        "        self._clock += 1\n",
        "        pass\n",
    ),
    Mutation(
        "what the cache has counts as computed again",
        "managers/scheduler/planner.py",
        "self._counters.num_recomputed_tokens += progress.num_known - num_cached",
        "self._counters.num_recomputed_tokens += progress.num_known",
    ),
)

# These are found by stories of replaced processes, not by worlds.
REPLACEMENT_MUTATIONS = tuple(
    Mutation(name, "managers/supervisor/replacer.py", anchor, change)
    for name, anchor, change in (
        (
            "an old deadline kills the next process",
            "        self._deadlines = [\n            replace(deadline, children=others)",
            "        _ = [\n            replace(deadline, children=others)",
        ),
        (
            "a child that was killed once is not killed again",
            "        self._killed.discard(child)\n        self._last_words",
            "        self._last_words",
        ),
        (
            "last words of the old one explain the next one's end",
            "        self._last_words.pop(child, None)\n",
            "",
        ),
        (
            "started while something is left",
            "any(member in self._alive or member in self._away for one in together for member in one.members)",
            "all(member in self._alive or member in self._away for one in together for member in one.members)",
        ),
        (
            "an attention group starts while processes of another are left",
            "member in self._away for one in together for member in one.members",
            "member in self._away for member in group.members",
        ),
        (
            "an attention group goes on without the others",
            "for one in self._together(group) for effect in self._lose(",
            "for one in [group] for effect in self._lose(",
        ),
        (
            "started while its host is away",
            "member in self._alive or member in self._away for",
            "member in self._alive for",
        ),
        (
            "without a replica the server waits for the host",
            "self.state is State.READY and len(engines) == len(self._engines)",
            "False",
        ),
        (
            "workers are replaced without the scheduler",
            'key for key in self._alive if key.role != "frontend"',
            'key for key in self._alive if key.role == "worker"',
        ),
        (
            "an engine keeps its generation",
            "group.generation = next_generation(group.generation, len(self._engines))",
            "pass",
        ),
        (
            "what was replaced long ago still counts",
            "if now_s - when_s < CALM_S]",
            "if now_s - when_s < 4 * CALM_S]",
        ),
        (
            "replacements are not counted",
            "        group.losses_s.append(now_s)\n",
            "",
        ),
        (
            "frontends are not told of the next engine",
            "cause.sentence), *self._tell_frontends(replaced)]",
            "cause.sentence), TellRuntime(replaced)]",
        ),
        (
            "a frontend that was replaced is not told that the server is ready",
            "return [*self._greet(group.members), ServesAgain",
            "return [*self._greet([m for m in group.members if group.is_engine]), ServesAgain",
        ),
        (
            "a frontend takes the engine along",
            "group = self._groups[child]\n        if self.state is State.STOPPING:",
            "group = next(iter(self._groups.values()))\n        if self.state is State.STOPPING:",
        ),
        (
            "it serves again with the first that is ready",
            "if not all(self._alive[member].ready for member in group.members):",
            "if not any(self._alive[member].ready for member in group.members):",
        ),
    )
)
